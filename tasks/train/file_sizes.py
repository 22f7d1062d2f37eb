"""Check before training that every listed file exists and has the recorded size.

Only sizes, headers and footers are read, a request or two per file, so that 10,000 files of an object store take a minute.
The store is not needed, so a copy of an output folder can be trained on without it. Only `tokenmill verify`, which reads
everything, finds a changed byte.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenmill.tasks.dataset.stored import StoredFileError, count_packs, pair_problem
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.store import THREADS
from tokenmill.tasks.threads import in_threads

from .prepared import ListedFile


def check_file_sizes(path: str, listed: Sequence[ListedFile], manifest: Mapping[str, Any]) -> None:
    """Raises InputError when a listed file is missing or its size differs from the manifest."""
    dtype = np.dtype(manifest["tokenizer"].get("dtype", "int32"))
    problems = [
        problem
        for problem in in_threads(
            lambda file: _packs_problem(file) if file.packs is not None else _pair_problem(file, dtype), listed, THREADS
        )
        if problem
    ]
    if problems:
        raise InputError(
            f"{problems[0]}; {len(problems):,} of {len(listed):,} files are wrong: see all with `tokenmill verify {path}`, "
            "then run the same preparation again, which builds only what is missing"
        )


<<<<<<< HEAD
def _problem(file: ListedFile, dtype: np.dtype[np.integer]) -> str | None:
    if file.packs is not None:
        return _packs_problem(file)
    return pair_problem(file.path, file.documents or 0, file.tokens or 0, file.held, dtype)
=======
def _pair_problem(file: ListedFile, dtype: np.dtype[np.integer]) -> str | None:
    """The problem with the sizes of a .bin/.idx pair or the header of its index, if any."""
    tokens, documents = file.tokens or 0, file.documents or 0
    places = f"{file.path}.bin", f"{file.path}.idx"
    expected = (file.held or tokens) * dtype.itemsize, HEADER.size + 12 * documents + 8 * (documents + 1)
    for place, size in zip(places, expected, strict=True):
        found = size_of(place)
        if found is None:
            return f"{place}: missing"
        if found != size:
            return f"{place}: {found:,} bytes instead of {size:,} for {documents:,} documents with {tokens:,} tokens"
    system, index = filesystem(places[1])
    code = next(code for code, known in DTYPES.items() if known == dtype)
    if system.cat_file(index, start=0, end=HEADER.size) != HEADER.pack(MAGIC, VERSION, code, documents, documents + 1):
        return f"{places[1]}: its header does not match {documents:,} documents of {dtype.name}"
    return None
>>>>>>> 9258afb (refactor(dedup,rl): join modules that are one idea in several files)


def _packs_problem(file: ListedFile) -> str | None:
    """The problem with a Parquet file or the number of its rows, if any."""
    try:
        rows = count_packs(file.path)
    except StoredFileError as error:
        return error.problem
    return None if rows == file.packs else f"{file.path}: {rows:,} packs instead of {file.packs:,}"
