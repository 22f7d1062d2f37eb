"""One shard of a deduplicated blend: the rows of a slice that stay, or all of them with what became of each.

Rows of JSON are written as the bytes that were read; only a byte order mark goes, and line breaks within a row become
blanks. Three more fields are put before the closing brace, without a look at the others. Rows of Parquet keep all of
their columns. A row whose text could not be read is no document; it goes to quarantine, as everywhere.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import compress
from socket import gethostname
from typing import Any, BinaryIO, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.books import Books, OnBadRow
from tokenmill.tasks.shards.manifest import WHOLE
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.receipt import PartCount, Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.files import BadRow, Row, Slice
from tokenmill.tasks.sources.formats import format_of, read_texts
from tokenmill.tasks.sources.json_rows import BYTE_ORDER_MARK, field_path, pick_texts

from .decisions import OUTCOMES, rows_decided
from .outcome import KEPT

MARKS = pa.schema([
    pa.field("dedup_outcome", pa.string()),
    pa.field("duplicate_of", pa.large_string()),
    pa.field("jaccard", pa.float64()),
])  # fmt: skip
"""What is added to rows that are tagged: `kept` or the reason why not, the document that stays in its stead, and how alike
the two are."""

MARK_NAMES = [f'"{name}"'.encode() for name in MARKS.names]


def file_of(part: Slice) -> str:
    """What the file of rows is called."""
    return f"{WHOLE}.parquet" if format_of(part.file).columnar else f"{WHOLE}.jsonl"


@dataclass(frozen=True, slots=True)
class Rows:
    """Some consecutive rows of a slice: those that are documents (`content`, their numbers `rows` int64 [n]), those that
    are bad, and how many are blank.
    """

    content: list[bytes] | pa.RecordBatch
    rows: np.ndarray
    bad: Sequence[BadRow] = ()
    blank: int = 0


def apply_decisions(shard: PlannedShard, store: Store, outcomes: str, on_bad_row: OnBadRow) -> Receipt:
    """Build one shard of decided rows; `outcomes` is the `uri` of the decisions.

    Raises BadRowError when a row is bad and the policy is `fail`, RunError when the source is not what was signed.
    """
    started, cpu = time.time(), time.process_time()
    decided = rows_decided(outcomes, shard.identity["decided"]["outcomes"])
    with ExitStack() as stack:
        books = Books(shard.part, store.folder(shard.key), stack, on_bad_row)
        writer = _Writer(books, stack, file_of(shard.part), drop=shard.identity["decided"]["mode"] == "drop")
        for rows in read_rows(shard.part, shard.identity["recipe"]["options"]["text_field"]):
            writer.take(rows, decided)
        if writer.outcomes.total() != decided.num_rows:
            raise RunError(
                f"{shard.place}: {decided.num_rows} rows were decided to go, {writer.outcomes.total()} of them are "
                "there; run the same command again"
            )
    return store.issue(
        shard.identity,
        outputs=books.outputs,
        rows_in=books.rows_in,
        parts={WHOLE: PartCount(writer.documents, 0)} if writer.documents else {},
        drops=books.drops,
        quarantined=books.quarantined,
        facts={"outcomes": dict(sorted(writer.outcomes.items()))},
        volatile={
            "built_at": started, "seconds": time.time() - started, "cpu_seconds": time.process_time() - cpu,
            "host": gethostname(), "source": shard.part.file.uri, "source_bytes": shard.part.size,
        },
    )  # fmt: skip


def read_rows(part: Slice, text_field: str) -> Iterator[Rows]:
    """The rows of a slice as they stand, in order, with those that have no text told apart."""
    return _arrow_rows(part, text_field) if format_of(part.file).columnar else _json_rows(part, text_field)


def _json_rows(part: Slice, text_field: str) -> Iterator[Rows]:
    path, first = field_path(text_field), 0
    for rows in cast("Iterator[list[Row]]", format_of(part.file).rows(part)):
        texts = pick_texts(rows, path, first)
        content = [_on_one_line(cast("bytes", rows[number - first])) for number in texts.rows.tolist()]
        yield Rows(content, texts.rows, texts.bad, texts.blank)
        first += len(rows)


def _on_one_line(row: bytes) -> bytes:
    """A row without line breaks, which can only be white space between its values, and without what stands around it."""
    return row.removeprefix(BYTE_ORDER_MARK).strip().replace(b"\n", b" ").replace(b"\r", b" ")


def _arrow_rows(part: Slice, text_field: str) -> Iterator[Rows]:
    """Texts are read once more by themselves, because they say which rows are bad; batches of whole rows are smaller."""
    bad, first = [row for batch in read_texts(part, text_field) for row in batch.bad], 0
    numbers = np.array([row.row for row in bad], np.int64)
    for batch in cast("Iterator[pa.RecordBatch]", format_of(part.file).rows(part)):
        start, stop = np.searchsorted(numbers, [first, first + len(batch)]).tolist()
        good = np.setdiff1d(np.arange(first, first + len(batch)), numbers[start:stop])
        content = batch if start == stop else batch.take(pa.array(good - first))
        yield Rows(content, good, bad[start:stop])
        first += len(batch)


@dataclass
class _Writer:
    """The file of rows that is being written, and what it holds. `outcomes` counts the rows that do not stay."""

    books: Books
    stack: ExitStack
    name: str
    drop: bool
    documents: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    _parquet: pq.ParquetWriter | None = None

    def take(self, rows: Rows, decided: pa.Table) -> None:
        """Write what is to be written of some rows, keeping the books."""
        self.books.rows_in += len(rows.rows) + len(rows.bad) + rows.blank
        self.books.drop("blank_line", rows.blank)
        self.books.set_aside(rows.bad)
        marks = marks_of(rows.rows, decided)
        stays = compute.call_function("equal", [marks["dedup_outcome"], pa.scalar(KEPT)])
        gone = Counter(marks.filter(compute.call_function("invert", [stays]))["dedup_outcome"].to_pylist())
        self.outcomes.update(gone)
        content = rows.content
        if self.drop:
            for reason, count in gone.items():
                self.books.drop(reason, count)
            content = _chosen(content, stays) if isinstance(content, list) else content.filter(stays)
        else:
            content = _tagged_lines(content, marks) if isinstance(content, list) else _tagged(content, marks)
        self._write(content)

    def _write(self, content: list[bytes] | pa.RecordBatch) -> None:
        if not len(content):
            return
        self.documents += len(content)
        file = self.books.open(self.name)
        if isinstance(content, list):
            file.write(b"\n".join([*content, b""]))
            return
        if self._parquet is None:
            writer = pq.ParquetWriter(cast("BinaryIO", file), content.schema, compression="zstd")
            self._parquet = self.stack.enter_context(writer)
        self._parquet.write_batch(content)


def marks_of(rows: np.ndarray, decided: pa.Table) -> pa.RecordBatch:
    """What became of rows (int64, ascending) of a slice, given what was decided about those that do not stay: `MARKS`."""
    numbers = decided["row"].to_numpy()
    places = np.searchsorted(numbers, rows)
    there = np.append(numbers, -1)[places] == rows
    found = decided.take(pa.array(places, mask=~there))
    outcome, duplicate_of, jaccard = (found[name].combine_chunks() for name in OUTCOMES.names[1:])
    outcome = compute.call_function("coalesce", [outcome, pa.scalar(KEPT)])
    return pa.RecordBatch.from_arrays([outcome, duplicate_of, jaccard], schema=MARKS)


def _chosen(lines: list[bytes], stays: pa.BooleanArray) -> list[bytes]:
    return list(compress(lines, stays.to_pylist()))


def _tagged(batch: pa.RecordBatch, marks: pa.RecordBatch) -> pa.RecordBatch:
    """Rows with their marks; columns that they already have under these names are replaced."""
    kept = [name for name in batch.schema.names if name not in MARKS.names]
    columns = [*(batch[name] for name in kept), *(marks[name] for name in MARKS.names)]
    fields = [*(batch.schema.field(name) for name in kept), *MARKS]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, batch.schema.metadata))


def _tagged_lines(lines: list[bytes], marks: pa.RecordBatch) -> list[bytes]:
    return [tagged(line, mark) for line, mark in zip(lines, marks.to_pylist(), strict=True)]


def tagged(line: bytes, mark: dict[str, Any]) -> bytes:
    """A row of JSON, which has a field at least, with its marks; fields that it has under these names are replaced, and
    then the row is written anew.
    """
    if any(name in line for name in MARK_NAMES):
        return json.dumps({**json.loads(line), **mark}, ensure_ascii=False, separators=(",", ":")).encode()
    return line[:-1].rstrip() + b"," + orjson.dumps(mark)[1:]
