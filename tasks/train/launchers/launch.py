"""What a launcher makes of a job: files to write, and a command to run or to tell."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tasks.errors import InputError
from tasks.storage import is_local
from tasks.train.settings import Launcher


@dataclass(frozen=True, slots=True)
class Launch:
    """How a training is started.

    `files` are texts by their names in the output folder; job.json is not among them. `command` is what starts the training
    once they are written, and `environment` what it needs beside the environment that there is. Where `runs`, it is run
    and watched from here until it ends; otherwise it is for a person to run where it belongs.
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
