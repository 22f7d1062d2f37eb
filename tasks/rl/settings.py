"""Settings of an RL preparation, and the recipe of its shards."""

from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from tokenmill.tasks.blend.models import TransformSpec, Value
from tokenmill.tasks.pack.sampling import Sampling
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.strict import Seed, Strict
from tokenmill.tasks.tokenize.settings import Backend, TokenizerSource

from .targets import TargetName

Compression = Literal["none", "zstd"]
Splits = Literal["holdout", "source"]


class Curriculum(Strict, frozen=True):
    """How the pass rates of training rows move from batch to batch."""

    field: str | None = Field(
        default=None,
        min_length=1,
        description="Field with the pass rate of a row, or its difficulty; a path with dots.",
    )
    pass_rate_range: float = Field(
        default=0.3, description="How far the mean falls from the first batch to the last, or rises if negative."
    )
    spread: float = Field(default=0.15, gt=0, description="Standard deviation of the pass rates that a batch asks for.")
    drop_unsolved_at: float = Field(
        default=0.0, description="Exclude rows at or below this pass rate, as never solved."
    )
    drop_solved_at: float = Field(default=1.0, description="Exclude rows at or above this pass rate, as always solved.")


class RlSettings(PreparationSettings, frozen=True):
    """Settings of an RL preparation."""

    transforms: list[TransformSpec] = Field(default=[], description="Transforms for datasets that list none.")
    target: TargetName = Field(default="none", description="Trainer whose requirements rows are checked against.")
    splits: Splits = Field(
        default="holdout", description="Hold out validation and test rows, or use the splits of the sources."
    )
    val_holdout: int | None = Field(
        default=None, ge=1, description="Number of last rows per dataset to hold out, instead of shares by hash."
    )
    compression: Compression = Field(default="none", description="Plain JSON Lines, or compressed with zstd.")
    max_tokens: int | None = Field(default=None, ge=1, description="Drop rows with more tokens of text.")
    tokenizer: TokenizerSource = Field(default=TokenizerSource(), description="Tokenizer that max_tokens counts with.")
    batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Order the training rows so that every step of so many holds each dataset's share.",
    )
    sampling: Sampling = Field(
        default="none", description="Apply weights in batches by dropping (down) or repeating (up) rows."
    )
    curriculum: Curriculum = Field(default=Curriculum(), description="Order batches by the pass rates of their rows.")
    seed: Seed = Field(default=42, description="Shuffle seed for rows in batches.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_tokens is not None and self.target == "none":
            raise ValueError("max_tokens counts the texts that the target reads; set target as well")
        if self.val_holdout is not None and self.splits == "source":
            raise ValueError(
                "val_holdout holds rows out, splits=source uses the splits of the source; keep one of the two"
            )
        return self

    @model_validator(mode="after")
    def _orders_batches(self) -> Self:
        if self.batch_size is None and (self.sampling != "none" or self.curriculum.field):
            raise ValueError("sampling and curriculum order rows within batches; set batch_size as well")
        if self.batch_size is not None and self.compression != "none":
            raise ValueError("batch_size orders rows, and compressed rows cannot be moved; set compression=none")
        return self


@dataclass(frozen=True, slots=True)
class RlRecipe:
    """Every choice that can change a byte of an RL shard.

    `transforms` name tables by content. `tokenizer` is a fingerprint and `backend` the decision of the exactness gate, both
    None if no tokens are counted. Rows from number `valid_from` of the slice are held out, if it is set; otherwise shares
    by a hash of the row, unless `holdout_seed` is None.
    """

    filters: dict[str, list[Value]]
    transforms: list[Any]
    target: TargetName
    max_tokens: int | None
    tokenizer: str | None
    backend: Backend | None
    compression: Compression
    holdout_valid: float
    holdout_test: float
    holdout_seed: int | None
    valid_from: int | None
