"""Settings for tokenizers and the pretraining preparation, and the recipe of its shards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema
from tokenmill.tasks.blend.models import Fim
from tokenmill.tasks.shards.receipt import ADDED
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.strict import COMMENT, Size, Strict

Engine = Literal["gigatoken", "fastokens"]
Backend = Engine | Literal["reference"]
SpecialTokens = Literal["literal", "allow", "reject"]


class TokenizerSource(Strict, frozen=True):
    """The tokenizer to use."""

    # A form would show a property as a switch, which could only be refused.
    model_config = ConfigDict(
        json_schema_extra={"patternProperties": {COMMENT: {}, "^trust_remote_code$": {"const": False}}}
    )

    model: str = Field(
        default="o200k_harmony",
        min_length=1,
        description="Hub id, folder, tokenizer.json, SentencePiece .model, or the name of a tiktoken encoding.",
    )
    revision: str | None = Field(
        default=None, min_length=1, description="Commit, tag or branch of a Hub id; pin a commit."
    )
    trust_remote_code: SkipJsonSchema[bool] = Field(
        default=False, description="Code from a repository is never run; must be false."
    )

    @model_validator(mode="after")
    def _refuse_remote_code(self) -> Self:
        if self.trust_remote_code:
            raise ValueError(
                "trust_remote_code=true isn't supported: convert the tokenizer to a tokenizer.json instead"
            )
        return self


class TokenizerSettings(TokenizerSource, frozen=True):
    """The tokenizer to use, and the ids to add to each document."""

    add_bos: bool = Field(default=False, description="One beginning-of-sequence id before each document.")
    add_eos: bool = Field(default=True, description="One end-of-document id after each document.")


class PretrainSettings(PreparationSettings, frozen=True):
    """The settings of the pretraining preparation."""

    tokenizer: TokenizerSettings = Field(default=TokenizerSettings(), description="Tokenizer of the documents.")
    special_tokens_in_text: SpecialTokens = Field(
        default="literal", description="Control strings in text: encode as text or as control ids, or reject the row."
    )
    min_doc_chars: int | None = Field(default=None, ge=1, description="Drop and count shorter documents.")
    max_doc_tokens: int | None = Field(default=None, ge=1, description="Cut longer documents; EOS is kept.")
    fim: Fim | None = Field(default=None, description="Fill in the middle; a dataset's own `fim` replaces it.")
    prefix_size: Size = Field(
        default=32_000_000_000, description="Bytes of tokens in one published .bin, for example 32GB."
    )

    @model_validator(mode="after")
    def _leave_room_for_text(self) -> Self:
        extra = self.tokenizer.add_bos + self.tokenizer.add_eos
        if self.max_doc_tokens is not None and self.max_doc_tokens <= extra:
            raise ValueError(f"max_doc_tokens={self.max_doc_tokens} doesn't leave space for text besides BOS and EOS")
        return self


@dataclass(frozen=True, slots=True)
class PretrainRecipe:
    """Every option that can change a byte of a pretraining shard.

    `tokenizer` is the fingerprint of its content, `backend` the verdict of the exactness gate, `bos` and `eos` are the
    ids to add or None. Without holdout, the shares are 0 and the seed is None. `fim` holds the fields of a `FimRecipe`, if documents
    are rearranged.
    """

    text_field: str
    tokenizer: str
    vocabulary_size: int
    backend: Backend
    bos: int | None
    eos: int | None
    special_tokens_in_text: SpecialTokens
    min_doc_chars: int | None
    max_doc_tokens: int | None
    holdout_valid: float
    holdout_test: float
    holdout_seed: int | None
    fim: Mapping[str, Any] | None = field(default=None, metadata=ADDED)

    @property
    def holds_out(self) -> bool:
        """Whether the shard is split into train, valid and test parts."""
        return self.holdout_seed is not None

    @property
    def added(self) -> int:
        """Ids added to each document."""
        return (self.bos is not None) + (self.eos is not None)

    @property
    def max_text_tokens(self) -> int | None:
        """The most ids of a text in a document, without BOS and EOS; None without a limit."""
        return None if self.max_doc_tokens is None else self.max_doc_tokens - self.added
