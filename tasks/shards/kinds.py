"""Every preparation kind, with the facts that a command line needs before it imports anything.

Each row names its record by import path, so that `tokenmill --help` and `tokenmill verify` load no kind that they do not need.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenmill.tasks.errors import InputError, nearest

from .records import Manifest

if TYPE_CHECKING:
    from .kind import Kind


@dataclass(frozen=True, slots=True)
class Registered:
    """A row of the registry: facts about a kind that are known before its record is imported.

    `command` follows `tokenmill`, `flow` names the flow and its deployment, `summary` describes both in one sentence, `contents`
    names the published data, `record` locates the record (`module:NAME`), and `nightly` is whether nightly runs prepare blends of this kind.
    """

    command: str
    flow: str
    summary: str
    contents: str
    record: str
    nightly: bool = True


KINDS: Mapping[str, Registered] = {
    "pretrain": Registered(
        "pretrain",
        "pretrain-data-prep",
        "Prepare a blend for pretraining: Megatron .bin/.idx and blend.json.",
        "Text as token ids, in Megatron's .bin and .idx",
        "tokenmill.tasks.tokenize.kind:PRETRAIN",
    ),
    "sft": Registered(
        "sft",
        "sft-data-prep",
        "Prepare a blend of conversations for SFT: packed Parquet with exact loss masks, and blend.json.",
        "Conversations as packed token ids with loss masks, in Parquet",
        "tokenmill.tasks.pack.kind:SFT",
    ),
    "rl": Registered(
        "rl",
        "rl-data-prep",
        "Prepare a blend of rows for reinforcement learning: JSON Lines that NeMo-RL and NeMo-Gym read.",
        "Rows for reinforcement learning, in JSON Lines",
        "tokenmill.tasks.rl.kind:RL",
    ),
    "harmony": Registered(
        "harmony",
        "harmony-normalize",
        "Normalize chat data into Harmony: deduplicated Parquet in pools, ready to be scored.",
        "Conversations in Harmony, in Parquet",
        "tokenmill.tasks.select.kind:HARMONY",
    ),
    "dedup": Registered(
        "dedup",
        "deduplicate-blend",
        "Remove duplicate documents from a blend of text, and documents that overlap evaluations.",
        "Text without duplicate documents, in JSON Lines",
        "tokenmill.tasks.dedup.kind:DEDUP",
        nightly=False,
    ),
    "filter": Registered(
        "filter",
        "filter-blend",
        "Keep the documents of a blend that pass quality, language and personal-data rules.",
        "Text filtered by quality, language and personal data, in JSON Lines",
        "tokenmill.tasks.filter.kind:FILTER",
        nightly=False,
    ),
    "nll": Registered(
        "score nll",
        "score-candidates",
        "Score the assistant's tokens under a causal language model: NLL and perplexity per row.",
        "The NLL of answers under a language model, by row, in Parquet",
        "tokenmill.tasks.score.kind:NLL",
        nightly=False,
    ),
    "embeddings": Registered(
        "score embed",
        "score-candidates",
        "Embed every candidate, so that similar texts can be found.",
        "Embeddings of texts, by row, in Parquet",
        "tokenmill.tasks.score.kind:EMBEDDINGS",
        nightly=False,
    ),
}
"""Every preparation kind, by the `type` of its manifest."""


WORDS = {kind.command.rpartition(" ")[2]: name for name, kind in KINDS.items()}
"""Every kind by the last word of its command: what `--kind` takes."""


def kind_of(manifest: Manifest) -> "Kind[Any, Any] | None":
    """Return the kind that published a manifest; None for other outputs, such as a choice of rows."""
    return preparation(manifest["type"]) if manifest["type"] in KINDS else None


def preparation(name: str) -> "Kind[Any, Any]":
    """Return the record of a kind. Raises InputError for an unknown name."""
    if name not in KINDS:
        raise InputError(f"{name!r} isn't a preparation kind; {nearest(name, KINDS)}")
    module, _, attribute = KINDS[name].record.partition(":")
    return getattr(import_module(module), attribute)


def preparation_called(word: str) -> "Kind[Any, Any]":
    """Return the record of the kind whose command ends in a word. Raises InputError for an unknown word."""
    if word not in WORDS:
        raise InputError(f"--kind {word}: unknown; {nearest(word, WORDS)}")
    return preparation(WORDS[word])
