"""The outcome of a nightly run: a table, a JSON record, and a sentence for the state of the run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .blends import NightlyBlend

Result = Literal["unchanged", "prepared", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome for a blend: latest version if known, reasons for a new one, shards built and reused, and any error.

    `diff` is the command that accounts for every document of the new version and the one before, if it can.
    """

    blend: NightlyBlend
    result: Result
    version: str | None = None
    reasons: Sequence[str] = ()
    shards: Mapping[str, int] = field(default_factory=dict[str, int])
    error: str | None = None
    diff: str | None = None

    @property
    def row(self) -> dict[str, Any]:
        """A row of the run's table."""
        return {
            "blend": self.blend.name,
            "result": self.result,
            "version": self.version or "-",
            "built": self.shards.get("built", 0),
            "reused": self.shards.get("reused", 0),
            "why": "; ".join([*([self.error] if self.error else []), *self.reasons]),
            "diff": self.diff or "-",
        }


def night_record(outcomes: Sequence[Outcome], output_dir: str, prune_error: str | None) -> dict[str, Any]:
    """The JSON record of a nightly run; `prune_error` is the error of pruning, or None."""
    counts = Counter(outcome.result for outcome in outcomes)
    made_from = [{"type": "blend", "path": outcome.blend.path} for outcome in outcomes]
    blends = {row.pop("blend"): row for row in (outcome.row for outcome in outcomes)}
    results = {result: counts[result] for result in ("unchanged", "prepared", "failed")}
    what = {"path": output_dir, "type": "nightly", **results, "blends": blends, "prune_error": prune_error}
    return {"nightly": {**what, "made_from": made_from}}


def failures(outcomes: Sequence[Outcome]) -> str:
    """The failed blends with their errors; empty if none failed."""
    failed = [outcome for outcome in outcomes if outcome.result == "failed"]
    if not failed:
        return ""
    named = "; ".join(f"{outcome.blend.name}: {outcome.error}" for outcome in failed)
    return f"{len(failed)} of {len(outcomes)} blends failed, all others are up to date: {named}"
