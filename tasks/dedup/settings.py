"""Settings of deduplication, and the recipes they become.

`DedupChoices` is part of the settings of a Harmony normalization; `DedupSettings` are those of a blend of text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.strict import Strict

from .near import THRESHOLD

Mode = Literal["tag", "drop"]
NearOn = Literal["conversation", "prompt"]
Step = Literal["exact", "pairs", "verify", "narrow", "crowds", "settle", "cap", "decide"]

LEAST_THRESHOLD = 0.5
"""Below this similarity, candidate search misses more than one pair in eight."""


class DedupChoices(Strict, frozen=True):
    """How to find duplicates among conversations, and what to do with them."""

    mode: Literal["off", "tag", "drop"] = Field(
        default="tag", description="Leave duplicates alone, mark them, or leave them out."
    )
    near: bool = Field(
        default=True, description="Also find near-duplicates, which share most runs of five words or characters."
    )
    threshold: float = Field(
        default=THRESHOLD,
        ge=LEAST_THRESHOLD,
        le=1,
        description="Jaccard similarity from which two are near-duplicates.",
    )
    near_on: NearOn = Field(
        default="conversation",
        description="What near-duplicates and evaluations are compared by: all, or what users say.",
    )
    cap: int | None = Field(default=None, ge=1, description="Most rows of one prompt; the best ones stay.")
    evaluations: Blend | str | None = Field(
        default=None,
        description="Blend of evaluations; rows that hold 13 words in a row out of one, or a short one whole, are contaminated.",
    )


class DedupSettings(PreparationSettings, frozen=True):
    """Settings of the deduplication of a blend of text."""

    mode: Mode = Field(default="drop", description="Leave duplicates out, or write every row with what became of it.")
    near: bool = Field(
        default=True, description="Also find near-duplicates, which share most runs of five words or characters."
    )
    threshold: float = Field(
        default=THRESHOLD,
        ge=LEAST_THRESHOLD,
        le=1,
        description="Jaccard similarity from which two are near-duplicates.",
    )
    cap: int | None = Field(default=None, ge=1, description="Most documents of one prompt; the shortest ones stay.")
    cap_by: str | None = Field(default=None, min_length=1, description="Field that names the prompt of a document.")
    id_field: str | None = Field(
        default=None, min_length=1, description="Field that documents are called by; file and row where left out."
    )
    evaluations: Blend | str | None = Field(
        default=None,
        description="Blend of evaluations; documents that hold 13 words in a row out of one, or a short one whole, are contaminated.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if "holdout" in self.model_fields_set:
            raise ValueError("holdout means nothing here, because rows are not split; leave it out")
        if (self.cap is None) != (self.cap_by is None):
            raise ValueError("cap and cap_by go together: how many documents, and the field that names their prompt")
        return self

    @property
    def choices(self) -> DedupChoices:
        """The settings that find duplicates."""
        return DedupChoices(
            mode=self.mode, near=self.near, threshold=self.threshold, cap=self.cap, evaluations=self.evaluations
        )


@dataclass(frozen=True, slots=True)
class SignRecipe:
    """Every setting that can change a byte of a slice's signatures. `options` are the reader's, `prompts` says whether
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
    """Every setting that can change what a step finds, None where it does not affect the step. `threshold` is also None
    without near-duplicates, and `cap` without a cap.
    """

    step: Step
    partitions: int
    threshold: float | None = None
    evaluations: bool | None = None
    cap: int | None = None
