"""What a person can choose about a pretraining preparation, under the same names everywhere.

YAML files, `key.sub=value` on the command line and flow parameters all end in `PretrainSettings`. Those that can
change a byte of a shard are copied into the `PretrainRecipe`, which is part of its identity; the others (where, how
many workers, how much of the data) never are.
"""

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.storage import SourceIdentity
from tasks.strict import Size, Strict

Backend = Literal["gigatoken", "reference"]
SpecialTokens = Literal["literal", "allow", "reject"]
OnBadRow = Literal["quarantine", "fail"]
Scale = Literal["tiny", "small", "medium", "full"]

SHARES: dict[Scale, float] = {"tiny": 0.01, "small": 0.1, "medium": 0.3, "full": 1.0}
TINY_ROWS = 10_000


class TokenizerSettings(Strict, frozen=True):
    """Which tokenizer, and what it adds around each document."""

    model: str = Field(
        default="o200k_harmony",
        min_length=1,
        description="Hub id, folder, tokenizer.json, SentencePiece .model, or the name of a tiktoken encoding.",
    )
    revision: str | None = Field(default=None, description="Commit, tag or branch of a hub id; pin a commit.")
    trust_remote_code: bool = Field(default=False, description="Code from a repository is never run; must be false.")
    add_bos: bool = Field(default=False, description="One beginning-of-sequence id before each document.")
    add_eos: bool = Field(default=True, description="One end-of-document id after each document.")

    @model_validator(mode="after")
    def _runs_no_foreign_code(self) -> Self:
        if self.trust_remote_code:
            raise ValueError("trust_remote_code=true is refused: convert the tokenizer to a tokenizer.json instead")
        return self


class Holdout(Strict, frozen=True):
    """Shares of documents held out for validation and testing, chosen by a hash of the document."""

    valid: float = Field(default=0.01, ge=0, lt=1, description="Share of documents for validation.")
    test: float = Field(default=0.01, ge=0, lt=1, description="Share of documents for testing.")
    seed: int = Field(default=42, ge=0, lt=2**64, description="Another seed chooses other documents.")

    @model_validator(mode="after")
    def _leaves_something(self) -> Self:
        if self.valid + self.test >= 1:
            raise ValueError(f"valid + test must be below 1, not {self.valid} + {self.test}")
        return self


class PretrainSettings(Strict, frozen=True):
    """Everything a person can choose about a pretraining preparation; the defaults prepare a laptop-sized blend."""

    tokenizer: TokenizerSettings = TokenizerSettings()
    special_tokens_in_text: SpecialTokens = Field(
        default="literal", description="Control strings in text: plain text, control ids, or quarantine the row."
    )
    shard_size: Size = Field(default=256_000_000, description="Source bytes per shard, for example 256MB.")
    store: str | None = Field(default=None, description="Where shards live; share it between preparations.")
    holdout: Holdout = Holdout()
    source_identity: SourceIdentity = Field(default="content", description="Know local files by content, or by stat.")
    on_bad_row: OnBadRow = Field(default="quarantine", description="What a row that cannot be read does.")
    bad_row_ceiling: float = Field(default=0.001, ge=0, le=1, description="Share of a data set's rows that may be bad.")
    min_doc_chars: int | None = Field(default=None, ge=1, description="Shorter documents are dropped and counted.")
    max_doc_tokens: int | None = Field(default=None, ge=1, description="Longer documents are cut; EOS is kept.")
    scale: Scale = Field(default="full", description="Leading share of each data set: 1 %, 10 %, 30 % or all.")
    sample: int | None = Field(default=None, ge=1, description="Leading rows of each data set.")
    force: bool = Field(default=False, description="Build every shard again, whatever receipts say.")
    allow_partial: bool = Field(default=False, description="Publish although shards are missing; it is recorded.")
    cluster: str = Field(default="local", description="local, a scheduler address, or a YAML file with a profile.")
    workers: int | None = Field(default=None, ge=1, description="Worker processes; all cores by default.")

    @model_validator(mode="after")
    def _room_for_text(self) -> Self:
        extra = self.tokenizer.add_bos + self.tokenizer.add_eos
        if self.max_doc_tokens is not None and self.max_doc_tokens <= extra:
            raise ValueError(f"max_doc_tokens={self.max_doc_tokens} leaves no room for text beside BOS and EOS")
        return self


@dataclass(frozen=True, slots=True)
class PretrainRecipe:
    """Every choice that can change a byte of a pretraining shard, and nothing else.

    `tokenizer` is the fingerprint of the tokenizer's content, `backend` what the exactness gate decided, `bos` and
    `eos` the ids that are added or None, and the holdout shares are 0 (with seed None) when nothing is held out.
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

    @property
    def holds_out(self) -> bool:
        """Whether the shard is split into train, valid and test parts."""
        return self.holdout_seed is not None
