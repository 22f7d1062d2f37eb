"""Sequences as a shard stores them: once, for packs with any size.

    <part>.tokens          uint32 [tokens], little-endian: the id, and in the highest bit whether the next token is trained on
    <part>.index.parquet   per sequence: length, trained, row, content, role_start, role

Tokens take 4 bytes each on disk, and nothing has to be decoded: a sequence is read into its place in a pack. Mapped files would be
as fast, but their pages would count as memory of the process. The index takes about 60 bytes of memory per sequence, so
a million sequences can be laid out without a look at their tokens. Tokens on an object store are first copied to an unnamed
temporary file, which disappears when the process ends, even after a crash.
"""

import os
import resource
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from errno import EIO
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.build import ShardBuilder
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import absolute, filesystem, is_local
from xxhash import xxh3_64_intdigest, xxh3_128

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

IDS = np.uint32(0x7FFFFFFF)
"""The bits of a stored token that are its id."""

INDEXED = 65_536
"""Sequences per row group of the index, which the writer holds in memory."""

CHUNK = 1 << 22
"""Bytes read at a time to copy or hash them."""

SCHEMA = pa.schema(
    [
        pa.field("length", pa.int32()),
        pa.field("trained", pa.int32()),
        pa.field("row", pa.int64()),
        pa.field("content", pa.uint64()),
        pa.field("role_start", pa.list_(pa.int32())),
        pa.field("role", pa.list_(pa.int8())),
    ]
)


def loss_of(tokens: np.ndarray) -> np.ndarray:
    """1 where the next token is trained on, int8, of stored tokens: a quarter of the bytes that a shift would read."""
    return (tokens.astype("<u4", copy=False).view(np.uint8)[3::4] >> 7).view(np.int8)


def tokens_file(part: str) -> str:
    """Return the file of the tokens in a part."""
    return f"{part}.tokens"


def index_file(part: str) -> str:
    """Return the file of the index in a part."""
    return f"{part}.index.parquet"


@dataclass(frozen=True, slots=True)
class RoleRuns:
    """Role runs of some sequences: `counts` per sequence, `starts` within the sequence (int32), `roles` (int8)."""

    counts: np.ndarray
    starts: np.ndarray
    roles: np.ndarray


@dataclass
class SequenceWriter:
    """Writes the sequences of one part of a shard. `sequences`, `tokens` and `longest` count the written ones."""

    builder: ShardBuilder
    part: str
    sequences: int = 0
    tokens: int = 0
    longest: int = 0
    _waiting: list[pa.Table] = field(default_factory=list[pa.Table])

    def append(self, ids: np.ndarray, loss: np.ndarray, lengths: np.ndarray, rows: np.ndarray, runs: RoleRuns) -> None:
        """Add one or more sequences of `lengths` tokens, made of the rows `rows` of the slice.

        `ids` (int32) and `loss` (int8: 1 if the next token is trained on) hold them back to back.
        """
        # In place: a batch has millions of tokens.
        stored = loss.astype(np.uint32)
        stored <<= np.uint32(31)
        stored |= ids.view(np.uint32)
        self.builder.open(tokens_file(self.part)).write(stored.astype("<u4", copy=False).data)
        ends = np.cumsum(lengths)
        trained = np.add.reduceat(loss, ends - lengths, dtype=np.int64)
        # Packing places equal lengths in the order of this hash, so that the order of arrival doesn't matter.
        pairs = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
        tokens, masks = memoryview(cast("Buffer", ids)), memoryview(cast("Buffer", loss))
        hashes = [xxh3_64_intdigest(tokens[a:b], xxh3_64_intdigest(masks[a:b])) for a, b in pairs]
        columns = [lengths, trained, rows, np.array(hashes, np.uint64)]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types[:4], strict=True)]
        offsets = pa.array(np.append(0, np.cumsum(runs.counts)), pa.int32())
        lists = [pa.ListArray.from_arrays(offsets, pa.array(values)) for values in (runs.starts, runs.roles)]
        self._waiting.append(pa.Table.from_arrays([*arrays, *lists], schema=SCHEMA))
        self.sequences += len(lengths)
        self.tokens += len(ids)
        self.longest = max(self.longest, int(lengths.max()))
        if sum(map(len, self._waiting)) >= INDEXED:
            self.write_index()

    def write_index(self) -> None:
        if self._waiting:
            self.builder.table(index_file(self.part), SCHEMA).write_table(pa.concat_tables(self._waiting))
            self._waiting = []


@dataclass(frozen=True, slots=True)
class StoredSequences:
    """Sequences of one or more shards; all arrays but `roles` and `role_starts` have one value per sequence.

    Sequence i is `lengths[i]` (int64) tokens of the open file `opened[files[i]]`, from number `starts[i]` (int64).
    `trained` (int64) counts its trained tokens, `rows` (int64) is the row that it was made of, ascending, and `content` (uint64) a hash of
    ids and loss. Its role runs are `[runs[i], runs[i + 1])` of `role_starts` (int32, within the sequence) and `roles` (int8).
    """

    opened: Sequence[IO[bytes]]
    files: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    trained: np.ndarray
    rows: np.ndarray
    content: np.ndarray
    runs: np.ndarray
    role_starts: np.ndarray
    roles: np.ndarray

    def read(self, numbers: np.ndarray, tokens: np.ndarray, begins: np.ndarray) -> None:
        """Read the sequences `numbers` into `tokens` (little-endian uint32), each from its place in `begins`.

        Raises OSError, from the storage or for a file that became shorter.
        """
        descriptors = [file.fileno() for file in self.opened]
        into = tokens.data.cast("B")
        # A system call per sequence, straight into its place: as fast as mapped files, whose pages count as memory.
        columns = (self.files[numbers], 4 * self.starts[numbers], 4 * begins, 4 * (begins + self.lengths[numbers]))
        for file, start, begin, end in zip(*(column.tolist() for column in columns), strict=True):
            if os.preadv(descriptors[file], [into[begin:end]], start) != end - begin:
                raise OSError(EIO, "became shorter while it was read", self.opened[file].name)

    def first_tokens(self, number: int, count: int) -> np.ndarray:
        """Return the first `count` stored tokens of a sequence. Raises OSError as `read`."""
        tokens = np.empty(int(self.lengths[number]), "<u4")
        self.read(np.array([number]), tokens, np.zeros(1, np.int64))
        return tokens[:count]


@contextmanager
def stored_sequences(store: Store, members: Sequence[tuple[Receipt, str]]) -> Generator[StoredSequences]:
    """The sequences of parts in shards, one part after the other, for a block. Rows are numbered over all rows of the shards.

    Raises RunError, and withdraws the receipt, for a file that has changed since it was built.
    """
    tables = [read_index(store, receipt, part) for receipt, part in members]
    counts = [len(table) for table in tables]
    before = np.cumsum([0, *(receipt.rows_in for receipt, _ in members)])[:-1]
    index = pa.concat_tables(tables).combine_chunks()
    lengths = index["length"].to_numpy().astype(np.int64)
    # Tokens are counted from the beginning of their own file, rows over all shards.
    starts = np.cumsum(lengths) - lengths
    firsts = (np.cumsum(counts) - counts).tolist()
    roles = cast("pa.ListArray", index["role"].chunk(0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # the default of 1,024 is too low for large groups
    with suppress(ValueError, OSError):  # macOS reports more than it permits
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with ExitStack() as stack:
        yield StoredSequences(
            opened=[stack.enter_context(_tokens(store, receipt, part)) for receipt, part in members],
            files=np.repeat(np.arange(len(members)), counts),
            starts=starts - np.repeat(starts[firsts], counts),
            lengths=lengths,
            trained=index["trained"].to_numpy().astype(np.int64),
            rows=index["row"].to_numpy() + np.repeat(before, counts),
            content=index["content"].to_numpy(),
            runs=roles.offsets.to_numpy().astype(np.int64),
            role_starts=cast("pa.ListArray", index["role_start"].chunk(0)).values.to_numpy(),
            roles=roles.values.to_numpy(),
        )


def read_index(store: Store, receipt: Receipt, part: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the index of a part, with these columns. Raises as `stored_sequences`."""
    data = store.read(receipt, index_file(part))
    return pq.ParquetFile(pa.BufferReader(data)).read(columns and list(columns), use_threads=False)


def stored_rows(store: Store, receipt: Receipt, part: str) -> np.ndarray:
    """Return the rows (int64) that the sequences of a part were made of. Raises as `stored_sequences`."""
    return read_index(store, receipt, part, ["row"])["row"].to_numpy()


@contextmanager
def _tokens(store: Store, receipt: Receipt, part: str) -> Generator[IO[bytes]]:
    """The file of the tokens in a part, for a block; a copy if it is on an object store."""
    name = tokens_file(part)
    place = store.path(receipt.key, name)
    system, path = filesystem(place)
    # Random reads of an object store would be a request each.
    if is_local(place):
        with Path(absolute(place)).open("rb") as file:
            _check(file, store, receipt, name)
            yield file
        return
    with TemporaryFile() as file:
        with cast("BinaryIO", system.open(path, "rb")) as stream:
            for chunk in iter(partial(stream.read, CHUNK), b""):
                file.write(chunk)
        file.flush()  # `read` goes past Python's buffer
        _check(file, store, receipt, name)
        yield file


def _check(file: IO[bytes], store: Store, receipt: Receipt, name: str) -> None:
    """Hash an open file of tokens, which also reads it from the disk in one go."""
    (recorded,) = (output for output in receipt.outputs if output.path == name)
    file.seek(0)
    hasher = xxh3_128()
    for chunk in iter(partial(file.read, CHUNK), b""):
        hasher.update(chunk)
    if hasher.hexdigest() != recorded.xxh3_128:
        store.withdraw(receipt.key)
        raise RunError(
            f"{store.path(receipt.key, name)}: damaged since it was built; its receipt is withdrawn, so run the same command "
            "again to rebuild it"
        )
