"""Build shards: group them into batches, count their rows, write their files, and issue each receipt last.

`building` is the only way to make a shard of any kind. It counts rows, drops and documents, applies the policy for
bad rows, and publishes the files and then the receipt when its block ends without an error. `build_batch` is the body of
the mapped Prefect task: it builds only shards without a valid receipt, so that it can be repeated at any time.
"""

import gc
import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from socket import gethostname
from typing import Any, BinaryIO, Protocol, TypeVar, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.sources.files import BadRow, RecordBatch, Rejected, RowBatch, Slice
from tokenmill.tasks.sources.formats import place_of, read_records
from tokenmill.tasks.sources.json_rows import excerpt_of
from tokenmill.tasks.storage import is_local

from .fates import FATES, FIRST_REASON, FateRecorder, read_fates
from .plan import PlannedShard
from .publish import Output, Publication, publish, sweep
from .receipt import NOT_READ, ROWS_BY_FILE, PartCount, Receipt
from .settings import OnBadRow
from .store import Store

QUARANTINE = "quarantine.jsonl"

FILTERED = "filtered"
"""The reason for rows that the filter of their dataset drops."""

TARGET_BYTES = 6_000_000_000
"""Source bytes per batch: one core tokenizes them in a minute, at 100 MB/s."""

BATCHES_PER_WORKER = 4
MOST_BATCHES = 1_000
"""A Prefect task on Dask costs 75 to 98 ms, and a burst of 10,000 tasks loses records in the server."""

BuildShard = Callable[[PlannedShard, Store], Receipt]
Announce = Callable[[dict[str, Any]], None]
Found = TypeVar("Found")


class BadRowError(RunError):
    """A row cannot be used and `on_bad_row` is `fail`."""


class OutputFile(Protocol):
    """A file being written; `output` exists once it is published."""

    @property
    def output(self) -> Output: ...


File = TypeVar("File", bound=OutputFile)


@dataclass
class ShardBuilder:
    """Counts and files for one shard; made by `building`, which sets `receipt` when the shard is complete."""

    shard: PlannedShard
    store: Store
    on_bad_row: OnBadRow
    stack: ExitStack
    rows_in: int = 0
    quarantined: int = 0
    truncated: int = 0
    parts: dict[str, PartCount] = field(default_factory=dict[str, PartCount])
    drops: Counter[str] = field(default_factory=Counter[str])
    unread: Counter[str] = field(default_factory=Counter[str])
    fates: FateRecorder = field(default_factory=FateRecorder)
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    volatile: dict[str, Any] = field(default_factory=dict[str, Any])
    outputs: list[Output] = field(default_factory=list[Output])
    rows_of_members: Counter[int] = field(default_factory=Counter[int])
    receipt: Receipt = field(init=False)
    _open: dict[str, Publication] = field(default_factory=dict[str, Publication])
    _tables: dict[str, pq.ParquetWriter] = field(default_factory=dict[str, pq.ParquetWriter])
    _files: list[OutputFile] = field(default_factory=list[OutputFile])

    def enter(self, file: AbstractContextManager[File]) -> File:
        """Open a file that is published with the shard."""
        opened = self.stack.enter_context(file)
        self._files.append(opened)
        return opened

    def open(self, name: str) -> Publication:
        """Return the file of that name in the shard's folder; the first call creates it."""
        if name not in self._open:
            self._open[name] = self.enter(publish(self.store.path(self.shard.key, name)))
        return self._open[name]

    def table(self, name: str, schema: pa.Schema) -> pq.ParquetWriter:
        """Return the Parquet file of that name, compressed with zstd; the first call creates it."""
        if name not in self._tables:
            writer = pq.ParquetWriter(cast("BinaryIO", self.open(name)), schema, compression="zstd")
            self._tables[name] = self.stack.enter_context(writer)
        return self._tables[name]

    def keep(self, part: str, documents: int | np.ndarray, tokens: int = 0) -> None:
        """Count documents written to a part of the shard: how many, or their rows (int64), whose fate is noted."""
        if isinstance(documents, np.ndarray):
            self.fates.keep(part, documents)
            documents = len(documents)
        before = self.parts.get(part, PartCount(0, 0))
        self.parts[part] = PartCount(before.documents + documents, before.tokens + tokens)

    def drop(self, reason: str, rows: int | np.ndarray) -> None:
        """Count dropped rows, other than bad ones: how many, or their numbers (int64), whose fate is noted."""
        if isinstance(rows, np.ndarray):
            self.fates.drop(reason, rows)
            rows = len(rows)
        if rows:
            self.drops[reason] += rows

    def drop_each(self, reasons: np.ndarray, rows: np.ndarray) -> None:
        """Count dropped rows (int64 [n]), each for one of the `reasons` (strings [n])."""
        for reason in np.unique(reasons).tolist():
            self.drop(reason, rows[reasons == reason])

    def count(self, batch: RowBatch, rejected: Sequence[BadRow] = ()) -> None:
        """Count the rows of a batch, and quarantine its bad rows and the `rejected` ones, in row order.

        Raises BadRowError for the first if the policy is `fail`.
        """
        first = self.rows_in
        self.rows_in += batch.consumed
        self.rows_of_members[batch.member] += batch.consumed
        # No fate yet: `write_fates` requires one for every row.
        self.fates.codes += bytes(batch.consumed)
        if batch.filtered:
            read = np.concatenate([batch.rows, batch.blank, [row.row for row in batch.bad]]).astype(np.int64)
            self.drop(FILTERED, np.delete(np.arange(first, self.rows_in), read - first))
        self.drop("blank_line", batch.blank)
        bad = sorted([*batch.bad, *rejected], key=lambda row: row.row)
        if bad and self.on_bad_row == "fail":
            raise bad_row_error(bad[0], self.shard.part)
        for row in bad:
            line = {"row": row.row, "reason": row.reason, "detail": row.detail, "excerpt": row.excerpt}
            self.open(QUARANTINE).write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            self.drop(row.reason, np.array([row.row]))
        self.quarantined += len(bad)

    def records(
        self, fields: Sequence[str], read: Callable[[RecordBatch, int], Found | Rejected | BadRow]
    ) -> Iterator[tuple[RecordBatch, dict[int, Found]]]:
        """Count and yield each batch of records, with the results of `read` by index in the batch.

        `read` takes a batch and an index. Rejected records are quarantined. Raises the errors of `count` and `read_records`.
        """
        for batch in read_records(self.shard.part, fields):
            kept: dict[int, Found] = {}
            rejected: list[BadRow] = []
            for index, record in enumerate(batch.records):
                found = read(batch, index)
                if isinstance(found, Rejected):
                    found = BadRow(int(batch.rows[index]), found.reason, found.detail, excerpt_of(record))
                if isinstance(found, BadRow):
                    rejected.append(found)
                else:
                    kept[index] = found
            self.count(batch, rejected)
            yield batch, kept

    def carry_on(self, made: Receipt, besides: str) -> None:
        """Take over counts, fates and files of a shard that this one is made from, except the file `besides`.

        Raises RunError for a file that has changed.
        """
        for output in made.outputs:
            if output.path not in {besides, FATES}:
                self.open(output.path).write(self.store.read(made, output.path))
        self.rows_in, self.quarantined, self.truncated = made.rows_in, made.quarantined, made.truncated
        self.drops, self.unread = Counter(made.drops), Counter(made.not_read)
        fates = read_fates(self.store, made)
        if fates:
            self.fates = FateRecorder(
                bytearray(fates.codes), {reason: code for code, reason in enumerate(fates.reasons, FIRST_REASON)}
            )

    def write_fates(self) -> None:
        """Write the fates of all rows. Raises RunError if a row has none, or if they differ from the counts."""
        fates = self.fates.fates()
        problems = fates.problems(self.parts, self.drops)
        if len(fates.codes) != self.rows_in or not fates.codes.all() or fates.reasons != sorted(self.drops):
            problems.append(f"has the fates of {np.count_nonzero(fates.codes):,} rows, of {self.rows_in:,}")
        if problems:
            raise RunError(f"{self.store.path(self.shard.key, FATES)}: {problems[0]}; report this as a bug")
        self.open(FATES).write(fates.codes.tobytes())

    def issue(self, started: float, cpu_seconds: float) -> None:
        """Write the receipt of the published files; `started` is a Unix time."""
        facts, members = {**self.facts}, len(self.shard.part.members)
        if members:
            facts[ROWS_BY_FILE] = [self.rows_of_members[number] for number in range(members)]
        if self.unread:
            facts[NOT_READ] = dict(sorted(self.unread.items()))
        timing = {
            "built_at": started, "seconds": time.time() - started, "cpu_seconds": cpu_seconds, "host": gethostname(),
            "source": self.shard.part.file.uri, "source_bytes": self.shard.part.size,
        }  # fmt: skip
        self.receipt = self.store.issue(
            self.shard.identity,
            outputs=[*self.outputs, *(file.output for file in self._files)],
            rows_in=self.rows_in,
            parts=self.parts,
            drops=self.drops,
            quarantined=self.quarantined,
            truncated=self.truncated,
            facts=facts,
            volatile={**timing, **self.volatile},
        )


@contextmanager
def building(shard: PlannedShard, store: Store, on_bad_row: OnBadRow = "fail") -> Generator[ShardBuilder]:
    """Build a shard: when the block ends without an error, publish its files, then its receipt.

    Garbage is collected rarely within it: rows are freed without that, and it visits them all, a sixth of the time of Harmony.

    Raises InvalidReceiptError unless every row is counted as a document or a drop, and the errors of `publish`. After an
    error it doesn't get a receipt, and the next attempt starts over.
    """
    started, cpu, thresholds = time.time(), time.thread_time(), gc.get_threshold()
    gc.set_threshold(*RARELY)
    try:
        with ExitStack() as stack:
            builder = ShardBuilder(shard, store, on_bad_row, stack)
            yield builder
    finally:
        gc.set_threshold(*thresholds)
    builder.issue(started, time.thread_time() - cpu)


RARELY = 50_000, 20, 100
"""Thresholds of Python's garbage collector."""


def bad_row_error(row: BadRow, part: Slice) -> BadRowError:
    """Return the error for a bad row, with its file and line."""
    return BadRowError(
        f"{place_of(part, row.row)}: {row.reason}: {row.detail}; fix the row, or set on_bad_row=quarantine to set such rows "
        f"aside and count them. The row begins: {row.excerpt}"
    )


def batches(shards: Sequence[PlannedShard], workers: int) -> list[list[PlannedShard]]:
    """Group shards into batches of about a minute of work, at least four per worker and at most 1,000 in all.

    Source bytes are balanced by the longest-processing-time rule, at most 4/3 of the shortest makespan. The heaviest
    batch is first; within a batch, shards are in plan order.
    """
    if not shards:
        return []
    wanted = max(math.ceil(sum(shard.part.size for shard in shards) / TARGET_BYTES), workers * BATCHES_PER_WORKER)
    count = min(wanted, MOST_BATCHES, len(shards))
    heap = [(0, number) for number in range(count)]
    members: list[list[int]] = [[] for _ in range(count)]
    for place in sorted(range(len(shards)), key=lambda place: -shards[place].part.size):
        load, number = heapq.heappop(heap)
        members[number].append(place)
        heapq.heappush(heap, (load + shards[place].part.size, number))
    order = sorted(heap, key=lambda entry: (-entry[0], entry[1]))
    return [[shards[place] for place in sorted(members[number])] for _, number in order]


def build_batch(
    shards: Iterable[PlannedShard], store: Store, build: BuildShard, announce: Announce, *, rebuild: bool
) -> list[Receipt]:
    """Build the shards of a batch in order and announce each, in at most 300 bytes; returns their receipts.

    With `rebuild`, also those with a valid receipt are built.
    """
    done: list[Receipt] = []
    for shard in shards:
        # Planning found no receipt, but an earlier attempt or a different run may have issued one since.
        receipt = None if rebuild else store.receipt(shard.key)
        reused = receipt is not None
        if receipt is None:
            if is_local(store.place):
                sweep(store.folder(shard.key))  # temporaries of a killed attempt
            receipt = build(shard, store)
        done.append(receipt)
        announce({
            "key": shard.key,
            "source": f"{shard.part.file.uri}@{shard.part.start}",
            "source_bytes": shard.part.size,
            "documents": receipt.documents,
            "tokens": receipt.tokens,
            "dropped": sum(receipt.drops.values()),
            "seconds": 0.0 if reused else receipt.volatile["seconds"],
            "reused": reused,
        })  # fmt: skip
    return done
