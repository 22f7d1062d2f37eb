"""Languages and classes of documents, from fastText models that the user names.

fastText reads a line, so line breaks become spaces. A document is kept if one of the requested labels has at least the threshold as
its score. Predicting takes about 1 µs per word; the package is optional and imported when a model is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenmill.tasks.errors import InputError, RunError, nearest, pip_install
from tokenmill.tasks.storage import absolute, is_local
from xxhash import xxh3_128

from .settings import FilterSettings, Model

PREFIX = "__label__"
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Labelled:
    """A model in a recipe: the reason for dropping a document, the hash of the file, and the labels that must reach a score."""

    reason: str
    content: str
    keep: Sequence[str]
    threshold: float


def models_of(settings: FilterSettings) -> list[tuple[str, Model]]:
    """Return the reasons that models give, and the models, in their order."""
    language = [("language", settings.language)] if settings.language else []
    return [*language, *((each.name, each) for each in settings.classifiers)]


def identified(settings: FilterSettings) -> tuple[list[Labelled], dict[str, str]]:
    """Return the models as they are in recipes, and the path of each content. Raises InputError for a file that cannot be read."""
    labelled: list[Labelled] = []
    paths: dict[str, str] = {}
    for reason, model in models_of(settings):
        path = absolute(model.model)
        content = _content(path)
        labelled.append(Labelled(reason, content, sorted(set(model.keep)), model.threshold))
        paths[content] = path
    return labelled, paths


def _content(path: str) -> str:
    if not is_local(path):
        raise InputError(f"{path}: a model must be a local file, which every worker can read; copy it to a shared disk")
    hasher = xxh3_128()  # the path may lead to a different model next time
    try:
        with Path(path).open("rb") as stream:
            while block := stream.read(BLOCK_BYTES):
                hasher.update(block)
    except OSError as error:
        raise InputError(
            f"{path}: the model cannot be read: {error.strerror}; check language.model and classifiers"
        ) from error
    return hasher.hexdigest()


def require_labels(settings: FilterSettings) -> None:
    """Raises InputError for a model that cannot be loaded, and for labels that it does not have."""
    for _, model in models_of(settings):
        known = [label.removeprefix(PREFIX) for label in _load(absolute(model.model)).labels]
        for label in model.keep:
            if label not in known:
                raise InputError(f"{model.model}: doesn't have a label {label!r}; {nearest(label, known)}")


@cache
def _load(path: str) -> Any:  # noqa: ANN401 - fastText has no types
    """A model. Raises InputError without fastText, and for a file that is not a model."""
    try:
        import fasttext
    except ImportError as error:
        raise InputError(f"language and classifiers need fastText: {pip_install('filter')}") from error
    try:  # once per process: a model has up to a gigabyte
        return fasttext.load_model(path)
    except ValueError as error:
        raise InputError(f"{path}: not a fastText model (.bin or .ftz): {error}") from error


@cache
def _vouched(path: str, content: str) -> Any:  # noqa: ANN401 - same
    """A model whose file has this content. Raises RunError if it has changed."""
    if _content(path) != content:
        raise RunError(f"{path}: the model has changed since the plan; run the same command again")
    return _load(path)


def failing(texts: pa.LargeStringArray, model: Labelled, paths: Mapping[str, str]) -> np.ndarray:
    """Return which texts, bool [n], lack a requested label with enough score; `paths` are the models' paths by content."""
    predict = _vouched(paths[model.content], model.content).predict
    wanted = {f"{PREFIX}{label}" for label in model.keep}
    lacking = np.ones(len(texts), np.bool_)
    for number, text in enumerate(texts.to_pylist()):
        # All labels (-1): the wanted one may not be the best, and still reach the threshold.
        labels, scores = predict(text.replace("\n", " "), k=-1)
        reached = (label for label, score in zip(labels, scores, strict=True) if score >= model.threshold)
        lacking[number] = wanted.isdisjoint(reached)
    return lacking
