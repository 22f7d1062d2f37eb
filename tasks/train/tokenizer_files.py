"""The tokenizer that belongs to a trained model, as Hugging Face's libraries read it: that of the data, and its template."""

from typing import Any

import orjson
from tokenmill.tasks.chat.template import ChatTemplate
from tokenmill.tasks.pack.formats import find_template
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.shards.manifest import read_manifest
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .job import TrainData


def tokenizer_files(data: TrainData) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json, by name. Raises InputError when the tokenizer of the data cannot be found."""
    vocabulary = find_vocabulary(parse(TokenizerSource, data.tokenizer, "tokenizer"))
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
    """The chat template that conversations were rendered with; the tokenizer's own for documents."""
    manifest = read_manifest(data.path)
    if data.kind != "sft" or manifest is None:
        return vocabulary.chat_template
    template = find_template(parse(SftSettings, manifest["settings"], data.path), vocabulary)
    return template.source if isinstance(template, ChatTemplate) else None
