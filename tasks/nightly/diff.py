"""`tokenmill diff A B`: two outputs or versions, document by document, from manifests, receipts and the fates of rows.

Every document of A is kept, changed, moved to a different split or gone; every document of B is one of the first three or new. The
counts add up to both totals, which is checked. Slices of equal content have equal rows, so their fates are compared row by row; of
shards with one key aren't read. Other rows are aligned by a hash of their published form, first by equal hashes, then by
their place between equal neighbors in the file: that separates a changed row from one removed and one added. Text isn't tokenized.

Files that changed are read whole into memory, one at a time.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.text import Text as RichText
from tokenmill.tasks.dataset.dataset import open_dataset, require_followed
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.kit.parts import Items, Table, Text, visible_line
from tokenmill.tasks.kit.terminal import print_table
from tokenmill.tasks.shards.fates import NOT_RECORDED
from tokenmill.tasks.shards.manifest import entry_files
from tokenmill.tasks.shards.publish import Output, publish_bytes
from tokenmill.tasks.shards.receipt import difference
from tokenmill.tasks.storage import absolute

from .changes import manifest_changes
from .published_rows import PLACE, digests, outcomes

Class = Literal["kept", "changed", "moved", "gone", "new"]
CLASSES: tuple[Class, ...] = ("kept", "changed", "moved", "gone", "new")

# Parts of a recipe that choose documents and change none
CHOOSING = (
    "recipe.holdout_",
    "recipe.min_",
    "recipe.filters",
    "source.filters",
    "source.where",
    "source.keys",
    "recipe.valid_from",
    "recipe.split",
    "recipe.blend_split",
)

MOST_EXAMPLES = 3

Pairs = tuple[np.ndarray, np.ndarray]  # pairs of changed rows, as row numbers in A and in B (int64 [pairs], each)


@dataclass
class Finding:
    """Documents of one dataset and class with one reason: how many, and the source rows of the first as FILE:LINE."""

    dataset: str
    what: Class
    reason: str
    documents: int = 0
    examples: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Difference:
    """How B differs from A: what changed in blend, settings and sources, and every document by dataset, class and reason."""

    before: str
    after: str
    changes: Sequence[str]
    findings: Sequence[Finding]
    documents: tuple[int, int]

    def count(self, what: Class, dataset: str | None = None) -> int:
        return sum(each.documents for each in self.findings if each.what == what and dataset in {None, each.dataset})


@dataclass(frozen=True, slots=True)
class SliceUnit:
    """The rows in one source slice: `rows` rows in shard number `shard`, from row `first` on."""

    shard: int
    file: str
    content: tuple[Any, ...]
    first: int
    rows: int


class Snapshot:
    """One of the two outputs."""

    def __init__(self, output_dir: str) -> None:
        self.prepared = require_followed(open_dataset(output_dir))
        # Several slices ask for the same shard, if files are bundled
        self.outcomes = lru_cache(maxsize=None)(lambda shard: outcomes(self.prepared, shard))
        self.digests = lru_cache(maxsize=None)(lambda shard: digests(self.prepared, shard))
        self.reasons = lru_cache(maxsize=None)(self._reasons)

    @property
    def documents(self) -> int:
        return sum(sum(entry["documents"].values()) for entry in self.prepared.entries)

    @cached_property
    def units(self) -> Mapping[str, Sequence[SliceUnit]]:
        """The slices of each dataset (`split/name`), in order."""
        found: defaultdict[str, list[SliceUnit]] = defaultdict(list)
        entries = self.prepared.entries
        for shard, (entry, origins) in enumerate(zip(entries, self.prepared.origins, strict=True)):
            first, source = 0, entry["source"]
            for file, origin in zip(entry_files(entry), origins, strict=True):
                content = (file["content"], source["format"], source.get("compression"), origin.rows)
                found[f"{entry['split']}/{entry['dataset']}"].append(
                    SliceUnit(shard, origin.file, content, first, origin.rows)
                )
                first += origin.rows
        return found

    def identity(self, shard: int) -> Mapping[str, Any]:
        """Return the recipe of a shard, without its source and its place."""
        entry = self.prepared.entries[shard]
        recipe = self.prepared.manifest["recipes"][entry["recipe"]]
        choices = {name: value for name, value in recipe["recipe"].items() if name not in PLACE}
        return {**recipe, "recipe": choices, "split": entry["split"], "decided": entry.get("decided", {}).get("mode")}

    def place(self, shard: int, row: int) -> str:
        """Return the source row, as FILE:LINE."""
        origin, line = self.prepared.source(shard, row)
        return f"{origin.file}:{line}"

    def _reasons(self, shard: int) -> np.ndarray:
        """Why each row of a shard was dropped (objects [rows])."""
        found = self.prepared.reasons(shard)
        for row, bad in self.prepared.quarantined(shard).items():
            found[row] = f"quarantined: {bad['reason']}"
        return np.where(found == None, NOT_RECORDED, found)  # noqa: E711 - elements


def diff(before: str, after: str) -> Difference:
    """Compare two outputs of one kind. Raises InputError for other folders, RunError for missing shards or if counts disagree."""
    a, b = Snapshot(before), Snapshot(after)
    if a.prepared.manifest["type"] != b.prepared.manifest["type"]:
        kinds = f"{a.prepared.manifest['type']!r} and {b.prepared.manifest['type']!r}"
        raise InputError(f"{before} and {after}: hold {kinds}; diff takes two outputs of one kind")
    same = _data_sets(a, b)
    counter = DiffCounter(a, b)
    for old, new in same:
        counter.compare(old, new)
    for old in a.units.keys() - {old for old, _ in same}:
        counter.count_unmatched(old, _rows(a.units[old]), "gone", "the dataset is gone")
    for new in b.units.keys() - {new for _, new in same}:
        counter.count_unmatched(new, _rows(b.units[new]), "new", "the dataset is new")
    changed = manifest_changes(a.prepared.manifest, b.prepared.manifest, dict(same))
    found = Difference(a.prepared.path, b.prepared.path, changed, counter.findings, (a.documents, b.documents))
    shared = sum(found.count(what) for what in ("kept", "changed", "moved"))
    counted = shared + found.count("gone"), shared + found.count("new")
    if counted != found.documents:
        raise RunError(
            f"{found.before} and {found.after}: {counted} documents are accounted for, of {found.documents}; run tokenmill "
            "verify on both folders"
        )
    return found


def _data_sets(a: Snapshot, b: Snapshot) -> list[tuple[str, str]]:
    """Return the datasets in both: first with the same name, then renamed ones, which share content."""
    same = [(name, name) for name in a.units if name in b.units]
    old = [name for name in a.units if name not in b.units]
    new = [name for name in b.units if name not in a.units]
    for name in old:
        contents = {unit.content for unit in a.units[name]}
        shared = {each: sum(unit.content in contents for unit in b.units[each]) for each in new}
        alike = [each for each in new if each.partition("/")[2] == name.partition("/")[2]]
        best = next(iter(alike), None) or max(new, key=lambda each: shared[each], default=None)
        if best is not None and (alike or shared[best]):
            same.append((name, best))
            new.remove(best)
    return same


def _rows(units: Sequence[SliceUnit]) -> np.ndarray:
    """Return the rows in units: their shard and their number in it (int64 [rows, 2])."""
    parts = [
        np.stack([np.full(unit.rows, unit.shard), np.arange(unit.first, unit.first + unit.rows)], axis=1)
        for unit in units
    ]
    return np.concatenate(parts) if parts else np.empty((0, 2), np.int64)


def matched(a: np.ndarray, b: np.ndarray) -> Pairs:
    """Pairs of equal keys, the n-th occurrence in `a` with the n-th in `b`; ascending in `a`."""
    _, found = np.unique(np.concatenate([a, b]), axis=0, return_inverse=True)  # a number for each distinct key
    found = found.ravel()
    keys = [_occurrences(part) for part in (found[: len(a)], found[len(a) :])]
    _, left, right = np.intersect1d(keys[0], keys[1], assume_unique=True, return_indices=True)
    order = np.argsort(left)
    return left[order], right[order]


def _occurrences(numbers: np.ndarray) -> np.ndarray:
    """Each number with its occurrence, as one key."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    rank = np.arange(len(ordered)) - np.repeat(starts, np.diff(starts, append=len(ordered)))
    keys = np.empty(len(numbers), np.int64)
    keys[order] = ordered * (1 << 32) + rank  # more rows than 2^32 don't fit into memory anyway
    return keys


class DiffCounter:
    """Counts every document by dataset, class and reason."""

    def __init__(self, a: Snapshot, b: Snapshot) -> None:
        self._a, self._b = a, b
        self._found: dict[tuple[str, str, str], Finding] = {}

    @property
    def findings(self) -> list[Finding]:
        """Return the counts, by dataset, in the order of the classes, the most frequent reasons first."""
        order = {what: number for number, what in enumerate(CLASSES)}
        return sorted(self._found.values(), key=lambda each: (each.dataset, order[each.what], -each.documents))

    def compare(self, old: str, new: str) -> None:
        """Account for every document of a dataset in both."""
        # Slices of equal content first: their rows are the same, one by one
        a, b = self._a.units[old], self._b.units[new]
        contents: dict[tuple[Any, ...], int] = {}
        keys = [
            np.array([[contents.setdefault(u.content, len(contents))] for u in units] or np.empty((0, 1), int))
            for units in (a, b)
        ]
        left, right = matched(*keys)
        for one, other in zip(left.tolist(), right.tolist(), strict=True):
            self._pair(new, _rows([a[one]]), _rows([b[other]]))
        rest = [
            [u for n, u in enumerate(units) if n not in set(done.tolist())] for units, done in ((a, left), (b, right))
        ]
        self._align(new, *rest)

    def count_unmatched(self, dataset: str, rows: np.ndarray, what: Class, reason: str) -> None:
        side = self._a if what == "gone" else self._b
        splits = _each(side.outcomes, rows)  # 0 for a dropped row, which is no document
        self._add(dataset, what, reason, side, rows[splits > 0])

    def _align(self, dataset: str, old: Sequence[SliceUnit], new: Sequence[SliceUnit]) -> None:
        """Pair the rows in slices whose content differs."""
        a, b = _rows(old), _rows(new)
        hashes = [_each(side.digests, rows) for side, rows in ((self._a, a), (self._b, b))]
        known = [np.flatnonzero(each) for each in hashes]  # dropped rows have no hash
        left, right = matched(*(each[at][:, None].view(np.int64) for each, at in zip(hashes, known, strict=True)))
        left, right = known[0][left], known[1][right]
        self._pair(dataset, a[left], b[right])
        both = {unit.file for unit in old} & {unit.file for unit in new}
        # A version may have a folder for its files, so those that only one side has are the same if their names are
        files: dict[str, int] = {}
        names = [[u.file if u.file in both else u.file.rpartition("/")[2] for u in units] for units in (old, new)]
        where = [
            np.repeat([files.setdefault(name, len(files)) for name in own], [u.rows for u in units])
            for own, units in zip(names, (old, new), strict=True)
        ]
        # Rows that are left between the same two neighbors are the same row, changed
        keys_a, rest_a = _gaps(len(a), left, right, where[0])
        keys_b, rest_b = _gaps(len(b), right, right, where[1])
        one, other = matched(keys_a, keys_b)
        self._pair(dataset, a[rest_a[one]], b[rest_b[other]])
        gone, added = np.delete(rest_a, one), np.delete(rest_b, other)
        copies = np.isin(hashes[0][gone], hashes[1][hashes[1] > 0])
        again = np.isin(hashes[1][added], hashes[0][hashes[0] > 0])
        self.count_unmatched(
            dataset, a[gone[copies]], "gone", "a duplicate row was removed from the source; a copy is kept"
        )
        self.count_unmatched(dataset, a[gone[~copies]], "gone", "the row was removed from the source")
        self.count_unmatched(dataset, b[added[again]], "new", "a duplicate row was added to the source")
        self.count_unmatched(dataset, b[added[~again]], "new", "the row was added to the source")

    def _pair(self, dataset: str, a: np.ndarray, b: np.ndarray) -> None:
        # Shard by shard, because a recipe, which explains a change, is that of a shard
        _, groups = np.unique(np.concatenate([a[:, :1], b[:, :1]], axis=1), axis=0, return_inverse=True)
        groups = groups.ravel()
        order = np.argsort(groups, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
            if rows.size:
                self._pair_shards(dataset, a[rows], b[rows])

    def _pair_shards(self, dataset: str, a: np.ndarray, b: np.ndarray) -> None:
        """Count the rows of a shard of A that became rows of a shard of B."""
        old, new = int(a[0, 0]), int(b[0, 0])
        recipe = difference(self._a.identity(old), self._b.identity(new))
        entries = self._a.prepared.entries[old], self._b.prepared.entries[new]
        before, after = _each(self._a.outcomes, a), _each(self._b.outcomes, b)
        both = (before > 0) & (after > 0)
        moved = both & (before != after)
        # Rows of shards with one key needn't be read to know that they are equal
        same = not recipe and entries[0]["key"] == entries[1]["key"] and np.array_equal(a[:, 1], b[:, 1])
        changed = np.zeros(len(a), np.bool_) if same else _each(self._a.digests, a) != _each(self._b.digests, b)
        changed &= both & ~moved
        why = "the row changed in the source"  # where the recipe is the same
        if entries[0]["source"] == entries[1]["source"]:
            why = "a different decision about duplicates"
        elif entries[1].get("decided", {}).get("mode") == "tag":
            why = "the row changed in the source, or the decision about its duplicates"
        choosing = {name: value for name, value in recipe.items() if name.startswith((*CHOOSING, "split"))}
        other = {name: value for name, value in recipe.items() if name not in choosing}
        self._add(dataset, "kept", "the same bytes", self._b, b[both & ~moved & ~changed])
        self._add(dataset, "changed", _described(other) or why, self._b, b[changed])
        self._add(dataset, "moved", _described(choosing) or "the row changed in the source", self._b, b[moved])
        gone, new_ones = (before > 0) & (after == 0), (before == 0) & (after > 0)
        self._dropped(dataset, "gone", self._a, a[gone], self._b, b[gone])
        self._dropped(dataset, "new", self._b, b[new_ones], self._a, a[new_ones])

    def _dropped(
        self, dataset: str, what: Class, side: Snapshot, kept: np.ndarray, other: Snapshot, lost: np.ndarray
    ) -> None:
        """Count documents of one side that the other dropped, by the reason."""
        reasons = np.array([other.reasons(shard)[row] for shard, row in lost.tolist()], object)
        for reason in dict.fromkeys(reasons.tolist()):
            text = reason if what == "gone" else f"no longer dropped: {reason}"
            self._add(dataset, what, text, side, kept[reasons == reason])

    def _add(self, dataset: str, what: Class, reason: str, side: Snapshot, rows: np.ndarray) -> None:
        if not len(rows):
            return
        label = dataset.removeprefix("datasets/")
        finding = self._found.setdefault((label, what, reason), Finding(label, what, reason))
        finding.documents += len(rows)
        if what != "kept":
            wanted = rows[: MOST_EXAMPLES - len(finding.examples)]
            finding.examples += [side.place(shard, row) for shard, row in wanted.tolist()]


def _each(read: Callable[[int], np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Return the value of each row; `read` returns the values for all rows in a shard."""
    found = np.zeros(len(rows), np.uint64)
    for shard in np.unique(rows[:, 0]).tolist():
        mask = rows[:, 0] == shard
        found[mask] = read(shard)[rows[mask, 1]]
    return found


def _gaps(count: int, own: np.ndarray, partner: np.ndarray, files: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows without a partner, and the key of each: its file, and the partner of the last matched row before it there.

    `own` are the matched rows and `partner` their numbers in B. The rows of a file are consecutive.
    """
    # The last matched row at or before each one; rows before the first one of their file have no anchor, -1
    last = np.full(count, -1, np.int64)
    last[own] = own
    starts = np.flatnonzero(np.diff(files, prepend=-1))
    first = np.repeat(starts, np.diff(starts, append=count)) if count else last
    last = np.maximum.accumulate(last) if count else last
    partners = np.full(count + 1, -1, np.int64)
    partners[own] = partner
    rest = np.setdiff1d(np.arange(count), own)
    anchors = np.where(last[rest] < first[rest], -1, partners[last[rest]])
    return np.stack([files[rest], anchors], axis=1).reshape(-1, 2), rest


def _described(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name.removeprefix('recipe.')} {old!r} -> {new!r}" for name, (old, new) in changed.items())


def difference_record(found: Difference) -> dict[str, Any]:
    """Return the difference as a JSON record."""
    findings = [
        {"class" if name == "what" else name: value for name, value in asdict(each).items()} for each in found.findings
    ]
    before, after = found.documents
    return {
        "diff": {
            "path": found.after, "before": found.before, "type": "diff", "changes": list(found.changes),
            "documents": {"before": before, "after": after}, "classes": {what: found.count(what) for what in CLASSES},
            "findings": findings,
        }
    }  # fmt: skip


def sentence(found: Difference) -> str:
    """Return the totals in one line, with the change in percent."""
    before, after = found.documents
    share = f" ({(after - before) / before:+.1%})" if before else ""
    counts = ", ".join(f"{found.count(what):,} {what}" for what in CLASSES)
    return f"{before:,} -> {after:,} documents{share}: {counts}"


def _table(found: Difference) -> Table:
    rows = [(each.dataset, each.documents, each.what, each.reason, ", ".join(each.examples)) for each in found.findings]
    return Table("Every document", ("dataset", "documents", "class", "reason", "for example"), rows)


def print_difference(found: Difference, console: Console, *, table: bool = True) -> None:
    """Print what changed, then the documents by dataset, class and reason, in a table or a line each."""
    title = f"{visible_line(found.before)} -> {visible_line(found.after)}"
    for line in (RichText(title, "bold"), *(RichText(f"  {visible_line(change)}") for change in found.changes)):
        line.overflow = "fold"
        console.print(line)
    print_table(console, _table(found), tables=table)
    console.print(sentence(found), markup=False, highlight=False)


def publish_difference(found: Difference, place: str) -> Output:
    """Write the page to the file or object `place`; errors as in `publish`."""
    from tokenmill.tasks.kit import html  # noqa: PLC0415 - Jinja2 takes 40 ms, and terminals need none of it

    parts = [
        Text(sentence(found)),
        Items(found.changes or ["nothing changed in settings, datasets or files"]),
        _table(found),
    ]
    return publish_bytes(absolute(place), html.page(f"{found.before} → {found.after}", {"Difference": parts}).encode())
