"""One RL shard: a slice of rows becomes JSON Lines, a quarantine file, and a receipt.

A row is parsed, chosen, transformed and checked as a record, and written in one of two ways. A record that comes
through as the very object that was parsed is written as the bytes that were read, to the last blank; any other is
written anew, as compact JSON. So what nobody asked to change is not changed: numbers always keep their spelling, and in
rows that come through, key order, duplicate keys and escapes stay as well. (Only a byte order mark goes, and line breaks
within a row become blanks.) Parsing and writing run at the speed of orjson, and what is done to a row costs 1 to 4
microseconds.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from socket import gethostname
from typing import cast

import numpy as np
import orjson
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.json_values import quoted
from tokenmill.tasks.shards.books import Books, OnBadRow
from tokenmill.tasks.shards.holdout import PARTS, parts_of
from tokenmill.tasks.shards.manifest import WHOLE
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import PartCount, Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.exact_json import compact, repeated_key
from tokenmill.tasks.sources.files import BadRow, RecordBatch
from tokenmill.tasks.sources.formats import read_records
from tokenmill.tasks.sources.json_rows import BYTE_ORDER_MARK, excerpt, excerpt_of
from tokenmill.tasks.sources.selection import RowFilter
from xxhash import xxh3_64_intdigest

from .length import RowLengths
from .lines import ENDINGS, JsonLines
from .record import Check, Record, Transform
from .settings import RlRecipe


@dataclass(frozen=True, slots=True)
class Work:
    """What is done to each row of a data set; `lengths` is None where nothing is counted, `form` where rows can have
    one form only.
    """

    transforms: Sequence[Transform]
    check: Check
    lengths: RowLengths | None
    form: Callable[[Record], str] | None = None

    def done(self, record: Record) -> Record | Rejected:
        """What becomes of a record."""
        for transform in self.transforms:
            found = transform(record)
            if isinstance(found, Rejected):
                return found
            record = found
        return self.check(record) or record


@dataclass(slots=True)
class _Rows:
    """Rows to be written: the place of each in its batch, the record that it has become, and its bytes."""

    places: list[int] = field(default_factory=list[int])
    records: list[Record] = field(default_factory=list[Record])
    lines: list[bytes] = field(default_factory=list[bytes])

    def add(self, place: int, record: Record, line: bytes) -> None:
        """Append a row."""
        self.places.append(place)
        self.records.append(record)
        self.lines.append(line)

    def take(self, chosen: np.ndarray) -> "_Rows":
        """Those whose numbers here are `chosen`."""
        numbers = chosen.tolist()
        return _Rows(*([each[number] for number in numbers] for each in (self.places, self.records, self.lines)))


@dataclass(slots=True)
class _Part:
    """A file of the shard, and what it holds."""

    lines: JsonLines
    documents: int = 0
    tokens: int = 0
    forms: set[str] = field(default_factory=set[str])


@dataclass
class _ShardWriter:
    """The files of a shard beside its books."""

    books: Books
    recipe: RlRecipe
    parts: dict[str, _Part] = field(default_factory=dict[str, _Part])
    untouched: int = 0

    def write(self, part: str, rows: Sequence[bytes], tokens: int, forms: Iterable[str]) -> None:
        if part not in self.parts:
            file = self.books.open(f"{part}.{ENDINGS[self.recipe.compression]}")
            self.parts[part] = _Part(JsonLines(file, self.recipe.compression))
        self.parts[part].lines.write(rows)
        self.parts[part].documents += len(rows)
        self.parts[part].tokens += tokens
        self.parts[part].forms.update(forms)


def write_shard(shard: PlannedShard, recipe: RlRecipe, work: Work, store: Store, on_bad_row: OnBadRow) -> Receipt:
    """Build one shard in its folder of the store and publish its receipt.

    Raises BadRowError when a row is bad and the policy is `fail`, RunError when the source changed since the plan,
    OSError from the storage. Nothing is proven by then, and the next attempt starts afresh.
    """
    started, cpu = time.time(), time.process_time()
    chosen = RowFilter(recipe.filters)
    with ExitStack() as stack:
        books = Books(shard.part, store.folder(shard.key), stack, on_bad_row)
        writer = _ShardWriter(books, recipe)
        for batch in read_records(shard.part, ()):
            _take(batch, chosen, work, writer)
        for part in writer.parts.values():
            part.lines.end()
    return store.issue(
        shard.identity,
        outputs=books.outputs,
        rows_in=books.rows_in,
        parts={name: PartCount(part.documents, part.tokens) for name, part in writer.parts.items()},
        drops=books.drops,
        quarantined=books.quarantined,
        truncated=0,
        facts={
            "untouched": writer.untouched,
            "forms": {name: sorted(part.forms) for name, part in writer.parts.items() if part.forms},
        },
        volatile={
            "built_at": started, "seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu,
            "host": gethostname(), "source": shard.part.file.uri, "source_bytes": shard.part.size,
        },
    )  # fmt: skip


def _take(batch: RecordBatch, chosen: RowFilter, work: Work, writer: _ShardWriter) -> None:
    """Transform, check and write one batch of rows, keeping the books."""
    books = writer.books
    books.rows_in += batch.consumed
    books.drop("blank_line", batch.blank)
    bad, rows = list(batch.bad), _Rows()
    for place, record in enumerate(batch.records):
        if not chosen.keeps(record):
            books.drop("filtered")
            continue
        found = work.done(record)
        line = _line(record, found, batch.raw[place] if batch.raw else None)
        if isinstance(line, Rejected):
            bad.append(_bad_row(batch, place, line))
        else:
            rows.add(place, cast("Record", found), line)
    books.set_aside(sorted(bad, key=lambda row: row.row))
    _write(rows, batch, work, writer)


def _line(record: Record, found: Record | Rejected, raw: bytes | None) -> bytes | Rejected:
    """The bytes of a row that `record` has become: its own, `raw`, where it has any and is the same."""
    if isinstance(found, Rejected):
        return found
    if raw is not None and found is record:
        return _on_one_line(raw.removeprefix(BYTE_ORDER_MARK))
    try:
        line = _written(found)
    except (TypeError, RecursionError) as error:  # kinds of values that only Parquet has, such as bytes; many levels
        return Rejected("not_json", f"the row holds a value that cannot be written as JSON: {error}; leave it out")
    if raw is None and isinstance(line, bytes) and b"null" in line and not _finite(found):
        return Rejected("not_json", "the row holds NaN or an infinity, which JSON cannot say; leave it out")
    return line


def _written(record: Record) -> bytes | Rejected:
    """A row that is changed, as compact JSON with numbers as its source spells them."""
    try:
        return orjson.dumps(record, option=orjson.OPT_PASSTHROUGH_SUBCLASS)
    except TypeError:
        key = repeated_key(record)
        if key is not None:
            why = f"the row is written anew, and the key {quoted(key)} stands twice in one of its objects"
            return Rejected("repeated_key", f"{why}; keep one, or leave the field out with select")
        return compact(record)


def _finite(record: Record) -> bool:
    """Whether no number of a row is NaN or infinite, for which orjson writes null."""
    try:
        json.dumps(record, allow_nan=False, default=str)
    except ValueError:
        return False
    return True


def _on_one_line(raw: bytes) -> bytes:
    """A row without line breaks, which can only be white space between its values; one that ends it may stay."""
    if b"\n" not in raw and b"\r" not in raw:
        return raw
    line = raw.replace(b"\n", b" ").replace(b"\r", b" ")
    return line[:-1] + b"\r" if raw.endswith(b"\r") else line


def _bad_row(batch: RecordBatch, place: int, why: Rejected) -> BadRow:
    beginning = excerpt(batch.raw[place]) if batch.raw else excerpt_of(batch.records[place])
    return BadRow(int(batch.rows[place]), why.reason, why.detail, beginning)


def _write(rows: _Rows, batch: RecordBatch, work: Work, writer: _ShardWriter) -> None:
    """Write the rows that are not too long, each to its part."""
    tokens = np.zeros(len(rows.lines), np.int64)
    if work.lengths is not None and rows.lines:
        tokens = work.lengths.of(rows.records)
        kept = np.flatnonzero(tokens <= work.lengths.most)
        writer.books.drop("oversize", len(tokens) - len(kept))
        rows, tokens = rows.take(kept), tokens[kept]
    writer.untouched += sum(
        record is batch.records[place] for place, record in zip(rows.places, rows.records, strict=True)
    )
    for part, chosen in _by_part(rows, batch, writer.recipe):
        written = rows.take(chosen)
        forms = map(work.form, written.records) if work.form else ()
        writer.write(part, written.lines, int(tokens[chosen].sum()), forms)


def _by_part(rows: _Rows, batch: RecordBatch, recipe: RlRecipe) -> Iterator[tuple[str, np.ndarray]]:
    """The parts of the shard, each with the numbers of its rows in `rows`; none that is empty."""
    everyone = np.arange(len(rows.lines))
    if recipe.valid_from is not None:
        held_out = batch.rows[np.asarray(rows.places, np.int64)] >= recipe.valid_from
        found = [("train", everyone[~held_out]), ("valid", everyone[held_out])]
    elif recipe.holdout_seed is not None:
        digests = np.asarray([_digest(batch, place, recipe.holdout_seed) for place in rows.places], np.uint64)
        parts = parts_of(digests, recipe.holdout_valid, recipe.holdout_test)
        found = [(name, everyone[parts == number]) for number, name in enumerate(PARTS)]
    else:
        found = [(WHOLE, everyone)]
    return ((name, chosen) for name, chosen in found if chosen.size)


def _digest(batch: RecordBatch, place: int, seed: int) -> int:
    """A hash of a row as it was read, 64 bits, without what stands around it: whatever is done to rows or comes to
    stand beside them, none changes sides.
    """
    if not batch.raw:
        return xxh3_64_intdigest(repr(batch.records[place]).encode(), seed)
    return xxh3_64_intdigest(batch.raw[place].removeprefix(BYTE_ORDER_MARK).strip(), seed)
