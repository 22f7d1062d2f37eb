"""One stored row as arrays: a pack of a packed Parquet file, or a document of a `.bin/.idx` pair.

A pack costs reading its row group up to that row, one row at a time, so memory is bounded by a row. A document costs reading
the `.idx` (20 bytes per document) and its own bytes of the `.bin`. In a `.bin` every token is trained on and has no role: the
document becomes one sequence of `text`, or if it was rearranged to fill in the middle, of its prefix, suffix and middle.
"""

import itertools
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

import numpy as np
import orjson
import pyarrow as pa
from pyarrow import parquet
from tokenmill.tasks.chat.encoding import ROLES
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.pack.parquet import SCHEMA
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import filesystem
from tokenmill.tasks.tokenize.binidx import BinIdxError, Index, read_index
from tokenmill.tasks.tokenize.fim import ROLES as FIM_ROLES

from .view_parts import Part

PADDING = "padding"

SCAN_ROWS = 1024
"""Rows of small columns read at a time; of tokens, one at a time."""


@dataclass(frozen=True, slots=True)
class Row:
    """A stored row.

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


Tokens = Mapping[str, np.ndarray]
"""The columns `input_ids` and `loss_mask` of a pack, from a copy that is faster to read than Parquet."""


def read_row(part: Part, number: int, tokens: Tokens | None = None) -> Row:
    """Row `number` of a part; of a pack whose `tokens` are known, only the small columns are read.

    Raises RunError if its files are missing or damaged, or have no such row.
    """
    return _pack(part, number, tokens or {}) if part.packed else _document(part, number)


def rows_of(part: Part) -> Iterator[Row]:
    """Every row of a part, in order; the tokens of a `.bin` are read at once. Raises RunError as `read_row` does."""
    if part.packed:
        with _opened(part) as file:
            pack_size = _pack_size(part, file)
            for number, batch in enumerate(file.iter_batches(batch_size=1, columns=SCHEMA.names)):
                columns = {name: batch.column(name).flatten().to_numpy() for name in SCHEMA.names}
                yield _parsed(part, number, columns, pack_size)
        return
    index = _index(part)
    system, path = filesystem(part.stored)
    stored = cast("bytes", system.cat_file(path, start=part.tokens.start, end=part.tokens.start + part.tokens.size))
    borders = np.cumsum(index.lengths[:-1], dtype=np.int64)
    for number, ids in enumerate(np.split(np.frombuffer(stored, index.dtype), borders)):
        yield _row(part, number, ids)


def rows_with(part: Part, documents: Collection[int]) -> list[int]:
    """The rows of a part with tokens of any of these documents, ascending. Raises RunError as `read_row` does."""
    if part.packed:
        return _packs_with(part, documents) if documents else []
    return sorted(document for document in documents if document < part.rows)


def _pack(part: Part, number: int, tokens: Tokens) -> Row:
    with _opened(part) as file:
        pack_size = _pack_size(part, file)
        batch = _batch(part, file, number, [name for name in SCHEMA.names if name not in tokens])
    columns = {
        name: tokens[name] if name in tokens else batch.column(name).flatten().to_numpy() for name in SCHEMA.names
    }
    return _parsed(part, number, columns, pack_size)


def _parsed(part: Part, number: int, columns: dict[str, np.ndarray], pack_size: int) -> Row:
    ids, mask, starts, documents, role_starts, roles = columns.values()
    problem = _problem(columns)
    if problem:
        raise _damaged(part, f"row {number}: {problem}")
    # The stored mask marks tokens whose successor is a target; the view marks the targets themselves.
    trained = np.zeros(len(ids), np.bool_)
    trained[1:] = mask[:-1] == 1
    trained[starts] = False
    roles = np.repeat(roles, np.diff(role_starts, append=len(ids)))
    return Row(ids, trained, roles, ROLES, starts, documents, pack_size)


def _problem(columns: dict[str, np.ndarray]) -> str:
    """The problem with the columns of a row, or an empty string."""
    tokens = len(columns["input_ids"])
    if len(columns["loss_mask"]) != tokens:
        return f"{tokens} ids but {len(columns['loss_mask'])} values of loss_mask"
    for starts, values in (("seq_start_id", "document"), ("role_start", "role")):
        borders = columns[starts]
        if len(borders) != len(columns[values]):
            return f"{len(borders)} values of {starts} but {len(columns[values])} of {values}"
        if not len(borders) or borders[0] != 0 or (np.diff(borders, append=tokens) < 1).any():
            return f"{starts} does not increase from 0 to below {tokens}"
    if not np.isin(columns["role"], range(len(ROLES))).all():
        return f"a role is not one of 0 to {len(ROLES) - 1}"
    return ""


def _packs_with(part: Part, documents: Collection[int]) -> list[int]:
    found: list[int] = []
    first = 0
    with _opened(part) as file:
        for batch in file.iter_batches(batch_size=SCAN_ROWS, columns=["document"]):
            lists = cast("pa.ListArray", batch.column("document"))
            packs = lists.value_parent_indices().to_numpy()[np.isin(lists.flatten().to_numpy(), list(documents))]
            found += (np.unique(packs) + first).tolist()
            first += len(batch)
    return found


@contextmanager
def _opened(part: Part) -> Generator[parquet.ParquetFile]:
    """Open the packed Parquet file of a part; Arrow's errors become RunErrors."""
    system, path = filesystem(part.stored)
    try:
        with cast("BinaryIO", system.open(path, "rb")) as stream:
            file = parquet.ParquetFile(stream)
            missing = [name for name in SCHEMA.names if name not in file.schema_arrow.names]
            if missing:
                raise _damaged(part, f"it lacks the columns {', '.join(missing)}")
            yield file
    except FileNotFoundError as error:
        raise _damaged(part, "it is missing") from error
    except pa.ArrowException as error:
        raise _damaged(part, str(error)) from error


def _pack_size(part: Part, file: parquet.ParquetFile) -> int:
    described = (file.schema_arrow.metadata or {}).get(b"tokenmill")
    if described is None:
        raise _damaged(part, "its metadata does not describe packs")
    return orjson.loads(described)["pack_size"]


def _batch(part: Part, file: parquet.ParquetFile, number: int, columns: list[str]) -> pa.RecordBatch:
    """Read only `columns` of row `number`."""
    first = 0
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if number < first + rows:
            at_once = 1 if "input_ids" in columns else SCAN_ROWS
            batches = file.iter_batches(batch_size=at_once, row_groups=[group], columns=columns)
            skipped, place = divmod(number - first, at_once)
            return next(itertools.islice(batches, skipped, None)).slice(place, 1)
        first += rows
    raise _damaged(part, f"it holds {first} packs, so there is no pack {number}")


def _damaged(part: Part, problem: str) -> RunError:
    return RunError(f"{part.stored}: {problem}; run tokenmill verify on the folder, then prepare it again")


def _document(part: Part, number: int) -> Row:
    index = _index(part)
    if number >= index.documents:
        raise _damaged(part, f"it holds {index.documents} documents, so there is no document {number}")
    start = part.tokens.start + int(index.lengths[:number].sum(dtype=np.int64)) * index.dtype.itemsize
    stop = start + int(index.lengths[number]) * index.dtype.itemsize
    system, path = filesystem(part.stored)
    return _row(part, number, np.frombuffer(cast("bytes", system.cat_file(path, start=start, end=stop)), index.dtype))


def _row(part: Part, number: int, ids: np.ndarray) -> Row:
    """Document `number` of a part."""
    roles = np.zeros(len(ids), np.int8) if part.fim is None else part.fim.roles(ids)
    return Row(ids, np.ones(len(ids), np.bool_), roles, FIM_ROLES, np.array([0]), np.array([number]), None)


def _index(part: Part) -> Index:
    content = read_bytes(f"{part.place}.idx")
    if content is None or not part.tokens.size:
        raise _damaged(part, "the pair is incomplete")
    try:
        return read_index(content, part.tokens.size)
    except BinIdxError as error:
        raise _damaged(part, str(error)) from error
