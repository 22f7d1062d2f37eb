"""What there is to compute with, and who takes which of it: one process per GPU, and threads for the rest.

GPUs are asked for only where an engine would use one, because importing torch takes seconds.
"""

from tokenmill.tasks.errors import RunError

from .engines import OWN_PROCESSES, EmbedEngine, NllEngine, required
from .settings import Device, ScoreSettings
from .weights import Precision

LIMIT = "gpu"
"""The name of a concurrency limit of Prefect by which runs share GPUs."""

DECIDING = {"transformers"}
"""Engines that compute in the precision they are told."""


def gpus() -> int:
    """How many GPUs this process sees. Raises InputError where torch is not installed.

    They are counted without starting CUDA, which processes that are forked from this one could not use then.
    """
    return int(required("torch").cuda.device_count())


def device_of(settings: ScoreSettings, engine: NllEngine | EmbedEngine) -> Device:
    """What `engine` computes on: what was asked for, else the GPUs where this process sees any."""
    if engine == "hash":
        return "cpu"
    if engine in OWN_PROCESSES:
        return "cuda"
    return settings.device or ("cuda" if gpus() else "cpu")


def precision_of(settings: ScoreSettings, engine: NllEngine | EmbedEngine, device: Device) -> Precision | None:
    """What `engine` computes in, None where it decides by itself."""
    if engine not in DECIDING:
        return None
    return settings.precision or ("bfloat16" if device == "cuda" else "float32")


def device_for_worker(device: Device, worker: int | None) -> str:
    """The device of the worker of that number: GPUs are dealt out in turn.

    Raises RunError where a GPU is asked for and there is none, or several and no number to choose by.
    """
    if device == "cpu":
        return "cpu"
    count = gpus()
    if not count:
        raise RunError("device=cuda: this worker sees no GPU; start workers where there are some, or set device=cpu")
    if worker is None and count > 1:
        raise RunError(
            f"device=cuda: this worker sees {count} GPUs and its name has no number to take one of them by; start workers as "
            "`CUDA_VISIBLE_DEVICES=0 dask worker ADDRESS --nthreads 1 --resources GPU=1 --name gpu-0` (0, 1, … one per "
            "GPU)"
        )
    return f"cuda:{(worker or 0) % count}"


def use_threads(count: int) -> None:
    """Compute with so many threads in this process."""
    required("torch").set_num_threads(count)
