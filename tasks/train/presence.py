"""Are the files there that a job lists, and do they hold as much as the manifest says?

Sizes, headers and footers only, some at a time: a request or two per file, so that 10,000 files of an object store take a
minute. What a header cannot show, a changed byte among tokens, is found by `tokenmill verify`, which reads everything.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.store import THREADS, size_of
from tokenmill.tasks.storage import filesystem
from tokenmill.tasks.tokenize.binidx import DTYPES, HEADER, MAGIC, VERSION

from .prepared import ListedFile


def every_file_is_whole(path: str, listed: Sequence[ListedFile], manifest: Mapping[str, Any]) -> None:
    """Raises InputError when a file that is listed is missing, or holds more or less than the manifest says."""
    dtype = np.dtype(manifest["tokenizer"].get("dtype", "int32"))
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda file: _problem(file, dtype), listed))
    problems = [problem for problem in found if problem]
    if problems:
        raise InputError(
            f"{problems[0]}; so with {len(problems):,} of {len(listed):,} files: see all with `tokenmill verify {path}`, "
            "then run the same preparation again, which builds what is missing and no more"
        )


def _problem(file: ListedFile, dtype: np.dtype[np.integer]) -> str | None:
    return _packs_problem(file) if file.packs is not None else _pair_problem(file, dtype)


def _pair_problem(file: ListedFile, dtype: np.dtype[np.integer]) -> str | None:
    """What is wrong with the sizes of a .bin/.idx pair or the header of its index."""
    tokens, documents = file.tokens or 0, file.documents or 0
    places = f"{file.path}.bin", f"{file.path}.idx"
    expected = tokens * dtype.itemsize, HEADER.size + 12 * documents + 8 * (documents + 1)
    for place, size in zip(places, expected, strict=True):
        there = size_of(place)
        if there != size:
            return _wrong(place, there, size, f"{documents:,} documents with {tokens:,} tokens")
    system, index = filesystem(places[1])
    code = next(code for code, known in DTYPES.items() if known == dtype)
    if system.cat_file(index, start=0, end=HEADER.size) != HEADER.pack(MAGIC, VERSION, code, documents, documents + 1):
        return f"{places[1]}: its header is not that of {documents:,} documents of {dtype.name}"
    return None


def _wrong(place: str, there: int | None, size: int, content: str) -> str:
    if there is None:
        return f"{place}: missing"
    return f"{place}: {there:,} bytes instead of {size:,}, which {content} take"


def _packs_problem(file: ListedFile) -> str | None:
    """What is wrong with a Parquet file, or with the number of its rows."""
    system, path = filesystem(file.path)
    try:
        with cast("BinaryIO", system.open(path, "rb")) as stream:
            rows = pq.ParquetFile(stream).metadata.num_rows
    except FileNotFoundError:
        return f"{file.path}: missing"
    except (pa.ArrowException, OSError) as error:
        return f"{file.path}: cannot be read as Parquet: {error}"
    return None if rows == file.packs else f"{file.path}: {rows:,} packs instead of {file.packs:,}"
