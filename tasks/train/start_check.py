"""Do the weights to begin with fit the data and the model? `start_from` is held against both.

Weights of another shape fail loudly, late, on the machines that were reserved. Those of another tokenizer do not fail at
all: every id means another string, and the loss is that of a model which has to unlearn everything. So a tokenizer must be
the same to the last byte, and whatever of a config.json decides what a model computes must be what will be computed.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource

from .job import JOB, MODEL, Job, TrainData
from .settings import ModelSettings
from .start import start_folder

CONFIG = "config.json"


def weights_to_begin_with_fit(job: Job) -> None:
    """Raises InputError unless `start_from`, where it is given, has the data's tokenizer and the model's shape.

    A model of the hub is fetched for that, which a trainer on this machine would do as well.
    """
    start = job.settings.start_from
    if start is None:
        return
    training = Path(start).expanduser() / JOB
    if training.is_file():
        _training_fits(start, job, job_of(training.read_bytes(), str(training)))
    else:
        _model_fits(start, job)


def job_of(content: bytes, place: str) -> Job:
    """The job in `content`, the file at `place`. Raises InputError when it is none."""
    try:
        return parse(Job, orjson.loads(content), place)
    except ValueError as error:  # of orjson, or an InputError
        raise InputError(f"{error}; {place} is not a job of this version: name another folder, or delete it") from error


def _training_fits(start: str, job: Job, earlier: Job) -> None:
    if not (Path(start).expanduser() / MODEL / CONFIG).is_file():
        raise InputError(f"start_from={start}: this training has written no {MODEL} yet; let it finish first")
    _same_tokenizer(start, earlier.data.fingerprint, job.data)
    before, model = earlier.settings.model.model_dump(), job.settings.model.model_dump()
    _same_shape(
        start, [f"model.{name} is {before[name]}, not {model[name]}" for name in model if before[name] != model[name]]
    )


def _model_fits(start: str, job: Job) -> None:
    try:
        folder = start_folder(start)
    except InputError as error:
        raise InputError(f"start_from: {str(error).removeprefix('model: ')}") from error
    _same_tokenizer(start, _fingerprint(start, folder), job.data)
    place = folder / CONFIG
    try:
        config: dict[str, Any] = dict(orjson.loads(place.read_bytes()))
    except (ValueError, TypeError) as error:
        raise InputError(f"start_from: {place} is not a JSON object: {error}; save the model again") from error
    _same_vocabulary(start, config.get("vocab_size", 0), job)
    _same_shape(start, list(_config_differences(config, job.settings.model)))


def _same_vocabulary(start: str, rows: int, job: Job) -> None:
    """An embedding of fewer rows than the data has ids cannot read it; one of more would have to be cut."""
    size, model = job.data.vocabulary_size, job.settings.model
    if rows < size:
        raise InputError(
            f"start_from={start}: its vocab_size is {rows}, and the data has ids up to {size - 1}; take a model whose "
            "embedding has rows for all of them"
        )
    if rows > model.vocabulary(size):
        raise InputError(
            f"start_from={start}: its vocab_size is {rows}, and model.vocabulary_multiple={model.vocabulary_multiple} "
            f"makes {model.vocabulary(size)} of the {size} ids of the data; set model.vocabulary_multiple={rows}"
        )


def _fingerprint(start: str, folder: Path) -> str:
    try:
        return find_vocabulary(TokenizerSource(model=str(folder))).fingerprint
    except InputError as error:
        raise InputError(
            f"start_from={start}: whether it knows the tokens of the data cannot be told: {error}; put the model's "
            "tokenizer.json beside its config.json"
        ) from error


def _same_tokenizer(start: str, fingerprint: str, data: TrainData) -> None:
    if fingerprint != data.fingerprint:
        raise InputError(
            f"start_from={start}: its tokenizer is {fingerprint}, and {data.path} was prepared with "
            f"{data.tokenizer['model']!r}, which is {data.fingerprint}; prepare the data with the tokenizer of these "
            "weights, or take weights that were trained with that of the data"
        )


def _same_shape(start: str, differences: Sequence[str]) -> None:
    if differences:
        raise InputError(
            f"start_from={start}: another model: {'; '.join(differences)}; set model as these weights have it"
        )


def _config_differences(config: Mapping[str, Any], model: ModelSettings) -> Iterator[str]:
    """What of a config.json computes something else than `model` does.

    Each default is what `LlamaConfig` of transformers takes where the file says nothing.
    """
    rope = config.get("rope_parameters") or {}
    scaled = rope or config.get("rope_scaling") or {}
    for name, found, wanted, setting in (
        ("model_type", config.get("model_type"), "llama", None),
        ("hidden_size", config.get("hidden_size"), model.hidden, "hidden"),
        ("num_hidden_layers", config.get("num_hidden_layers"), model.layers, "layers"),
        ("num_attention_heads", config.get("num_attention_heads"), model.heads, "heads"),
        ("num_key_value_heads", _given(config, "num_key_value_heads", config.get("num_attention_heads")), model.key_value_heads, "key_value_heads"),
        ("head_dim", _given(config, "head_dim", model.hidden // model.heads), model.hidden // model.heads, "hidden"),
        ("intermediate_size", config.get("intermediate_size"), model.feed_forward, "feed_forward"),
        ("rope_theta", rope.get("rope_theta", config.get("rope_theta", 10_000.0)), model.rope_base, "rope_base"),
        ("rope_type", scaled.get("rope_type", scaled.get("type", "default")), "default", None),
        ("rms_norm_eps", config.get("rms_norm_eps", 1e-6), model.norm_epsilon, "norm_epsilon"),
        ("tie_word_embeddings", config.get("tie_word_embeddings", False), model.tied_embeddings, "tied_embeddings"),
        ("hidden_act", config.get("hidden_act", "silu"), "silu", None),
        ("attention_bias", config.get("attention_bias", False), False, None),
        ("mlp_bias", config.get("mlp_bias", False), False, None),
    ):  # fmt: skip
        if found != wanted:
            yield f"{name} is {found!r}, " + (
                f"model.{setting} asks for {wanted!r}" if setting else f"only {wanted!r} is trained"
            )


def _given(config: Mapping[str, Any], name: str, otherwise: object) -> object:
    found = config.get(name)
    return otherwise if found is None else found
