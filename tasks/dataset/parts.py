"""The row files of a published preparation, and the source of each row.

The manifest has the number of rows per file, so that a random choice doesn't open files, and the number of source rows before each
slice. A pack stores the row of each document among all shards that were packed together; for bin/idx, the
fates of the shard's rows lead to it. So no line number needs a second read of the source.
"""

import re
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, count
from typing import NamedTuple, Self

import numpy as np
from tokenmill.tasks.errors import InputError, RunError, nearest
from tokenmill.tasks.shards.fates import read_fates
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.manifest import Origin, derived_entries, join_published, origin_of, origins_in, split_of
from tokenmill.tasks.shards.publish import Extent
from tokenmill.tasks.shards.receipt import RECEIPT
from tokenmill.tasks.shards.records import Manifest, ShardEntry
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import join
from tokenmill.tasks.tokenize.fim import ROLES as FIM_ROLES
from tokenmill.tasks.tokenize.fim import FimRecipe

from .stored import Row, StoredDocuments, pack_batches, packs_with, read_pack

# The name of a file with only the leading packs of a group, which the manifest lists among its files.
LEADING = re.compile(
    r".+/(?P<split>\w+)/\d{6,}__(?P<dataset>.+)__(?P<key>[0-9a-f]{8})__\d+_leading_(?P<packs>\d+)\.parquet"
)

WINDOW = 1 << 20  # tokens of a `.bin` that are read at once
KEY_SHOWN = 8  # characters of a shard's key in a document id, enough to distinguish some ten thousand shards
DOCUMENT = re.compile(r"(?P<key>[0-9a-f]{8,32})(?:-(?P<part>all|train|valid|test))?-(?P<number>[0-9]{1,18})")
LIKE_THIS = "ids look like 1a2b3c4d-17 (packed) or 1a2b3c4d-train-17 (bin/idx), and view shows one above each document"


class Member(NamedTuple):
    """A shard whose sequences are in packs: its number in the manifest, its key, and its rows, from number `first` on."""

    shard: int
    key: str
    first: int
    rows: int


@dataclass(frozen=True)
class ShardPart:
    """One part (`all`, or `train`, `valid`, `test`) of a shard, with its location and slice.

    `packed` distinguishes packed Parquet from bin/idx; `split` is the published split; `rows` is its number of packs or
    documents; `origins` are the source slices of the shard's rows, one unless it is a bundle. Packs hold the rows of their
    `members`. `fim` is the recipe by which documents were rearranged, if any were.
    """

    packed: bool
    key: str
    name: str
    split: str
    dataset: str
    store: Store
    rows: int
    origins: Sequence[Origin]
    members: Sequence[Member] = ()
    fim: FimRecipe | None = None

    @property
    def shards(self) -> list[str]:
        """The keys of the shards that its documents are named by."""
        return [member.key for member in self.members] if self.packed else [self.key]

    @property
    def identity(self) -> tuple[str | int, ...]:
        """Distinguishes parts of equal content that the blend lists more than once."""
        return self.key, self.name, self.split, self.dataset, self.origins[0].file, self.origins[0].start

    @property
    def place(self) -> str:
        """The stored file without its extension."""
        return self.store.path(self.key, self.name)

    @property
    def stored(self) -> str:
        """The file of tokens: packs, or the prefix with the shard's tokens."""
        return f"{self.place}.parquet" if self.packed else self.pair.tokens.uri

    @cached_property
    def pair(self) -> StoredDocuments:
        """The documents of a pair, whose tokens may be in a prefix."""
        empty = Extent(f"{self.place}.bin", 0, 0)
        return StoredDocuments(self.place, self.store.locate(self.key, f"{self.name}.bin") or empty)

    def row(self, number: int, tokens: tuple[np.ndarray, np.ndarray] | None = None) -> Row:
        """Pack or document `number`; for `tokens` see `read_pack`.

        In a `.bin` every token is trained on, without a role: the document is one sequence of `text`, or if it was rearranged to
        fill in the middle, of its prefix, suffix and middle. Raises RunError if the files are missing or damaged, or lack the row.
        """
        return (
            read_pack(self.stored, number, tokens)
            if self.packed
            else self._document(number, self.pair.ids(number, number + 1))
        )

    @property
    def all_rows(self) -> Iterator[Row]:
        """Every row, in order. Raises RunError as `row` does."""
        if self.packed:
            yield from chain.from_iterable(batch.rows for batch in pack_batches(self.stored))
            return
        number = count()
        for ids, lengths in self.pair.batches(WINDOW):
            yield from (self._document(next(number), each) for each in np.split(ids, np.cumsum(lengths[:-1])))

    def _document(self, number: int, ids: np.ndarray) -> Row:
        roles = np.zeros(len(ids), np.int8) if self.fim is None else self.fim.roles(ids)
        return Row(ids, np.ones(len(ids), np.bool_), roles, FIM_ROLES, np.array([0]), np.array([number]), None)

    def rows_with(self, documents: Collection[int]) -> list[int]:
        """Return the rows with tokens of any of these documents, ascending. Raises RunError as `row` does."""
        if self.packed:
            return packs_with(self.stored, documents)
        return sorted(document for document in documents if document < self.rows)

    def document(self, number: int) -> str:
        """Return the id of a document: in packs its shard and row, which no other packing changes, otherwise its index in the `.bin`."""
        if not self.packed:
            return f"{self.key[:KEY_SHOWN]}-{self.name}-{number}"
        member = self.members[bisect_right(self.members, number, key=lambda member: member.first) - 1]
        return f"{member.key[:KEY_SHOWN]}-{number - member.first}"

    def numbers_of(self, key: str, number: int) -> list[int]:
        """Return the numbers here of document `number` of the shards whose keys begin with `key`."""
        if not self.packed:
            return [number]
        # Files of equal content are shards with one key, so packs may hold a document more than once
        members = (member for member in self.members if member.key.startswith(key) and number < member.rows)
        return [member.first + number for member in members]

    @property
    def sources(self) -> str:
        """The source files, for messages."""
        others = len(self.origins) - 1
        return self.origins[0].file + (f" and {others:,} other files" if others else "")

    def source(self, number: int) -> tuple[Origin, int | None]:
        """Return the slice of a document, and its line in the file, from 1.

        The line is None after a missing slice, and in shards without the fates of rows. Raises RunError for damaged ones, and
        for a bundle without a receipt.
        """
        rows = None if self.packed else self._rows
        if not self.packed and rows is None:
            if len(self.origins) > 1:
                raise RunError(f"{self.store.path(self.key, RECEIPT)}: missing or damaged; prepare the data again")
            return self.origins[0], None
        origin, row = origin_of(self.origins, number if rows is None else int(rows[number]))
        return origin, None if origin.before is None else origin.before + row + 1

    @cached_property
    def _rows(self) -> np.ndarray | None:
        """The row of each document in the slice, None where the fates of rows aren't recorded."""
        receipt = self.store.read_receipt(self.key)
        found = receipt and read_fates(self.store, receipt)
        return found and found.rows(self.name)


@dataclass(frozen=True, slots=True)
class DocumentId:
    """A parsed document id: the start of its shard's key, its part (bin/idx only), its number."""

    text: str
    key: str
    part: str | None
    number: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a document id. Raises InputError if it is malformed."""
        match = DOCUMENT.fullmatch(text)
        if match is None:
            raise InputError(f"--doc: {text!r} is not a document id; {LIKE_THIS}")
        return cls(text, match["key"], match["part"], int(match["number"]))


def parts_of(manifest: Manifest, dataset: str | None) -> list[ShardPart]:
    """Every part with rows, in plan order, of one dataset or all. A shard listed twice counts once.

    Raises InputError for an unknown dataset, or if no part has rows.
    """
    known = {entry["dataset"] for entry in manifest["shards"]}
    if dataset is not None and dataset not in known:
        raise InputError(f"--dataset: no dataset {dataset!r} in this preparation; {nearest(dataset, known)}")
    parts: dict[tuple[str, str], ShardPart] = {}
    for part, _ in parts_and_entries(manifest):
        if dataset in {None, part.dataset}:
            parts.setdefault((part.key, part.name), part)
    if not parts:
        raise InputError("the shards are empty, so rows can't be shown; see the drops in the manifest")
    return list(parts.values())


def parts_and_entries(manifest: Manifest) -> Iterator[tuple[ShardPart, ShardEntry]]:
    """Yield every part with rows, in plan order, with the manifest's entry about its publication.

    A group of packs is over the rows of its shards, one shard after the other. Before format 3, a shard of conversations was
    packed separately, and contains its packs itself.
    """
    shards = manifest["shards"]
    origins = origins_in(shards)
    packed = preparation(manifest["type"]).tokens == "packs"
    groups = [(entry, [shard]) for shard, entry in enumerate(shards)]
    if packed and "derived" in manifest:
        # Groups name the sequences that they hold; shards of equal content have one name, and are taken in order
        waiting: defaultdict[tuple[str, str, str], deque[int]] = defaultdict(deque)
        for shard, entry in enumerate(shards):
            for name in entry["documents"]:
                waiting[entry["split"], entry["dataset"], f"{entry['key']}/{name}"].append(shard)
        groups.clear()
        for group in manifest["derived"]["shards"]:
            held = ((group["split"], group["dataset"], name) for name in group["source"]["sequences"])
            groups.append((group, [waiting[each].popleft() for each in held]))
    for entry, numbers in groups:
        firsts = accumulate((shards[shard]["rows"] for shard in numbers), initial=0)
        members = [
            Member(n, shards[n]["key"], first, shards[n]["rows"]) for n, first in zip(numbers, firsts, strict=False)
        ]
        own = [origin for shard in numbers for origin in origins[shard]]
        yield from ((part, entry) for part in parts_of_entry(manifest, entry, own, members if packed else ()))


def parts_of_entry(
    manifest: Manifest, entry: ShardEntry, origins: Sequence[Origin], members: Sequence[Member] = ()
) -> list[ShardPart]:
    """Return the parts with documents of a shard that the manifest lists, or of a group of packs with the rows of `members`."""
    listed = manifest["derived"] if members and "derived" in manifest else manifest
    made = listed["recipes"][entry["recipe"]]
    store, fim = Store(manifest["volatile"]["store"], made["kind"]), made["recipe"].get("fim")
    return [
        ShardPart(
            packed=bool(members), key=entry["key"], name=name, split=split_of(entry, name), dataset=entry["dataset"],
            store=store, rows=entry["facts"][name]["packs"] if members else documents, origins=origins, members=members,
            fim=FimRecipe(**fim) if fim else None,
        )
        for name, documents in entry["documents"].items()
        if documents or members
    ]  # fmt: skip


class PublishedNames:
    """Leads from documents (packs, rows) in published files to documents in shards, and back.

    A published file holds the documents of one or more parts of shards, one part after the other.
    """

    def __init__(self, manifest: Manifest, output_dir: str) -> None:
        self._held: dict[str, list[tuple[ShardPart, int]]] = {}
        self._ends: dict[str, list[int]] = {}
        self._places: dict[tuple[str | int, ...], list[tuple[str, int, range]]] = {}
        by_key: dict[tuple[str, str], ShardPart] = {}
        members: defaultdict[tuple[str, str, str], deque[ShardPart]] = defaultdict(deque)
        for part, entry in parts_and_entries(manifest):
            # The name of a file with leading packs has no more of a key
            by_key[part.key[:KEY_SHOWN], part.split] = part
            members[entry["split"], entry["dataset"], f"{part.key}/{part.name}.bin"].append(part)
            published = entry["published"]
            for name in published.get(part.split, published.get(part.name, [])):
                self._add(join_published(output_dir, name), part, part.rows)
        # Prefixes name their members; shards of equal content have one name, and are taken in the order of the manifest
        derived = derived_entries(manifest)
        for joined in (entry for entry in derived if "members" in entry["source"]):
            parts = [
                members[joined["split"], joined["dataset"], name].popleft() for name in joined["source"]["members"]
            ]
            for name in (name for names in joined["published"].values() for name in names):
                for part in parts:
                    self._add(join_published(output_dir, name), part, part.rows)
        # A phase may read some documents of a prefix; its pair is then a range of them
        for phase in manifest.get("phases", []):
            for pair in phase.get("pairs", []):
                self._add_range(join_published(output_dir, pair["path"]), join_published(output_dir, pair["of"]), pair)
        for file in manifest["files"]:
            name = join(output_dir, file["path"])
            if match := LEADING.fullmatch(name):
                self._add(name, by_key[match["key"], match["split"]], int(match["packs"]))

    def _add(self, name: str, part: ShardPart, rows: int, begin: int = 0) -> None:
        """Add `rows` documents of a part to a file, from number `begin` on."""
        first = self.rows(name)
        self._held.setdefault(name, []).append((part, begin))
        self._ends.setdefault(name, []).append(first + rows)
        self._places.setdefault(part.identity, []).append((name, first - begin, range(begin, begin + rows)))

    def _add_range(self, name: str, prefix: str, pair: Mapping[str, int]) -> None:
        """Add the documents of a prefix that a phase reads, unless it reads the prefix itself."""
        if name in self._held:
            return
        first, stop, start = pair["first"], pair["first"] + pair["documents"], 0
        for (part, _), end in zip(self._held[prefix], self._ends[prefix], strict=True):
            begin, rows = max(first, start) - start, min(stop, end) - max(first, start)
            if rows > 0:
                self._add(name, part, rows, begin)
            start = end

    def rows(self, name: str) -> int:
        """Return the documents (packs, rows) of a published file; 0 for an unknown name."""
        return self._ends[name][-1] if name in self._ends else 0

    def document(self, name: str, number: int) -> tuple[ShardPart, int]:
        """Return the part of a shard with document `number` of a published file, and its number there.

        Raises KeyError for an unknown name, IndexError for a number that is not in the file.
        """
        ends = self._ends[name]  # of the parts in the file, in its documents
        place = bisect_right(ends, number)
        part, begin = self._held[name][place]
        return part, begin + number - (ends[place - 1] if place else 0)

    def places(self, part: ShardPart, number: int) -> list[tuple[str, int]]:
        """Return the published files with document `number` of a part, and its number in each."""
        places = self._places.get(part.identity, [])
        return [(name, first + number) for name, first, rows in places if number in rows]


def parts_of_document(parts: Sequence[ShardPart], wanted: DocumentId) -> list[ShardPart]:
    """Return the parts that may hold a document. Raises InputError unless the id matches exactly one shard."""
    of_part = [part for part in parts if wanted.part == (None if part.packed else part.name)]
    found = [part for part in of_part if any(key.startswith(wanted.key) for key in part.shards)]
    keys = sorted({key for part in found for key in part.shards if key.startswith(wanted.key)})
    if not keys:
        raise InputError(f"--doc: no shard here matches {wanted.text!r}; {LIKE_THIS}")
    if len(keys) > 1:
        raise InputError(f"--doc: {len(keys)} shards match {wanted.text!r}; write more of the key: {', '.join(keys)}")
    return found
