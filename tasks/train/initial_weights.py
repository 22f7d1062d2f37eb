"""Initial weights: find what `start_from` names, and check that it fits the data and the model.

Weights of another shape would fail only on the reserved machines. Weights trained with another tokenizer would not fail at all,
although every id would mean another string. So the tokenizer must be identical, and every field of config.json that changes the
computation must match the settings.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.score.weights import find_model
from tokenmill.tasks.storage import ART, absolute
from tokenmill.tasks.tokenize.hub_files import named_model
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource

from .job import JOB, MODEL, Job, TrainData, job_of
from .settings import ModelSettings

CONFIG = "config.json"


def start_place(start_from: str) -> str:
    """The absolute path of a local or registered folder; of a model on the hub its id.

    Other trainers read ids alone, so a revision or a folder of a repository is fetched, and its local folder given. Raises
    InputError for anything else.
    """
    if start_from.startswith(ART) or Path(start_from).expanduser().exists():
        return absolute(start_from)
    model = named_model(start_from, None, "start_from")
    return str(start_folder(start_from)) if model.revision or model.inside else model.repository


def model_name(place: str) -> str:
    """The name of a model for other libraries: the model folder of a training, else `place` itself."""
    training = Path(place).expanduser()
    return str(training / MODEL) if (training / JOB).is_file() else place


def start_folder(name: str) -> Path:
    """The folder of a model: an earlier training's, a local one, or one fetched from the hub. Raises InputError."""
    return find_model(model_name(name)).folder


def check_initial_weights(job: Job) -> None:
    """Raises InputError unless `start_from`, if given, has the data's tokenizer and the model's shape.

    A model on the hub is fetched for this, as the trainer would do.
    """
    start = job.settings.start_from
    if start is None:
        return
    training = Path(start).expanduser() / JOB
    if training.is_file():
        _check_training(start, job, job_of(training.read_bytes(), str(training)))
    else:
        _check_model(start, job)


def _check_training(start: str, job: Job, earlier: Job) -> None:
    if not (Path(start).expanduser() / MODEL / CONFIG).is_file():
        raise InputError(f"start_from={start}: this training has not written its {MODEL} yet; let it finish first")
    _same_tokenizer(start, earlier.data.fingerprint, job.data)
    before, model = earlier.settings.model.model_dump(), job.settings.model.model_dump()
    _same_shape(
        start, [f"model.{name} is {before[name]}, not {model[name]}" for name in model if before[name] != model[name]]
    )


def _check_model(start: str, job: Job) -> None:
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
    size, model = job.data.vocabulary_size, job.settings.model
    if rows < size:
        raise InputError(
            f"start_from={start}: its vocab_size is {rows}, but the data has ids up to {size - 1}; use a model whose "
            "embedding has a row for each of them"
        )
    if rows > model.vocabulary(size):
        raise InputError(
            f"start_from={start}: its vocab_size is {rows}, but model.vocabulary_multiple={model.vocabulary_multiple} "
            f"pads the data's {size} ids to {model.vocabulary(size)}; set model.vocabulary_multiple={rows}"
        )


def _fingerprint(start: str, folder: Path) -> str:
    try:
        return find_vocabulary(TokenizerSource(model=str(folder))).fingerprint
    except InputError as error:
        raise InputError(
            f"start_from={start}: its tokenizer cannot be compared with that of the data: {error}; put the model's "
            "tokenizer.json beside its config.json"
        ) from error


def _same_tokenizer(start: str, fingerprint: str, data: TrainData) -> None:
    if fingerprint != data.fingerprint:
        raise InputError(
            f"start_from={start}: its tokenizer is {fingerprint}, but {data.path} was prepared with "
            f"{data.tokenizer['model']!r}, which is {data.fingerprint}; prepare the data with the model's tokenizer, or "
            "use a model trained with the data's"
        )


def _same_shape(start: str, differences: Sequence[str]) -> None:
    if differences:
        raise InputError(
            f"start_from={start}: not the model of the settings: {'; '.join(differences)}; set model to match these weights"
        )


def _config_differences(config: Mapping[str, Any], model: ModelSettings) -> Iterator[str]:
    """The fields of config.json that make the model compute differently from `model`, given the defaults of `LlamaConfig`."""
    rope = config.get("rope_parameters") or {}
    scaled = rope or config.get("rope_scaling") or {}
    head = model.hidden // model.heads
    for name, found, wanted, setting in (
        ("model_type", config.get("model_type"), "llama", None),
        ("hidden_size", config.get("hidden_size"), model.hidden, "hidden"),
        ("num_hidden_layers", config.get("num_hidden_layers"), model.layers, "layers"),
        ("num_attention_heads", config.get("num_attention_heads"), model.heads, "heads"),
        ("num_key_value_heads", _given(config, "num_key_value_heads", config.get("num_attention_heads")), model.key_value_heads, "key_value_heads"),
        ("head_dim", _given(config, "head_dim", head), head, "hidden"),
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
                f"but model.{setting} is {wanted!r}" if setting else f"but only {wanted!r} is supported"
            )


def _given(config: Mapping[str, Any], name: str, otherwise: object) -> object:
    found = config.get(name)
    return otherwise if found is None else found
