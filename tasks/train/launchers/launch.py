"""What launchers share: the files and command of a job, its settings by name, the arguments of torchrun, and checks.

Scripts are files in `scripts`, with `@name@` in place of a value.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenmill.tasks.errors import InputError
from tokenmill.tasks.score.weights import find_model
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.storage import ART, absolute, is_local, join
from tokenmill.tasks.tokenize.hub_files import named_model
from tokenmill.tasks.train.job import CHECKPOINTS, JOB, MODEL, Job
from tokenmill.tasks.train.settings import Launcher, TrainSettings

# The program that a launcher runs, and the remedy if it isn't installed.
PROGRAMS: Mapping[Launcher, tuple[str, str]] = {
    "slurm": ("srun", "run this on a login node of the cluster, or submit there the job.sbatch that --dry-run writes"),
    "kubernetes": ("kubectl", "install it, or apply the job.yaml that --dry-run writes from a machine that has it"),
}

# Arguments of Python, because the `torchrun` on PATH may belong to a different environment.
RUN = ("-m", "torch.distributed.run")

TRAINER = ("-m", "tokenmill.tasks.train.trainer")
SCRIPT = "train.sh"
NVIDIA_SMI, SECONDS = "nvidia-smi", 60


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a training run."""

    files: Mapping[str, str]  # texts by their names in the output folder
    command: Sequence[str]
    runs: bool  # here, where it is watched; otherwise the user runs it elsewhere
    environment: Mapping[str, str] = field(default_factory=dict[str, str])  # added to the current one


def write_files(launch: Launch, output_dir: str) -> None:
    """Write the files of a launch into the output folder. Raises OSError."""
    for name, text in launch.files.items():
        publish_bytes(join(output_dir, name), text.encode())


def script(name: str, /, **values: object) -> str:
    """Fill in the values of a script."""
    text = Path(__file__).with_name("scripts").joinpath(name).read_text("utf-8")
    return re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), text)


def job_values(job: Job) -> dict[str, Any]:
    """Return the settings of a job by name, as Megatron's arguments need them. Raises InputError for a fractional rope_base."""
    settings = job.settings
    base, checkpoints = settings.model.rope_base, join(job.output_dir, CHECKPOINTS)
    if not base.is_integer():  # Megatron takes whole numbers
        raise InputError(
            f"model.rope_base={base}: launcher={settings.launcher} takes whole numbers only; round it, or set launcher=local"
        )
    return {
        **settings.model_dump(), **settings.model.model_dump(), **settings.parallel.model_dump(),
        **settings.optimizer.model_dump(),
        "rope_base": int(base),
        "vocabulary_size": job.data.vocabulary_size,
        "validate_every": settings.validate_every or settings.steps,
        "validation_batches": settings.validation_batches if job.validates else 0,
        "checkpoints": checkpoints,
        "save_interval": settings.checkpoint_every or settings.steps,
        "blend": join(job.data.path, "blend.json"),
        "cache": join(job.output_dir, "cache"),
    }  # fmt: skip


def require_program(launcher: Launcher) -> None:
    """Raises InputError when the program that the launcher runs isn't installed on this machine."""
    program, remedy = PROGRAMS.get(launcher, (None, ""))
    if program is not None and shutil.which(program) is None:
        raise InputError(f"launcher={launcher}: {program} is not on this machine's PATH; {remedy}")


def local_folder(output_dir: str, launcher: Launcher) -> str:
    """Return the output folder. Raises InputError unless it is a path, for checkpoints and scripts."""
    if is_local(output_dir):
        return output_dir
    raise InputError(
        f"output_dir={output_dir}: launcher={launcher} keeps checkpoints and scripts in the output folder, which must be in a "
        "file system; name a folder that all training machines mount"
    )


def require_files(launcher: Launcher, places: Iterable[str]) -> None:
    """Raises InputError for data on an object store, which other trainers can't read."""
    stored = next((place for place in places if not is_local(place)), None)
    if stored is not None:
        raise InputError(
            f"launcher={launcher}: its trainer opens files, but {stored} is in an object store; prepare the data again "
            "with --output-dir, and store where that is set, in a file system that the nodes mount"
        )


def script_lines(words: Sequence[str]) -> str:
    """Return a command over several lines of a shell script, quoted; an option and its value share a line."""
    lines: list[str] = []
    for word, before in zip(words, ["", *words], strict=False):
        if before.startswith("-") and "=" not in before and not word.startswith("-"):
            lines[-1] += f" {shlex.quote(word)}"
        else:
            lines.append(shlex.quote(word))
    return " \\\n    ".join(lines)


def on_one_machine(processes: int, program: Sequence[str]) -> list[str]:
    """Python's arguments to run `program`, a script or `-m` and a module, in several processes of this machine.

    They meet at the loopback address and any free port, so training runs can share a machine, and a machine does not need a name.
    torchrun doesn't restart processes: a retry resumes the whole run from its checkpoint.
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
    """Return the words in a bash script, before a different trainer's program, that make it follow the job's order and record."""
    return f"-m tokenmill.tasks.train.peer {shlex.quote(join(job.output_dir, JOB))}"


def process_count(settings: TrainSettings) -> int:
    """Return the processes per machine: the setting, else one per GPU that a process started here would see, else one.

    Raises InputError if the GPUs are on other machines, and when their driver doesn't answer.
    """
    if settings.processes is not None:
        return settings.processes
    if settings.launcher != "local" and settings.device != "cpu":
        raise InputError(
            f"processes: the GPUs on the machines of launcher={settings.launcher} cannot be counted from here; set processes"
        )
    tool = shutil.which(NVIDIA_SMI)
    if settings.device == "cpu" or tool is None:
        return 1
    try:  # torch would take 2 s to import, and leave a context on the device
        answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=SECONDS, check=False)  # noqa: S603 - found on PATH
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"{NVIDIA_SMI} does not answer within {SECONDS} s: the GPU driver hangs; repair it, or set processes and device"
        ) from error
    found = sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return max(1, found)

    def is_gpu(name: str) -> bool:
        return int(name) < found if name.isdigit() else found > 0 and name.startswith(("GPU-", "MIG-"))

    # CUDA ignores all entries from the first that isn't a GPU.
    return max(1, len(list(takewhile(is_gpu, map(str.strip, named.split(","))))))


def start_place(start_from: str) -> str:
    """Return the absolute path of a local or registered folder; of a model on the hub its id.

    Other trainers read only ids, so a revision or a folder of a repository is fetched, and its local folder given. Raises
    InputError for anything else.
    """
    if start_from.startswith(ART) or Path(start_from).expanduser().exists():
        return absolute(start_from)
    model = named_model(start_from, None, "start_from")
    return str(start_folder(start_from)) if model.revision or model.inside else model.repository


def model_name(place: str) -> str:
    """Return the name of a model for other libraries: the model folder of a training run, else `place` itself."""
    training = Path(place).expanduser()
    return str(training / MODEL) if (training / JOB).is_file() else place


def start_folder(name: str) -> Path:
    """Return the folder of a model: an earlier training run's, a local one, or one fetched from the hub. Raises InputError."""
    return find_model(model_name(name)).folder
