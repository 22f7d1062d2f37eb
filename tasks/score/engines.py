"""Engines in this process, and the devices they run on: one process per GPU.

torch and transformers take seconds to import, so they are imported only when an engine or a GPU is asked for.
"""

import importlib
from types import ModuleType

from tokenmill.tasks.errors import InputError, RunError

from .batches import TOKEN_BUDGET
from .embed import HASH_DIMENSIONS, Embedder, HashEmbedder
from .nll import Scorer
from .settings import MAX_TOKENS, Device, EmbedEngine, NllEngine, Pooling, Precision, ScoreSettings
from .weights import TEXT, WEIGHTS, ModelFiles

EMBEDDING_FILES = (*WEIGHTS, *TEXT)
"""The files that decide an embedding, for `ModelFiles.digest`."""


def scorer(
    files: ModelFiles,
    *,
    max_length: int | None = None,
    token_budget: int = TOKEN_BUDGET,
    device: str | None = None,
    precision: Precision | None = None,
) -> Scorer:
    """Load the model of `files` to score sequences with it.

    At most `max_length` tokens of a sequence are read, and `token_budget` padded tokens make a batch. By default the
    device is a GPU where there is one, and the precision bfloat16 there and float32 on a CPU. Raises InputError for a
    package that is not installed and a model that cannot be used.
    """
    require_torch()
    from .causal import load_scorer

    return load_scorer(files, max_length=max_length, token_budget=token_budget, device=device, precision=precision)


def embedder(
    files: ModelFiles | None = None,
    *,
    pooling: Pooling | None = None,
    dimensions: int | None = None,
    max_tokens: int = MAX_TOKENS,
    token_budget: int = TOKEN_BUDGET,
    device: str | None = None,
    precision: Precision | None = None,
) -> Embedder:
    """Load the model of `files` to embed texts with it; without files, hash words.

    By default vectors have all dimensions of the model. Other arguments and errors as in `scorer`.
    """
    if files is None:
        return HashEmbedder(dimensions or HASH_DIMENSIONS)
    if pooling is None:
        raise InputError("the engine 'transformers' needs pooling=last or pooling=mean; the model's card says which")
    require_torch()
    from .pooling import load_embedder

    return load_embedder(files, pooling, dimensions, max_tokens, token_budget, device, precision)


def require_torch() -> None:
    """Raise InputError unless the packages of the engine `transformers` are installed."""
    required("torch")
    required("transformers")


def required(package: str) -> ModuleType:
    """Import an optional package. Raises InputError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InputError(
            f"{package} cannot be imported ({error}); install it with: pip install 'tokenmill[score]'"
        ) from error


def gpus() -> int:
    """How many GPUs this process sees. Raises InputError where torch is not installed.

    Does not start CUDA, which processes forked from this one could not use afterwards.
    """
    return int(required("torch").cuda.device_count())


def device_of(settings: ScoreSettings, engine: NllEngine | EmbedEngine) -> Device:
    """Where this process computes: the device asked for, else the GPUs if `engine` uses them and there are any."""
    if engine != "transformers":
        return "cpu"
    return settings.device or ("cuda" if gpus() else "cpu")


def precision_of(settings: ScoreSettings, engine: NllEngine | EmbedEngine, device: Device) -> Precision | None:
    """The precision of `engine`; None where the engine decides."""
    if engine != "transformers":
        return None
    return settings.precision or ("bfloat16" if device == "cuda" else "float32")


def device_for_worker(device: Device, worker: int | None) -> str:
    """The device of the worker with that number: workers take the GPUs in turn.

    Raises RunError if there is no GPU, or if there are several and the worker has no number.
    """
    if device == "cpu":
        return "cpu"
    count = gpus()
    if not count:
        raise RunError("device=cuda: this worker sees no GPU; start workers where there are some, or set device=cpu")
    if worker is None and count > 1:
        raise RunError(
            f"device=cuda: this worker sees {count} GPUs and its name has no number to choose one; start workers as "
            "`CUDA_VISIBLE_DEVICES=0 dask worker ADDRESS --nthreads 1 --resources GPU=1 --name gpu-0` (0, 1, … one per "
            "GPU)"
        )
    return f"cuda:{(worker or 0) % count}"
