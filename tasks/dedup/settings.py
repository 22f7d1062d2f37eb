"""Deduplication settings, and their recipes.

`DedupChoices` is part of the settings of a Harmony normalization; `DedupSettings` are for a blend of text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.strict import Strict

from .near import THRESHOLD

Mode = Literal["tag", "drop"]
NearOn = Literal["conversation", "prompt"]
DedupStep = Literal["exact", "pairs", "verify", "narrow", "crowds", "settle", "cap", "decide"]

MIN_THRESHOLD = 0.5
"""Below this similarity, candidate search misses more than one pair in eight."""


Near = Annotated[
    bool,
    Field(description="Also find near-duplicates: texts that share most of their runs of five words or characters."),
]
Threshold = Annotated[
    float, Field(ge=MIN_THRESHOLD, le=1, description="Minimum Jaccard similarity of near-duplicates.")
]


class DedupChoices(Strict, frozen=True):
    """How to find duplicates among conversations, and how to treat them."""

    mode: Literal["off", "tag", "drop"] = Field(
        default="tag", description="Tag duplicates, drop them, or turn deduplication off."
    )
    near: Near = True
    threshold: Threshold = THRESHOLD
    near_on: NearOn = Field(
        default="conversation",
        description="Text to compare for near-duplicates and contamination: the whole conversation or only its prompt.",
    )
    cap: int | None = Field(default=None, ge=1, description="Maximum rows per prompt; the best are kept.")
    evaluations: Blend | str | None = Field(
        default=None,
        description="Blend of evaluations; rows that share 13 consecutive words with one, or contain a shorter one, are contaminated.",
    )


class DedupSettings(PreparationSettings, frozen=True):
    """Settings of the deduplication in a blend of text."""

    mode: Mode = Field(default="drop", description="Drop duplicates, or tag every row with its outcome.")
    near: Near = True
    threshold: Threshold = THRESHOLD
    cap: int | None = Field(default=None, ge=1, description="Maximum documents per prompt; the shortest are kept.")
    cap_by: str | None = Field(default=None, min_length=1, description="Field with the prompt of a document.")
    id_field: str | None = Field(
        default=None, min_length=1, description="Field with the name of a document; by default its file and row."
    )
    evaluations: Blend | str | None = Field(
        default=None,
        description="Blend of evaluations; documents that share 13 consecutive words with one, or contain a shorter one, are contaminated.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if "holdout" in self.model_fields_set:
            raise ValueError("holdout does not apply to deduplication, which splits no rows; remove it")
        if (self.cap is None) != (self.cap_by is None):
            raise ValueError(
                "cap and cap_by need each other: the maximum number of documents, and the field with their prompt"
            )
        return self

    @property
    def choices(self) -> DedupChoices:
        """The settings that find duplicates."""
        return DedupChoices(
            mode=self.mode, near=self.near, threshold=self.threshold, cap=self.cap, evaluations=self.evaluations
        )


@dataclass(frozen=True, slots=True)
class SignRecipe:
    """Every setting that can change a byte of a slice's signatures. `options` are the reader's, `prompts` is whether
    prompts are signed, `evaluations` is the hash of their content, or None.
    """

    reader: str
    options: Mapping[str, Any]
    partitions: int
    near: bool
    near_on: NearOn
    prompts: bool
    evaluations: str | None


@dataclass(frozen=True, slots=True)
class RoundRecipe:
    """Every setting that can change a step's findings, None if it doesn't affect the step. `threshold` is also None
    without near-duplicates, and `cap` without a cap.
    """

    step: DedupStep
    partitions: int
    threshold: float | None = None
    evaluations: bool | None = None
    cap: int | None = None
