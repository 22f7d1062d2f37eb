"""Pool and candidate settings, and their recipe."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from tokenmill.tasks.dedup.settings import DedupChoices
from tokenmill.tasks.harmony.settings import HarmonySettings
from tokenmill.tasks.strict import Strict

from .collapse import Limits
from .scores import Column
from .signature import View

KEPT = 'dedup_outcome is null or dedup_outcome == "kept"'
"""Rows that are neither duplicates, nor contaminated, nor beyond the cap."""


DISTINCT = {"behavior": Limits().structures}
"""Default of `min_distinct_behaviors` by view; in this view, distances mean nothing once behaviors have collapsed."""


class SelectionChoices(Strict, frozen=True):
    """Pools, candidates and the limits of a selection."""

    pools: str = Field(default="bundled", description="YAML file of pools, bundled, or none.")
    scores: list[str] = Field(
        default=[],
        description="Score and choice folders with columns for predicates; null for rows without a score.",
    )
    unique: bool = Field(default=False, description="Put each row only into the first pool that matches it.")
    materialize: bool = Field(default=False, description="Write copies of each pool's rows, not a list of them.")
    view: View | Literal["none"] = Field(
        default="prompt", description="Part of a conversation to embed, or none for no candidates."
    )
    require: str = Field(default=KEPT, description="Predicate for the rows that become candidates.")
    share: float = Field(
        default=1.0, gt=0, le=1, description="Share of these rows to keep, sampled by a hash of their id."
    )
    min_distinct_behaviors: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Minimum share of distinct behaviors, below which the run fails; by default 0.01 for the view behavior, else 0.",
    )
    min_tool_call_fraction: float = Field(
        default=0.0, ge=0, le=1, description="Minimum share of rows with tool calls, below which the run fails."
    )

    @property
    def limits(self) -> Limits:
        """The limits that the behaviors of the candidates must keep."""
        least = DISTINCT.get(self.view, 0.0) if self.min_distinct_behaviors is None else self.min_distinct_behaviors
        return Limits(least, self.min_tool_call_fraction)


class NormalizationSettings(HarmonySettings, frozen=True):
    """Settings of a Harmony normalization, deduplication and selection included."""

    dedup: DedupChoices = Field(default=DedupChoices(), description="How to find and treat duplicates.")
    selection: SelectionChoices = Field(
        default=SelectionChoices(), description="Which rows go into pools and become candidates."
    )


@dataclass(frozen=True, slots=True)
class SelectionRecipe:
    """Every setting that can change a byte of a shard. `pools` are names and predicates; `scores` are the joined
    columns of each folder; `view` is None for no candidates; `sample` and `survey` keep rows whose hash modulo the
    first number is below the second. `materialize` copies rows into pools.
    """

    base: list[str]
    pools: list[tuple[str, str]]
    scores: Sequence[Sequence[Column]]
    unique: bool
    materialize: bool
    view: View | None
    require: str
    sample: tuple[int, int]
    survey: tuple[int, int]
