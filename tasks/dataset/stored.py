"""Published tokens as arrays: documents of a `.bin/.idx` pair, and packs of a packed Parquet file.

Everything above `pack` reads tokens here, so that the form of an index, the columns of packs, and the shift of the loss mask are
known once: a stored mask marks the token before a target; here `trained` marks the target itself. A document costs reading the
`.idx` (20 bytes per document) and its own bytes of the `.bin`. Packs are read in batches, so memory is bounded by a batch.
"""

import itertools
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import orjson
import pyarrow as pa
from pyarrow import parquet
from tokenmill.tasks.chat.encoding import ROLES
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.pack.parquet import SCHEMA
from tokenmill.tasks.shards.publish import Extent
from tokenmill.tasks.shards.store import read_bytes, size_of
from tokenmill.tasks.storage import filesystem, open_binary
from tokenmill.tasks.tokenize.binidx import DTYPES, HEADER, MAGIC, VERSION, BinIdxError, Index, read_index

PADDING = "padding"
PACKS_AT_ONCE = 64
SCAN_ROWS = 1024  # packs read at a time: with tokens, and of small columns
IDS, MASK, STARTS, DOCUMENTS, ROLE_STARTS, ROLE = SCHEMA.names
TOKENS = (IDS, MASK, STARTS, ROLE_STARTS, ROLE)  # all columns but the source


class StoredFileError(RunError):
    """A stored file is missing, or not as it was written: the `problem`, without the remedy."""

    def __init__(self, place: str, problem: str) -> None:
        self.problem = f"{place}: {problem}"
        super().__init__(f"{self.problem}; run tokenmill verify on the folder, then prepare it again")


@dataclass(frozen=True)
class StoredDocuments:
    """The documents of a pair. Its tokens are in `PREFIX.bin`, or where they are `located`. Errors are RunErrors."""

    prefix: str
    located: Extent | None = None

    @cached_property
    def tokens(self) -> Extent:
        """The bytes of the tokens; empty if they are missing."""
        place = f"{self.prefix}.bin"
        return self.located or Extent(place, 0, size_of(place) or 0)

    @cached_property
    def index(self) -> Index:
        """The whole index, checked."""
        content = read_bytes(f"{self.prefix}.idx")
        if content is None or not self.tokens.size:
            raise StoredFileError(self.prefix, "the pair is incomplete")
        try:
            return read_index(content, self.tokens.size)
        except BinIdxError as error:
            raise StoredFileError(self.tokens.uri, str(error)) from error

    @cached_property
    def _header(self) -> tuple[np.dtype[np.integer], int]:
        _, _, code, documents, _ = HEADER.unpack(_range(f"{self.prefix}.idx", 0, HEADER.size))
        return DTYPES[code], documents

    def leading_lengths(self, most: int) -> np.ndarray:
        """Return the lengths (int32) of at most so many documents, the first ones, without reading the rest of the index."""
        stop = HEADER.size + 4 * min(self._header[1], most)
        return np.frombuffer(_range(f"{self.prefix}.idx", HEADER.size, stop), "<i4")

    def leading_ids(self, tokens: int) -> np.ndarray:
        """Return the first ids of the file."""
        dtype = self._header[0]
        return np.frombuffer(_range(f"{self.prefix}.bin", 0, tokens * dtype.itemsize), dtype)

    def ids(self, first: int, stop: int) -> np.ndarray:
        """Return the ids of the documents `[first, stop)`, end to end, in one request."""
        if stop > self.index.documents:
            raise StoredFileError(self.tokens.uri, f"document {stop:,} is missing, it holds {self.index.documents:,}")
        lengths, size = self.index.lengths, self.index.dtype.itemsize
        start = self.tokens.start + int(lengths[:first].sum(dtype=np.int64)) * size
        end = start + int(lengths[first:stop].sum(dtype=np.int64)) * size
        return np.frombuffer(_range(self.tokens.uri, start, end), self.index.dtype)

    def batches(self, tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ids and lengths of consecutive documents: all that begin among the same `tokens`, and at least one."""
        # Documents go with the window that they begin in, so one that is longer than the window is whole, too
        begins = np.cumsum(self.index.lengths, dtype=np.int64) - self.index.lengths
        borders = np.flatnonzero(np.diff(begins // tokens)) + 1
        for first, stop in itertools.pairwise([0, *borders.tolist(), self.index.documents]):
            yield self.ids(first, stop), self.index.lengths[first:stop]


def pair_problem(prefix: str, documents: int, tokens: int, held: int | None, dtype: np.dtype[np.integer]) -> str | None:
    """Return the problem with the sizes of a pair or the header of its index, if any; `held` are the tokens of a `.bin` of which the
    index lists a part.
    """
    places = f"{prefix}.bin", f"{prefix}.idx"
    # An index has a length (4 bytes) and a place (8) for each document, and the borders of documents (8), one more
    expected = (held or tokens) * dtype.itemsize, HEADER.size + 12 * documents + 8 * (documents + 1)
    for place, size in zip(places, expected, strict=True):
        found = size_of(place)
        if found is None:
            return f"{place}: missing"
        if found != size:
            return f"{place}: {found:,} bytes instead of {size:,} for {documents:,} documents with {tokens:,} tokens"
    code = next(code for code, known in DTYPES.items() if known == dtype)
    if _range(places[1], 0, HEADER.size) != HEADER.pack(MAGIC, VERSION, code, documents, documents + 1):
        return f"{places[1]}: its header does not match {documents:,} documents of {dtype.name}"
    return None


def _range(place: str, start: int, stop: int) -> bytes:
    system, path = filesystem(place)
    return cast("bytes", system.cat_file(path, start=start, end=stop))


@dataclass(frozen=True, slots=True)
class Row:
    """A pack, or a document.

    `ids` [tokens] (integers); `trained` [tokens] (bool): whether the token is a target of the loss; `roles` [tokens] (integers
    into `role_names`); `starts` [sequences]: where each sub-sequence starts; `documents` [sequences]: the document number of
    each; `pack_size` in tokens, None if rows are not packed.
    """

    ids: np.ndarray
    trained: np.ndarray
    roles: np.ndarray
    role_names: Sequence[str]
    starts: np.ndarray
    documents: np.ndarray
    pack_size: int | None

    @property
    def padding(self) -> int:
        """Tokens of padding."""
        return int((np.array(self.role_names) == PADDING)[self.roles].sum())


@dataclass(frozen=True, slots=True)
class PackBatch:
    """Consecutive packs, back to back; arrays of columns that were not read are empty.

    `ids` (int32) and `trained` (bool) of all tokens; `packs`, `sequences` and `runs` (int64 [packs + 1]) are the borders of the
    packs in these, in `starts` and `documents`, and in `role_starts` and `roles` (numbers of ROLES). Starts count within a pack.
    """

    ids: np.ndarray
    trained: np.ndarray
    starts: np.ndarray
    documents: np.ndarray
    role_starts: np.ndarray
    roles: np.ndarray
    packs: np.ndarray
    sequences: np.ndarray
    runs: np.ndarray
    pack_size: int

    def __len__(self) -> int:
        return len(self.sequences) - 1

    @property
    def begins(self) -> np.ndarray:
        """Where each sequence begins in the batch (int64)."""
        return _placed(self.starts, self.sequences, self.packs)

    @property
    def role_begins(self) -> np.ndarray:
        """Where each run of a role begins in the batch (int64)."""
        return _placed(self.role_starts, self.runs, self.packs)

    @property
    def rows(self) -> Iterator[Row]:
        """The packs, one by one."""
        roles = np.repeat(self.roles, np.diff(self.role_begins, append=self.packs[-1]))
        for number in range(len(self)):
            tokens, own = slice(*self.packs[number : number + 2]), slice(*self.sequences[number : number + 2])
            yield Row(
                self.ids[tokens], self.trained[tokens], roles[tokens], ROLES, self.starts[own], self.documents[own],
                self.pack_size,
            )  # fmt: skip


def _placed(starts: np.ndarray, borders: np.ndarray, packs: np.ndarray) -> np.ndarray:
    return starts.astype(np.int64) + np.repeat(packs[:-1], np.diff(borders))


def pack_batches(place: str, columns: Sequence[str] = SCHEMA.names, rows: int = PACKS_AT_ONCE) -> Iterator[PackBatch]:
    """Yield the packs of a file, `rows` at a time; only `columns` are read. Raises RunError for a missing or damaged file."""
    first = 0
    with _opened(place) as file:
        pack_size = _pack_size(place, file)
        for batch in file.iter_batches(rows, columns=list(columns), use_threads=False):
            yield _decoded(batch, place, first, pack_size)
            first += len(batch)


def read_pack(place: str, number: int, tokens: tuple[np.ndarray, np.ndarray] | None = None) -> Row:
    """Return a pack of a file; of one whose `tokens` (ids and `trained`) are known, only the small columns are read.

    Costs reading its row group up to that pack. Raises RunError for a missing or damaged file, and for a number that is too large.
    """
    with _opened(place) as file:
        pack_size = _pack_size(place, file)
        wanted = [name for name in SCHEMA.names if tokens is None or name not in {IDS, MASK}]
        # Tokens are large, so only the wanted pack is decoded with them.
        at_once = 1 if tokens is None else SCAN_ROWS
        first = 0
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if number < first + rows:
                batches = file.iter_batches(batch_size=at_once, row_groups=[group], columns=wanted)
                skipped, row = divmod(number - first, at_once)
                batch = next(itertools.islice(batches, skipped, None)).slice(row, 1)
                return next(_decoded(batch, place, number, pack_size, tokens).rows)
            first += rows
    raise StoredFileError(place, f"pack {number + 1:,} is missing, it holds {first:,}")


def packs_with(place: str, documents: Collection[int]) -> list[int]:
    """Return the packs in a file that hold any of these documents, ascending."""
    found: list[int] = []
    first = 0
    for batch in pack_batches(place, [DOCUMENTS], SCAN_ROWS) if documents else ():
        packs = np.repeat(np.arange(len(batch)), np.diff(batch.sequences))[np.isin(batch.documents, list(documents))]
        found += (np.unique(packs) + first).tolist()
        first += len(batch)
    return found


def _decoded(
    batch: pa.RecordBatch, place: str, first: int, pack_size: int, tokens: tuple[np.ndarray, np.ndarray] | None = None
) -> PackBatch:
    """The arrays of packs from number `first` on."""
    values: dict[str, np.ndarray] = {name: np.zeros(0, np.int64) for name in SCHEMA.names}
    borders: dict[str, np.ndarray] = dict.fromkeys(SCHEMA.names, np.zeros(len(batch) + 1, np.int64))
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        # A batch is a slice of its row group, so offsets may begin anywhere
        offsets = cast("pa.ListArray", column).offsets.to_numpy().astype(np.int64)
        values[name], borders[name] = column.flatten().to_numpy(), offsets - offsets[0]
    if tokens is not None:
        values[IDS], borders[IDS] = tokens[0], np.array([0, len(tokens[0])])
    read = {*batch.schema.names, *([IDS] if tokens else [])}
    packs = borders[IDS] if IDS in read else borders[MASK]
    if problem := _problem(values, borders, packs, read, first):
        raise StoredFileError(place, problem)
    trained = np.zeros(len(values[MASK]), np.bool_)
    if {MASK, STARTS} <= read:
        # The stored mask marks the token before a target. Nothing comes before the first token of a sequence, so it is none
        trained[1:] = values[MASK][:-1] == 1
        trained[_placed(values[STARTS], borders[STARTS], packs)] = False
    return PackBatch(
        ids=values[IDS], trained=trained if tokens is None else tokens[1], starts=values[STARTS],
        documents=values[DOCUMENTS], role_starts=values[ROLE_STARTS], roles=values[ROLE],
        packs=packs, sequences=borders[STARTS if STARTS in read else DOCUMENTS], runs=borders[ROLE_STARTS], pack_size=pack_size,
    )  # fmt: skip


def _problem(
    values: dict[str, np.ndarray], borders: dict[str, np.ndarray], packs: np.ndarray, read: Collection[str], first: int
) -> str:
    """The problem with the columns of packs, or an empty string."""
    # Columns that belong together have equally many values in each pack
    for one, other in ((IDS, MASK), (STARTS, DOCUMENTS), (ROLE_STARTS, ROLE)):
        counts = np.diff(borders[one]), np.diff(borders[other])
        if {one, other} <= {*read} and (wrong := np.flatnonzero(counts[0] != counts[1])).size:
            has = counts[0][wrong[0]], counts[1][wrong[0]]
            return f"row {first + wrong[0] + 1}: {has[0]} values of {one} but {has[1]} of {other}"
    # Starts increase from 0, and each is a token of its pack; without tokens to read, packs have no known length
    for name in {STARTS, ROLE_STARTS} & {*read} if packs[-1] else ():
        own, placed = borders[name], _placed(values[name], borders[name], packs)
        pack = np.repeat(np.arange(len(own) - 1), np.diff(own))
        wrong = pack[(np.diff(placed, prepend=-1) < 1) | (placed >= packs[1:][pack])]
        unstarted = np.flatnonzero(np.diff(own) < 1)
        if not unstarted.size:
            unstarted = np.flatnonzero(values[name][own[:-1]] != 0)
        if bad := sorted({*wrong.tolist(), *unstarted.tolist()})[:1]:
            return f"row {first + bad[0] + 1}: {name} does not increase from 0 to below {np.diff(packs)[bad[0]]}"
    if not np.isin(values[ROLE], range(len(ROLES))).all():
        return f"a role is not one of 0 to {len(ROLES) - 1}"
    return ""


@contextmanager
def _opened(place: str) -> Generator[parquet.ParquetFile]:
    """Open a packed Parquet file; Arrow's errors become RunErrors."""
    try:
        with open_binary(place) as stream:
            file = parquet.ParquetFile(stream)
            missing = [name for name in SCHEMA.names if name not in file.schema_arrow.names]
            if missing:
                raise StoredFileError(place, f"it lacks the columns {', '.join(missing)}")
            yield file
    except FileNotFoundError as error:
        raise StoredFileError(place, "missing") from error
    except pa.ArrowException as error:
        raise StoredFileError(place, f"cannot be read as Parquet: {error}") from error


def _pack_size(place: str, file: parquet.ParquetFile) -> int:
    described = (file.schema_arrow.metadata or {}).get(b"tokenmill")
    if described is None:
        raise StoredFileError(place, "its metadata does not describe packs")
    return orjson.loads(described)["pack_size"]


def count_packs(place: str) -> int:
    """Return the number of packs in a file, from its footer. Raises RunError for a missing or damaged file."""
    with _opened(place) as file:
        return file.metadata.num_rows
