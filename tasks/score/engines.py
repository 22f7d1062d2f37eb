"""Create engines from recipes, and assign devices: one process per GPU.

torch and transformers take seconds to import, so they are imported only to load a model or count GPUs.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from tokenmill.tasks.errors import InputError, RunError, pip_install

from .embed import HASH_DIMENSIONS, Embedder, HashEmbedder
from .nll import Scorer
from .server import Server, ServerEmbedder, ServerScorer
from .settings import (
    MAX_TOKENS,
    Device,
    EmbedEngine,
    EmbedRecipe,
    ModelLocation,
    NllEngine,
    NllRecipe,
    Precision,
    ScoreSettings,
)
from .weights import TEXT, WEIGHTS, find_model

EMBEDDING_FILES = (*WEIGHTS, *TEXT)  # the files that determine an embedding, for `ModelFiles.digest`


def scorer(recipe: NllRecipe, where: ModelLocation, device: str, encode: Callable[[str], Sequence[int]]) -> Scorer:
    """Return the engine for NLL; a model is loaded once per process. `encode` tokenizes rows.

    Raises RunError if the model differs from the planned one, and errors as in `load_scorer` and `server`.
    """
    if where.server:
        return ServerScorer(Server(where.server, recipe.model, where.concurrency), recipe.max_length, encode)
    choices = recipe.max_length, recipe.token_budget, device, recipe.precision
    return _loaded("load_scorer", WEIGHTS, where.model, where.model_revision, recipe.weights, *choices)


def embedder(recipe: EmbedRecipe, where: ModelLocation, device: str) -> Embedder:
    """Return the engine for embeddings; a model is loaded once per process. Errors as in `scorer`."""
    if recipe.model is None:
        return HashEmbedder(recipe.dimensions or HASH_DIMENSIONS)
    limit = recipe.max_tokens or MAX_TOKENS
    if where.server:
        return ServerEmbedder(Server(where.server, recipe.model, where.concurrency), recipe.dimensions, limit)
    choices = recipe.pooling, recipe.dimensions, limit, recipe.token_budget, device, recipe.precision
    return _loaded("load_embedder", EMBEDDING_FILES, where.model, where.model_revision, recipe.weights, *choices)


@lru_cache(maxsize=1)
def _loaded(load: str, patterns: Sequence[str], model: str, revision: str | None, weights: str, *choices: Any) -> Any:  # noqa: ANN401 - as in that function of `models`
    """What `models.load_scorer` or `models.load_embedder` makes of a model's files. Raises RunError unless they're as planned."""
    require_torch()
    files = find_model(model, revision)
    digest = files.digest(patterns)
    if digest != weights:
        raise RunError(
            f"model: {model!r} is {digest} on this worker but {weights} in the plan; give all workers the same files, or "
            "pin model_revision"
        )
    from . import models

    return getattr(models, load)(files, *choices)


def require_torch() -> None:
    """Raise InputError unless the packages of the engine `transformers` are installed."""
    required("torch")
    required("transformers")


def required(package: str) -> ModuleType:
    """Import an optional package. Raises InputError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InputError(f"{package} cannot be imported ({error}); install it with: {pip_install('score')}") from error


def gpus() -> int:
    """Return the number of GPUs visible to this process. Raises InputError if torch is not installed.

    Does not start CUDA, which processes forked from this one could not use afterwards.
    """
    return int(required("torch").cuda.device_count())


def device_of(settings: ScoreSettings, engine: NllEngine | EmbedEngine) -> Device:
    """Return the device of this process: the requested one, else a GPU if `engine` uses GPUs and there is one."""
    if engine != "transformers":
        return "cpu"
    return settings.device or ("cuda" if gpus() else "cpu")


def precision_of(settings: ScoreSettings, engine: NllEngine | EmbedEngine, device: Device) -> Precision | None:
    """Return the precision of `engine`; None if the engine determines it."""
    if engine != "transformers":
        return None
    return settings.precision or ("bfloat16" if device == "cuda" else "float32")


def device_for_worker(device: Device, worker: int | None) -> str:
    """Return the device of the worker with this number: workers take the GPUs in turn.

    Raises RunError without a GPU, or with several and a worker without a number.
    """
    if device == "cpu":
        return "cpu"
    count = gpus()
    if not count:
        raise RunError("device=cuda: this worker sees no GPU; start workers on machines with GPUs, or set device=cpu")
    if worker is None and count > 1:
        raise RunError(
            f"device=cuda: this worker sees {count} GPUs, and its name lacks a number to choose one; start workers as "
            "`CUDA_VISIBLE_DEVICES=0 dask worker ADDRESS --nthreads 1 --resources GPU=1 --name gpu-0` (0, 1, … one per "
            "GPU)"
        )
    return f"cuda:{(worker or 0) % count}"
