"""The plan of a preparation: every shard, which of them have a valid receipt, and why the others must be built.

A plan is a value: datasets in blend order, files sorted, slices in order, each with identity and key. Building makes the
pending shards; publication requires a receipt for every planned shard.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from tokenmill.tasks.blend.models import SPLITS
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.renamed import LEAVES
from tokenmill.tasks.sources.files import InputWarning, Slice

from .receipt import Receipt, difference, shard_key
from .store import Store

if TYPE_CHECKING:
    from tokenmill.tasks.sources.forms import Sample  # reads every format: 0.1 s, which a verification does not need

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """A shard to build: its dataset and split, its slice, and its identity.

    `split` is a split of the blend, or `datasets` in a flat blend. `inputs` are the receipts of the shards
    that it is made from, which its identity names.
    """

    dataset: str
    split: str
    part: Slice
    identity: dict[str, Any]
    inputs: tuple[Receipt, ...] = ()

    @property
    def key(self) -> str:
        return shard_key(self.identity)

    @property
    def place(self) -> str:
        """The shard's source position, for messages and for comparing plans: `split/dataset/uri@start`."""
        return f"{self.split}/{self.dataset}/{self.part.file.uri}@{self.part.start}"


WHOLE = "all"
"""The only part of a shard without held-out documents; it belongs to the split that the blend names."""

MOST_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Finished:
    """A planned shard, its key and its receipt."""

    shard: PlannedShard
    key: str
    receipt: Receipt

    @property
    def dataset(self) -> tuple[str, str]:
        return self.shard.split, self.shard.dataset

    def split_of(self, part: str) -> str:
        if part != WHOLE:
            return part
        return self.shard.split if self.shard.split in SPLITS else "train"

    def decided(self, decision: Mapping[str, Any]) -> PlannedShard:
        """Return the shard that a later stage makes from this one and a decision about its rows."""
        identity = {**self.receipt.identity, "decided": dict(decision)}
        return replace(self.shard, identity=identity, inputs=(self.receipt,))


def proven_once(store: Store, keys: Iterable[str], seen: dict[str, Receipt | None]) -> dict[str, Receipt]:
    """Return the receipts of proven shards; those in `seen` were read before, None for a missing one, and others are added."""
    wanted = list(dict.fromkeys(keys))
    new = [key for key in wanted if key not in seen]
    found = store.proven(store.begun(new))
    seen.update((key, found.get(key)) for key in new)
    return {key: receipt for key in wanted if (receipt := seen[key])}


@dataclass(frozen=True, slots=True)
class Plan:
    """All shards of a stage, the receipts of proven ones, and by dataset (`split/name`) skipped files by kind, and the
    sample of one with a filter; what to warn about. `built` are the keys of the shards that this run has built.
    """

    store: Store
    shards: tuple[PlannedShard, ...]
    keys: tuple[str, ...]
    proven: Mapping[str, Receipt]
    skipped: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    samples: "Mapping[str, Sample]" = field(default_factory=dict[str, "Sample"])
    warnings: Sequence[InputWarning] = ()
    built: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, store: Store, shards: list[PlannedShard], *, rebuild: bool, seen: dict[str, Receipt | None] | None = None
    ) -> "Plan":
        """Plan `shards`; with `rebuild`, ignore existing receipts."""
        keys = tuple(shard.key for shard in shards)
        return cls(
            store, tuple(shards), keys, {} if rebuild else proven_once(store, keys, {} if seen is None else seen)
        )

    def of_other(self, shards: list[PlannedShard], *, rebuild: bool) -> "Plan":
        """Return a plan of `shards` that are made of the same inputs."""
        other = Plan.of(self.store, shards, rebuild=rebuild)
        return replace(self, shards=other.shards, keys=other.keys, proven=other.proven)

    @property
    def pending(self) -> list[PlannedShard]:
        """The shards to build, each key once."""
        # Equal slices of two datasets share a key, and are built once.
        waiting = {key: shard for key, shard in zip(self.keys, self.shards, strict=True) if key not in self.proven}
        return list(waiting.values())

    @property
    def finished(self) -> list[Finished]:
        pairs = zip(self.shards, self.keys, strict=True)
        return [Finished(shard, key, self.proven[key]) for shard, key in pairs if key in self.proven]

    @property
    def missing(self) -> list[str]:
        return [shard.place for shard, key in zip(self.shards, self.keys, strict=True) if key not in self.proven]

    def after(self, receipts: Iterable[Receipt]) -> "Plan":
        proven = {**self.proven, **{receipt.key: receipt for receipt in receipts}}
        return replace(self, proven=proven, built=frozenset(shard.key for shard in self.pending))

    def require_whole(self, otherwise: str = "") -> None:
        """Raises RunError for shards without a receipt; `otherwise` is what else may help."""
        if missing := self.missing:
            raise RunError(
                f"{len(missing)} of {len(self.keys)} planned shards don't have a receipt: {', '.join(missing[:MOST_SHOWN])}; run the "
                f"same command again to build them{otherwise}"
            )

    def require_kept(self) -> None:
        """Raises RunError for proven shards that have since gone from the store, as after a removal by `prune`."""
        there = set(self.store.there(self.proven))
        if gone := [item.shard.place for item in self.finished if item.key not in there]:
            raise RunError(
                f"{len(gone)} of {len(self.keys)} planned shards don't have a receipt any more: {', '.join(gone[:MOST_SHOWN])}; run the "
                "same command again to build them"
            )

    @property
    def pending_bytes(self) -> int:
        return sum(shard.part.size for shard in self.pending)


def consecutive(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Group consecutive items of at most `most` in size together, or one that is larger; added items change only the last group."""
    group: list[Item] = []
    total = 0
    for item in items:
        if group and total + size(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group


def reasons(plan: Plan, previous: Mapping[str, Mapping[str, Any]]) -> Counter[str]:
    """Count the reasons why shards are pending; `previous` is the identity of each shard of the last plan by its place.

    A shard at a known place is pending because of the fields that changed, or because its receipt or an output is gone;
    a shard at a different place is new.
    """
    found: Counter[str] = Counter()
    for shard in plan.pending:
        before = previous.get(shard.place)
        changed = [] if before is None else changes(before, shard.identity)
        found["new" if before is None else "; ".join(changed) or "no valid receipt with all outputs"] += 1
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the fields of an identity that changed, each with its old and new value."""
    found: list[str] = []
    for name, (old, new) in difference(before, after).items():
        path, dot, leaf = name.rpartition(".")
        now = f"{path}{dot}{LEAVES.get(leaf, leaf)}"  # settings that were renamed keep their names in identities
        found.append("source content changed" if name == "source.content" else f"{now} changed: {old!r} -> {new!r}")
    return found


PARTS = ("train", "valid", "test")
"""The parts of a shard with held-out documents."""


def part_of(digest: int, valid: float, test: float) -> str:
    """Return the part of one document by a hash of its content, read as a fraction of 2**64: the lowest go to test, the next to valid.

    So every source contributes the chosen share, equal documents are kept together, and added data doesn't move documents.
    """
    return "test" if digest < int(test * 2**64) else "valid" if digest < int((valid + test) * 2**64) else "train"


def parts_of(digests: np.ndarray, valid: float, test: float) -> np.ndarray:
    """Return the part of each document, as an index into PARTS (uint8), from its 64-bit hash (uint64) and the shares."""
    in_test, held_out = (np.uint64(int(share * 2**64)) for share in (test, valid + test))
    return np.where(digests < in_test, 2, np.where(digests < held_out, 1, 0)).astype(np.uint8)
