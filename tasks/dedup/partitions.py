"""Tables on disk, partitioned by the hash of a key: all rows with a key are in one partition, even if different slices wrote them.

A file is Arrow IPC with batches of partition 0, 1, … in turn, one turn per 32 MB of rows. One file per slice replaces one per
slice and partition; a reader of a partition reads only its batches.

Every batch carries a hash of its number, columns and content, and an empty last batch marks the end, so damage is found
whenever a batch is read (xxh3, 28 GB/s).

Files identify documents by row, so they depend only on their slice; `SliceFile` maps rows to document numbers.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
from pyarrow import compute
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.publish import Output, Publication, publish
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import absolute, filesystem, is_local
from xxhash import xxh3_128

HALF = np.uint64(32)
ROWS_PER_SLICE = 1 << 32
"""Row r of slice s is document `s * ROWS_PER_SLICE + r`."""

WAITING_BYTES = 32 << 20
"""Rows buffered before they are partitioned, so that batches hold more than a few rows."""

REMOTE_BLOCK_BYTES = 64 << 10
"""Read-ahead on object stores: with the 50 MiB of s3fs, reading 1 of 64 partitions of 83 MB transfers 53 MB instead of
1.4."""

HASH, HASH_OF_LAST = b"xxh3_128", b"last_xxh3_128"
"""The metadata keys of a batch's hash: of any batch, and of the last one, which is empty."""

NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class SliceFile:
    """A file about the documents of one slice; its row 0 is document `first`."""

    uri: str
    first: int


@dataclass(slots=True)
class PartitionedFile:
    """A file being written; `partitioned` creates and closes it."""

    file: Publication
    writer: pa.RecordBatchFileWriter
    schema: pa.Schema
    partitions: int
    _waiting: list[tuple[pa.Table, np.ndarray]] = field(default_factory=list[tuple[pa.Table, np.ndarray]])
    _size: int = 0
    _written: int = 0

    @property
    def output(self) -> Output:
        """The finished file."""
        return self.file.output

    def write(self, table: pa.Table, keys: np.ndarray) -> None:
        """Append rows, partitioned by `keys` (uint64 [rows], well mixed); equal keys share a partition in all files."""
        self._waiting.append((table, keys))
        self._size += table.nbytes
        if self._size >= WAITING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Partition and append the buffered rows."""
        if not self._waiting:
            return
        table = pa.concat_tables([table for table, _ in self._waiting])
        keys = np.concatenate([keys for _, keys in self._waiting])
        self._waiting.clear()
        self._size = 0
        numbers = ((keys >> HALF) * np.uint64(self.partitions) >> HALF).astype(np.min_scalar_type(self.partitions))
        order = np.argsort(numbers, kind="stable")  # a radix sort, because numbers have at most 16 bits
        rows = table.take(pa.array(order)).combine_chunks()
        starts = np.searchsorted(numbers[order], np.arange(self.partitions + 1)).tolist()
        for start, stop in pairwise(starts):  # an empty partition has its turn, too, so that turns can be counted
            self.append(rows.slice(start, stop - start))

    def append(self, table: pa.Table) -> None:
        """Append the rows of the next partition in turn."""
        found = table.combine_chunks().to_batches()
        self._append(found[0] if found else pa.RecordBatch.from_pylist([], schema=table.schema), HASH)

    def end(self) -> None:
        """Append buffered rows and the last batch."""
        self.flush()
        self._append(pa.RecordBatch.from_pylist([], schema=self.schema), HASH_OF_LAST)

    def _append(self, batch: pa.RecordBatch, name: bytes) -> None:
        whole = pa.ipc.read_record_batch(batch.serialize(), batch.schema)  # the buffers are those that a reader gets
        self.writer.write_batch(whole, {name: _hash(whole, self._written)})
        self._written += 1


@contextmanager
def partitioned(uri: str, schema: pa.Schema, partitions: int) -> Generator[PartitionedFile]:
    """Write the file `uri` with tables of `schema`, which appears when the `with` block ends without an error.

    Errors as in `publish`.
    """
    with publish(uri) as file, pa.ipc.new_file(cast("BinaryIO", file), schema) as writer:
        found = PartitionedFile(file, writer, schema, partitions)
        yield found
        found.end()


def _hash(batch: pa.RecordBatch, number: int) -> str:
    """The xxh3_128 of a batch as stored: its number, columns and buffers."""
    hasher = xxh3_128(f"{number} {batch.num_rows} {batch.schema}".encode())
    for column in batch.columns:
        hasher.update(f"{len(column)} {column.null_count}".encode())  # which the buffers don't show
        for buffer in column.buffers():
            hasher.update(b"none" if buffer is None else f"{buffer.size}".encode())
            hasher.update(b"" if buffer is None else memoryview(buffer))
    return hasher.hexdigest()


def read_partition(uris: Iterable[str], partition: int, partitions: int, schema: pa.Schema) -> pa.Table:
    """Return the rows in one partition of all files, in the order of the files."""
    with_rows = [table for uri in uris for table in tables(uri, partition, partitions) if table.num_rows]
    return pa.concat_tables([schema.empty_table(), *with_rows]).combine_chunks()


def read_numbered(
    files: Iterable[SliceFile], partition: int, partitions: int, schema: pa.Schema, gone: np.ndarray = NONE
) -> pa.Table:
    """Return the rows in one partition of slice files, with document numbers in `number`.

    Documents in `gone` (int64, ascending) are omitted.
    """
    found = [
        left(numbered(table, file.first), gone)
        for file in files
        for table in tables(file.uri, partition, partitions)
        if table.num_rows
    ]
    return pa.concat_tables([schema.empty_table(), *found]).combine_chunks()


def numbered(table: pa.Table, first: int) -> pa.Table:
    """Return a table with document numbers in place of rows in the slice whose row 0 is document `first`."""
    place = table.column_names.index("number")
    numbers = compute.call_function("add", [table["number"], pa.scalar(first, pa.int64())])
    return table.set_column(place, table.schema.field(place), numbers)


def left(table: pa.Table, gone: np.ndarray) -> pa.Table:
    """Return the rows whose documents aren't in `gone` (int64, ascending)."""
    numbers = table["number"].to_numpy()
    return (
        table.filter(pa.array(np.append(gone, -1)[np.searchsorted(gone, numbers)] != numbers)) if gone.size else table
    )


def write_table(uri: str, table: pa.Table) -> Output:
    """Write a file of one table, to be read as the only partition. Errors as in `publish`."""
    with partitioned(uri, table.schema, 1) as file:
        file.append(table)
    return file.output


def tables(uri: str, partition: int, partitions: int) -> Iterator[pa.Table]:
    """Yield the rows in one partition of a file, batch by batch; a local file is memory-mapped.

    Raises RunError for a damaged file and withdraws its shard's receipt.
    """
    try:
        if is_local(uri):
            opened = pa.memory_map(absolute(uri))
        else:
            system, path = filesystem(uri)
            opened = cast("BinaryIO", system.open(path, "rb", block_size=REMOTE_BLOCK_BYTES))
        with opened as stream:
            reader = pa.ipc.open_file(stream)
            count = reader.num_record_batches - 1
            _batch(reader, count, HASH_OF_LAST)  # without it, the end of the file is lost
            for number in range(partition, count, partitions):
                yield pa.Table.from_batches([_batch(reader, number, HASH)])
    except (pa.ArrowException, ValueError, OSError) as error:
        if isinstance(error, OSError) and (error.errno is not None or not is_local(uri)):
            raise  # from the storage; Arrow's errors have no number
        place, kind, key, _ = uri.rsplit("/", 3)
        Store(place, kind).withdraw(key)
        raise RunError(
            f"{uri}: damaged since it was built ({error}); its receipt is withdrawn, so rerun the same command to "
            "rebuild it"
        ) from error


def _batch(reader: pa.RecordBatchFileReader, number: int, name: bytes) -> pa.RecordBatch:
    """A batch of a file; its hash is stored under `name`. Raises ArrowInvalid if the content has changed."""
    batch, metadata = reader.get_batch_with_custom_metadata(number)
    if metadata is None or metadata.get(name) != _hash(batch, number).encode():
        raise pa.ArrowInvalid(f"batch {number} does not have the content that was written")
    return batch
