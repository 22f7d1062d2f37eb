"""What there is to compute with, and who takes which of it: one process per GPU, and threads for the rest.

GPUs are asked for only where an engine would use one, because importing torch takes seconds.
"""

from tasks.errors import RunError
from tasks.score.engines import EmbedEngine, NllEngine, required
from tasks.score.settings import Device, ScoreSettings
from tasks.score.weights import Precision

LIMIT = "gpu"
"""The name of a concurrency limit of Prefect by which runs share GPUs."""

DECIDING = {"transformers"}
"""Engines that compute in the precision they are told."""


def gpus() -> int:
    """How many GPUs this process sees. Raises InputError where torch is not installed."""
    cuda = required("torch").cuda
    return int(cuda.device_count()) if cuda.is_available() else 0


def device_of(settings: ScoreSettings, engine: NllEngine | EmbedEngine) -> Device:
    """What `engine` computes on: what was asked for, else the GPUs where this process sees any."""
    if engine == "hash":
        return "cpu"
    if engine in {"vllm", "sglang"}:
        return settings.device or "cuda"
    return settings.device or ("cuda" if gpus() else "cpu")


def precision_of(settings: ScoreSettings, engine: NllEngine | EmbedEngine, device: Device) -> Precision | None:
    """What `engine` computes in, None where it decides by itself."""
    if engine not in DECIDING:
        return None
    return settings.precision or ("bfloat16" if device == "cuda" else "float32")


def device_for_worker(device: Device, worker: int) -> str:
    """The device of the worker of that number: GPUs are dealt out in turn.

    Raises RunError where a GPU is asked for and there is none.
    """
    if device == "cpu":
        return "cpu"
    count = gpus()
    if not count:
        raise RunError("device=cuda: this worker sees no GPU; start workers where there are some, or set device=cpu")
    return f"cuda:{worker % count}"


def use_threads(count: int) -> None:
    """Compute with so many threads in this process."""
    required("torch").set_num_threads(count)
