"""Common parts of launchers: the files and command of a job, the arguments of torchrun, and process counts."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.storage import is_local, join
from tokenmill.tasks.train.job import JOB, Job
from tokenmill.tasks.train.settings import Launcher, TrainSettings

PROGRAMS: Mapping[Launcher, tuple[str, str]] = {
    "slurm": ("srun", "run this on a login node of the cluster, or submit there the job.sbatch that --dry-run writes"),
    "kubernetes": ("kubectl", "install it, or apply the job.yaml that --dry-run writes from a machine that has it"),
}
"""The program that a launcher runs, and the remedy if it is not installed."""

RUN = ("-m", "torch.distributed.run")
"""Arguments of Python, because the `torchrun` on PATH may belong to another environment."""

TRAINER = ("-m", "tokenmill.tasks.train.trainer")
PEER = "tokenmill.tasks.train.peer"
SCRIPT = "train.sh"
HUGGING_FACE, NULL = "HuggingFaceTokenizer", "NullTokenizer"

NVIDIA_SMI, SECONDS = "nvidia-smi", 60


@dataclass(frozen=True, slots=True)
class Launch:
    """How a training is started.

    `files` are texts by their names in the output folder. `command`, with `environment` added to the current one, starts
    the training. If `runs`, it is run and watched here; otherwise the user runs it elsewhere.
    """

    files: Mapping[str, str]
    command: Sequence[str]
    runs: bool
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


def write_files(launch: Launch, output_dir: str) -> None:
    """Write the files of a launch into the output folder. Raises OSError."""
    for name, text in launch.files.items():
        publish_bytes(join(output_dir, name), text.encode())


def require_program(launcher: Launcher) -> None:
    """Raises InputError when the program that the launcher runs is not installed on this machine."""
    program, remedy = PROGRAMS.get(launcher, (None, ""))
    if program is not None and shutil.which(program) is None:
        raise InputError(f"launcher={launcher}: {program} is not on this machine's PATH; {remedy}")


def local_folder(output_dir: str, launcher: Launcher) -> str:
    """The output folder. Raises InputError unless it is a path, for checkpoints and scripts."""
    if is_local(output_dir):
        return output_dir
    raise InputError(
        f"output_dir={output_dir}: launcher={launcher} keeps checkpoints and scripts in the output folder, which must be in a "
        "file system; name a folder that all machines of the training mount"
    )


def require_files(launcher: Launcher, places: Iterable[str]) -> None:
    """Raises InputError unless the data is in files, because other trainers cannot read object stores."""
    stored = next((place for place in places if not is_local(place)), None)
    if stored is not None:
        raise InputError(
            f"launcher={launcher}: its trainer opens files, but {stored} is in an object store; prepare the data again "
            "with --output-dir, and store where that is set, in a file system that the nodes mount"
        )


def places_of(job: Job) -> list[str]:
    """The folder of the job's data, and its files, which may be in a store elsewhere."""
    return [job.data.path, *(file for source in job.data.sources for file in source.files)]


def hugging_face_name(job: Job) -> str | None:
    """The folder or hub id of the data's tokenizer; None for encodings, single files and pinned revisions."""
    name, revision = str(job.data.tokenizer["model"]), job.data.tokenizer.get("revision")
    single_file = name.endswith((".json", ".model", ".tiktoken"))
    return name if "/" in name and not single_file and revision is None else None


def integral_rope_base(job: Job) -> int:
    """The base of rotary positions. Raises InputError unless it is a whole number, as Megatron requires."""
    base = job.settings.model.rope_base
    if not base.is_integer():
        raise InputError(
            f"model.rope_base={base}: launcher={job.settings.launcher} takes whole numbers only; round it, or set launcher=local"
        )
    return int(base)


def script_lines(words: Sequence[str]) -> str:
    """A command over several lines of a shell script, quoted; an option and its value share a line."""
    lines: list[str] = []
    for word, before in zip(words, ["", *words], strict=False):
        if before.startswith("-") and "=" not in before and not word.startswith("-"):
            lines[-1] += f" {shlex.quote(word)}"
        else:
            lines.append(shlex.quote(word))
    return " \\\n    ".join(lines)


def on_one_machine(processes: int, program: Sequence[str]) -> list[str]:
    """Python's arguments to run `program`, a script or `-m` and a module, in several processes of this machine.

    They meet at the loopback address and any free port, so trainings can share a machine, and a machine needs no name.
    torchrun restarts nothing: a retry resumes the whole run from its checkpoint.
    """
    return [
        *RUN, "--nnodes=1", f"--nproc-per-node={processes}", "--max-restarts=0",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", *program,
    ]  # fmt: skip


def torchrun_words(job: Job, processes: int) -> str:
    """Python's arguments in a bash script to run a program in the processes of one of the job's machines."""
    if job.settings.nodes == 1:
        return " ".join(on_one_machine(processes, []))
    return (
        f"-m torch.distributed.run --nnodes={job.settings.nodes} --nproc-per-node={processes} --max-restarts=0 "
        '--node-rank="${NODE_RANK:?number this machine from 0}" --master-addr="${MASTER_ADDR:?name the first machine}" '
        '--master-port="${MASTER_PORT:-29500}"'
    )


def peer_words(job: Job) -> str:
    """The words in a bash script, before a program of another trainer, that make it follow the job's order and record."""
    return f"-m {PEER} {shlex.quote(join(job.output_dir, JOB))}"


def process_count(settings: TrainSettings) -> int:
    """Processes per machine: the setting, else one per GPU, else one. Raises InputError if the GPUs are on other machines."""
    if settings.processes is not None:
        return settings.processes
    if settings.launcher != "local" and settings.device != "cpu":
        raise InputError(
            f"processes: the GPUs on the machines of launcher={settings.launcher} cannot be counted from here; set processes"
        )
    return 1 if settings.device == "cpu" else max(1, gpu_count())


def gpu_count() -> int:
    """The GPUs that a process started here would see, by nvidia-smi and CUDA_VISIBLE_DEVICES.

    torch would take 2 s to import, and leave a context on the device. Raises InputError when the driver does not answer.
    """
    tool = shutil.which(NVIDIA_SMI)
    if tool is None:
        return 0
    try:
        answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=SECONDS, check=False)  # noqa: S603 - found on PATH
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"{NVIDIA_SMI} does not answer within {SECONDS} s: the GPU driver hangs; repair it, or set processes and device"
        ) from error
    found = sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return found
    return len(list(takewhile(lambda name: _is_gpu(name, found), map(str.strip, named.split(",")))))


def _is_gpu(name: str, found: int) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES is a GPU; CUDA ignores all entries from the first that is not."""
    return int(name) < found if name.isdigit() else found > 0 and name.startswith(("GPU-", "MIG-"))
