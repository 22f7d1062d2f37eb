"""Engines by name: what needs torch, or another large package, is imported when it is asked for."""

import importlib
from types import ModuleType
from typing import Literal

from tokenmill.tasks.errors import InputError

from .adapters import SentenceTransformersEmbedder, SglangEmbedder, VllmScorer
from .batches import TOKEN_BUDGET
from .choose import Nearest, nearest_centres
from .embed import MAX_TOKENS, Embedder, HashEmbedder, Pooling
from .nll import Scorer
from .weights import TEXT, WEIGHTS, ModelFiles, Precision

NllEngine = Literal["transformers", "vllm"]
EmbedEngine = Literal["hash", "transformers", "sentence-transformers", "sglang"]

OWN_PROCESSES: frozenset[NllEngine | EmbedEngine] = frozenset({"vllm", "sglang"})
"""Engines that run on GPUs, in processes of their own; see `processes`."""

HASH_DIMENSIONS = 256
EMBEDDING_FILES = (*WEIGHTS, *TEXT)
"""What decides an embedding, for `ModelFiles.digest`."""

REMEDIES = {
    "torch": "pip install 'tokenmill[score]'",
    "transformers": "pip install 'tokenmill[score]'",
    "sentence_transformers": "pip install 'tokenmill[score]' sentence-transformers",
    "vllm": "pip install vllm, in an environment of its own",
    "sglang": "pip install sglang, in an environment of its own",
}


def scorer(
    engine: NllEngine,
    files: ModelFiles,
    *,
    max_length: int | None = None,
    token_budget: int = TOKEN_BUDGET,
    device: str | None = None,
    precision: Precision | None = None,
) -> Scorer:
    """An engine that scores with the model of `files`, which takes as long as the weights take to be read.

    Of a sequence at most `max_length` tokens are read, and `token_budget` padded tokens make a batch. Without `device` it
    is the GPU where there is one, without `precision` bfloat16 there and float32 on a CPU; vLLM decides precision itself.
    Raises InputError for a package that is not installed and a model that cannot be used, and RunError where this process
    may not start those that vLLM needs.
    """
    if engine == "vllm":
        _prepare_processes(engine, device)
        return VllmScorer(required("vllm"), files, max_length=max_length, token_budget=token_budget)
    _require_torch()
    from .causal import load_scorer

    return load_scorer(files, max_length=max_length, token_budget=token_budget, device=device, precision=precision)


def embedder(
    engine: EmbedEngine,
    files: ModelFiles | None = None,
    *,
    pooling: Pooling | None = None,
    dimensions: int | None = None,
    max_tokens: int = MAX_TOKENS,
    token_budget: int = TOKEN_BUDGET,
    device: str | None = None,
    precision: Precision | None = None,
) -> Embedder:
    """An engine that embeds with the model of `files`; `hash` needs none.

    `pooling` is asked for by `transformers`, and decided by the others themselves. Without `dimensions` vectors have as
    many as the model gives. Other arguments and errors as in `scorer`.
    """
    if engine == "hash":
        return HashEmbedder(dimensions or HASH_DIMENSIONS)
    if files is None:
        raise InputError(f"the engine {engine!r} needs a model; name one, or use the engine 'hash'")
    if engine == "sentence-transformers":
        package = required("sentence_transformers")
        return SentenceTransformersEmbedder(package, files, dimensions=dimensions, max_tokens=max_tokens, device=device)
    if engine == "sglang":
        _prepare_processes(engine, device)
        return SglangEmbedder(required("sglang"), files, dimensions=dimensions, max_tokens=max_tokens)
    if pooling is None:
        raise InputError("the engine 'transformers' needs pooling=last or pooling=mean; the model's card says which")
    _require_torch()
    from .pooling import load_embedder

    return load_embedder(
        files, pooling, dimensions=dimensions, max_tokens=max_tokens, token_budget=token_budget, device=device,
        precision=precision,
    )  # fmt: skip


def nearest_engine(device: str) -> Nearest:
    """What finds the nearest centres: NumPy on a CPU, torch elsewhere.

    Raises InputError where that is not installed, and where there is no GPU.
    """
    if device == "cpu":
        return nearest_centres
    if not required("torch").cuda.is_available():
        raise InputError(f"device={device}: this machine sees no GPU; set device=cpu")
    from .device import nearest_on

    return nearest_on(device)


def required(package: str) -> ModuleType:
    """An optional package. Raises InputError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InputError(f"{package} cannot be imported ({error}); install it with: {REMEDIES[package]}") from error


def _prepare_processes(engine: NllEngine | EmbedEngine, device: str | None) -> None:
    from .processes import require_children, see_only

    require_children(engine)
    see_only(device)


def _require_torch() -> None:
    required("torch")
    required("transformers")
