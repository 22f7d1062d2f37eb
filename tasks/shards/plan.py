"""The plan: every shard of a preparation, which of them are proven already, and why the others are not.

A plan is a value: data sets in blend order, files sorted, slices in order, each with identity and key. Building is
then only "make what is pending", and publication only "everything in the plan, with a receipt each".
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenmill.tasks.sources.files import Slice, slice_of

from .identity import difference, shard_key
from .receipt import Receipt
from .store import Store


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One shard to be: the data set and split it belongs to, its slice, and its identity.

    `split` is a split of the blend, or `datasets` in a flat blend.
    """

    dataset: str
    split: str
    part: Slice
    identity: dict[str, Any]

    @property
    def key(self) -> str:
        """The shard's name in the store."""
        return shard_key(self.identity)

    @property
    def place(self) -> str:
        """Where the rows are, for people and for comparing plans: `split/dataset/uri@start`."""
        return f"{self.split}/{self.dataset}/{self.part.file.uri}@{self.part.start}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All shards of a preparation, the receipts of those that are proven, and how many files of each data set
    (`split/name`) are not read, by kind.
    """

    store: Store
    shards: tuple[PlannedShard, ...]
    keys: tuple[str, ...]
    proven: Mapping[str, Receipt]
    skipped: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])

    @classmethod
    def of(cls, store: Store, shards: list[PlannedShard], *, rebuild: bool) -> "Plan":
        """The plan for `shards`; with `rebuild`, nothing counts as proven."""
        keys = tuple(shard.key for shard in shards)
        return cls(store, tuple(shards), keys, {} if rebuild else store.proven(store.begun(keys)))

    @property
    def pending(self) -> list[PlannedShard]:
        """The shards still to be built, each key once."""
        waiting = {key: shard for key, shard in zip(self.keys, self.shards, strict=True) if key not in self.proven}
        return list(waiting.values())

    @property
    def pending_bytes(self) -> int:
        """Source bytes that building will read."""
        return sum(shard.part.size for shard in self.pending)


def reasons(plan: Plan, previous: Mapping[str, Mapping[str, Any]]) -> Counter[str]:
    """Why shards are pending, counted: `previous` maps the place of each shard of the last plan to its identity.

    A shard at a place that the last plan knew is explained by the fields that changed, with old and new value for
    choices; a shard at a new place is new; an unchanged one lost its receipt or an output.
    """
    return Counter(_reason(shard, previous.get(shard.place)) for shard in plan.pending)


def _reason(shard: PlannedShard, before: Mapping[str, Any] | None) -> str:
    if before is None:
        return "new"
    changed = difference(before, shard.identity)
    if not changed:
        return "no valid receipt with all outputs"
    return "; ".join(_change(name, old, new) for name, (old, new) in changed.items())


def _change(name: str, old: object, new: object) -> str:
    return "source content changed" if name == "source.content" else f"{name} changed: {old!r} -> {new!r}"


def shard_record(shard: PlannedShard) -> dict[str, Any]:
    """A planned shard as plain JSON, small enough to travel through a scheduler."""
    return {"dataset": shard.dataset, "split": shard.split, "identity": shard.identity, "part": asdict(shard.part)}


def shard_from_record(record: Mapping[str, Any]) -> PlannedShard:
    """The planned shard of a record that `shard_record` made."""
    return PlannedShard(record["dataset"], record["split"], slice_of(record["part"]), record["identity"])
