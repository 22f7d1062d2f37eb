"""Tables on disk, cut by the hash of a key, so that what has one key meets in one place whoever wrote it.

A file is Arrow IPC whose batches are of partition 0, 1, … and so on again: one round for some 32 MB of rows. Whoever
resolves a partition reads its batches out of every file and nothing else. A file for each pair of a slice and a
partition would be a thousand times a thousand; this is one for each slice.

Every batch carries the hash of what it holds, of its number and of the columns, and a last one without rows says that
there are no more: files outlive the run that wrote them, and damage is found when a batch is read, at the speed of xxh3
(28 GB/s), however little of a file that is.

What a slice's file says of its documents, it says of its rows: it depends on nothing but the slice. They get the numbers
that they have among all documents when the file is read (`SliceFile`).
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
"""What the numbers of documents leave room for: row r of slice s has the number `s * ROWS_PER_SLICE + r`."""

WAITING_BYTES = 32 << 20
"""Rows that are gathered before they are cut: a batch of a partition should hold more than a handful."""

REMOTE_BLOCK_BYTES = 64 << 10
"""What is read beyond what is asked for: a batch is asked for in three pieces, and the next one is of no use here. With the
50 MiB that s3fs reads ahead, 1 of 64 partitions of 83 MB costs 53 MB instead of 1.4."""

HASH, HASH_OF_LAST = b"xxh3_128", b"last_xxh3_128"
"""What the hash of a batch is called in its metadata; of the last one, which has no rows, something else."""

NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class SliceFile:
    """A file about the documents of one slice; its row 0 has the number `first` among all documents."""

    uri: str
    first: int


@dataclass(slots=True)
class PartitionedFile:
    """A file that is being written; `partitioned` makes it and ends it."""

    file: Publication
    writer: pa.RecordBatchFileWriter
    schema: pa.Schema
    partitions: int
    _waiting: list[tuple[pa.Table, np.ndarray]] = field(default_factory=list[tuple[pa.Table, np.ndarray]])
    _size: int = 0
    _written: int = 0

    @property
    def output(self) -> Output:
        """The file, once it is there."""
        return self.file.output

    def write(self, table: pa.Table, keys: np.ndarray) -> None:
        """Append rows, cut by `keys` (uint64 [rows], well mixed): equal keys are of one partition in all files."""
        self._waiting.append((table, keys))
        self._size += table.nbytes
        if self._size >= WAITING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Cut and append the rows that are waiting."""
        if not self._waiting:
            return
        table = pa.concat_tables([table for table, _ in self._waiting])
        keys = np.concatenate([keys for _, keys in self._waiting])
        self._waiting.clear()
        self._size = 0
        numbers = ((keys >> HALF) * np.uint64(self.partitions) >> HALF).astype(np.min_scalar_type(self.partitions))
        order = np.argsort(numbers, kind="stable")  # by radix, as the numbers have 16 bits or less
        rows = table.take(pa.array(order)).combine_chunks()
        starts = np.searchsorted(numbers[order], np.arange(self.partitions + 1)).tolist()
        for start, stop in pairwise(starts):
            self.append(rows.slice(start, stop - start))

    def append(self, table: pa.Table) -> None:
        """Append the rows of one partition, the next in turn."""
        found = table.combine_chunks().to_batches()
        self._append(found[0] if found else pa.RecordBatch.from_pylist([], schema=table.schema), HASH)

    def end(self) -> None:
        """Append what is waiting, and the batch that says that there are no more."""
        self.flush()
        self._append(pa.RecordBatch.from_pylist([], schema=self.schema), HASH_OF_LAST)

    def _append(self, batch: pa.RecordBatch, name: bytes) -> None:
        whole = pa.ipc.read_record_batch(batch.serialize(), batch.schema)  # its buffers are those that will be read
        self.writer.write_batch(whole, {name: _hash(whole, self._written)})
        self._written += 1


@contextmanager
def partitioned(uri: str, schema: pa.Schema, partitions: int) -> Generator[PartitionedFile]:
    """The file `uri` of tables of `schema`, there when the `with` block ends well.

    Raises OSError and InputError as `publish` does.
    """
    with publish(uri) as file, pa.ipc.new_file(cast("BinaryIO", file), schema) as writer:
        found = PartitionedFile(file, writer, schema, partitions)
        yield found
        found.end()


def _hash(batch: pa.RecordBatch, number: int) -> str:
    """The xxh3_128 of a batch as it is written and read: its number, its columns, and its buffers byte by byte."""
    hasher = xxh3_128(f"{number} {batch.num_rows} {batch.schema}".encode())
    for column in batch.columns:
        hasher.update(f"{len(column)} {column.null_count}".encode())
        for buffer in column.buffers():
            hasher.update(b"none" if buffer is None else f"{buffer.size}".encode())
            hasher.update(b"" if buffer is None else memoryview(buffer))
    return hasher.hexdigest()


def read_partition(uris: Iterable[str], partition: int, partitions: int, schema: pa.Schema) -> pa.Table:
    """The rows of one partition out of all files, in the order of the files."""
    with_rows = [table for uri in uris for table in tables(uri, partition, partitions) if table.num_rows]
    return pa.concat_tables([schema.empty_table(), *with_rows]).combine_chunks()


def read_numbered(
    files: Iterable[SliceFile], partition: int, partitions: int, schema: pa.Schema, gone: np.ndarray = NONE
) -> pa.Table:
    """The same out of files about slices: `number` is that among all documents. Those `gone` (int64, ascending) are left
    out.
    """
    found = [
        _left(_numbered(table, file.first), gone)
        for file in files
        for table in tables(file.uri, partition, partitions)
        if table.num_rows
    ]
    return pa.concat_tables([schema.empty_table(), *found]).combine_chunks()


def _numbered(table: pa.Table, first: int) -> pa.Table:
    place = table.column_names.index("number")
    numbers = compute.call_function("add", [table["number"], pa.scalar(first, pa.int64())])
    return table.set_column(place, table.schema.field(place), numbers)


def _left(table: pa.Table, gone: np.ndarray) -> pa.Table:
    numbers = table["number"].to_numpy()
    return (
        table.filter(pa.array(np.append(gone, -1)[np.searchsorted(gone, numbers)] != numbers)) if gone.size else table
    )


def write_table(uri: str, table: pa.Table) -> Output:
    """Write a file of one table, which `read_partition` of one partition reads. Errors as in `publish`."""
    with partitioned(uri, table.schema, 1) as file:
        file.append(table)
    return file.output


def tables(uri: str, partition: int, partitions: int) -> Iterator[pa.Table]:
    """The rows of one partition of a file, a table for each that was written.

    A local file is mapped, so that only what is looked at is read. Raises RunError, and withdraws the receipt of the shard
    that the file is of, when it is not what was written.
    """
    with _vouched(uri), _opened(uri) as reader:
        count = reader.num_record_batches - 1
        _batch(reader, count, HASH_OF_LAST)
        for number in range(partition, count, partitions):
            yield pa.Table.from_batches([_batch(reader, number, HASH)])


def _batch(reader: pa.RecordBatchFileReader, number: int, name: bytes) -> pa.RecordBatch:
    """A batch of a file, whose hash is called `name`. Raises ArrowInvalid unless it is the one that was written."""
    batch, metadata = reader.get_batch_with_custom_metadata(number)
    if metadata is None or metadata.get(name) != _hash(batch, number).encode():
        raise pa.ArrowInvalid(f"batch {number} does not have the content that was written")
    return batch


@contextmanager
def _vouched(uri: str) -> Generator[None]:
    """Turns what Arrow says of a damaged file into a RunError, and withdraws the receipt that it is whole."""
    try:
        yield
    except (pa.ArrowException, ValueError, OSError) as error:
        if isinstance(error, OSError) and (error.errno is not None or not is_local(uri)):
            raise  # the storage's own; Arrow's has no number
        place, kind, key, _ = uri.rsplit("/", 3)
        Store(place, kind).withdraw(key)
        raise RunError(
            f"{uri}: damaged since it was built ({error}); its receipt is withdrawn, so run the same command again to "
            "build it anew"
        ) from error


@contextmanager
def _opened(uri: str) -> Generator[pa.RecordBatchFileReader]:
    if is_local(uri):
        with pa.memory_map(absolute(uri)) as mapped:
            yield pa.ipc.open_file(mapped)
        return
    system, path = filesystem(uri)
    with cast("BinaryIO", system.open(path, "rb", block_size=REMOTE_BLOCK_BYTES)) as stream:
        yield pa.ipc.open_file(stream)
