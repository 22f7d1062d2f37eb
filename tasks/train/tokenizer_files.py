"""The tokenizer and the chat template of prepared data as files, which are exported with a model trained on it."""

from typing import Any

import orjson
from tokenmill.tasks.chat.template import ChatTemplate
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.pack.formats import find_template
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .job import TrainData
from .prepared import NOT_FOUND_HERE, prepared_manifest, vocabulary_of


def check_tokenizer(data: TrainData) -> None:
    """Raises InputError if what is exported with a trained model is missing: tokenizer and, for packs, chat template."""
    _template(data, vocabulary_of(data))


def tokenizer_files(data: TrainData) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json for a model trained on `data`, by name; with the chat template of packs.

    Raises InputError when the tokenizer or the chat template of the preparation is not found.
    """
    vocabulary = vocabulary_of(data)
    names = {number: token for token, number in vocabulary.controls.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names.get(-1 if vocabulary.bos is None else vocabulary.bos),
        "eos_token": names.get(-1 if vocabulary.eos is None else vocabulary.eos),
        "chat_template": _template(data, vocabulary),
    }
    given = {name: value for name, value in config.items() if value is not None}
    return {"tokenizer.json": vocabulary.definition(), "tokenizer_config.json": orjson.dumps(given)}


def _template(data: TrainData, vocabulary: Vocabulary) -> str | None:
    """The chat template of the conversations; the tokenizer's own for documents."""
    if data.kind != "sft":
        return vocabulary.chat_template
    settings = parse(SftSettings, prepared_manifest(data.path)["settings"], data.path)
    try:
        template = find_template(settings, vocabulary)
    except InputError as error:
        raise InputError(
            f"{data.path}: was prepared with a chat template that is not found here: {error}; {NOT_FOUND_HERE}"
        ) from error
    return template.source if isinstance(template, ChatTemplate) else None
