"""What a launcher makes of a job: files to write, and a command to run or to tell."""

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.storage import is_local, join
from tokenmill.tasks.train.settings import Launcher

PROGRAMS: Mapping[Launcher, tuple[str, str]] = {
    "slurm": ("srun", "run this on a login node of the cluster, or submit there the job.sbatch that --dry-run writes"),
    "kubernetes": ("kubectl", "install it, or apply the job.yaml that --dry-run writes from a machine that has it"),
}
"""The program that a launcher runs, and what to do where it is not installed."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a training is started.

    `files` are texts by their names in the output folder. `command` starts the training once they are written, with
    `environment` added to the environment that there is. If `runs`, it is run and watched from here until it ends;
    otherwise a person runs it where it belongs.
    """

    files: Mapping[str, str]
    command: Sequence[str]
    runs: bool
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


def script_lines(words: Sequence[str]) -> str:
    """Words of a command over several lines of a shell script, quoted; an option and its value share a line."""
    lines: list[str] = []
    for word, before in zip(words, ["", *words], strict=False):
        belongs = before.startswith("-") and "=" not in before and not word.startswith("-")
        if belongs:
            lines[-1] += f" {shlex.quote(word)}"
        else:
            lines.append(shlex.quote(word))
    return " \\\n    ".join(lines)


def local_folder(output_dir: str, launcher: Launcher) -> str:
    """The output folder. Raises InputError unless it is a path: checkpoints are written there, and scripts are run from it."""
    if is_local(output_dir):
        return output_dir
    raise InputError(
        f"output_dir={output_dir}: launcher={launcher} keeps checkpoints and scripts in the folder of a training, which must "
        "be in a file system; name a folder that all machines of the training mount"
    )


def write_files(launch: Launch, output_dir: str) -> None:
    """Write the files of a launch into the output folder. Raises OSError."""
    for name, text in launch.files.items():
        publish_bytes(join(output_dir, name), text.encode())


def require_program(launcher: Launcher) -> None:
    """Raises InputError when the program that the launcher runs is not installed on this machine."""
    program, remedy = PROGRAMS.get(launcher, (None, ""))
    if program is not None and shutil.which(program) is None:
        raise InputError(f"launcher={launcher}: {program} is not on this machine's PATH; {remedy}")
