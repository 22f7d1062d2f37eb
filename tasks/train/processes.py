"""How many processes train on a machine: as many as were asked for, else one per GPU, else one.

GPUs are counted by NVIDIA's own tool. Importing torch to ask it would take 2 s and, worse, leave a context on the device in
the process that only watches.
"""

import os
import shutil
import subprocess
from itertools import takewhile

from tokenmill.tasks.errors import InputError

from .settings import TrainSettings

TOOL = "nvidia-smi"
SECONDS = 60


def process_count(settings: TrainSettings) -> int:
    """Processes per machine. Raises InputError when the GPUs cannot be counted, as those of other machines."""
    if settings.processes is not None:
        return settings.processes
    if settings.launcher != "local" and settings.device != "cpu":
        raise InputError(
            f"processes: how many GPUs the machines of launcher={settings.launcher} have cannot be told from here; set processes"
        )
    return 1 if settings.device == "cpu" else max(1, gpu_count())


def gpu_count() -> int:
    """The GPUs that a process started here would see: those of the machine that CUDA_VISIBLE_DEVICES names, if it is set.

    Raises InputError when the driver does not answer.
    """
    tool = shutil.which(TOOL)
    if tool is None:
        return 0
    try:
        answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=SECONDS, check=False)  # noqa: S603 - found on PATH, with nothing of a person's in it
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"{TOOL} does not answer within {SECONDS} s: the driver of the GPUs hangs; mend it, or set processes and device"
        ) from error
    found = sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return found
    return len(list(takewhile(lambda name: _is_there(name, found), map(str.strip, named.split(",")))))


def _is_there(name: str, found: int) -> bool:
    """Whether one of CUDA_VISIBLE_DEVICES is a GPU; CUDA ignores it and all that follow where it is not."""
    return int(name) < found if name.isdigit() else found > 0 and name.startswith(("GPU-", "MIG-"))
