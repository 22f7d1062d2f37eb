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
    problems = [problem for problem in in_threads(lambda file: _problem(file, dtype), listed, THREADS) if problem]
    if problems:
        raise InputError(
            f"{problems[0]}; {len(problems):,} of {len(listed):,} files are wrong: see all with `tokenmill verify {path}`, "
            "then run the same preparation again, which builds only what is missing"
        )


def _problem(file: ListedFile, dtype: np.dtype[np.integer]) -> str | None:
    if file.packs is not None:
        return _packs_problem(file)
    return pair_problem(file.path, file.documents or 0, file.tokens or 0, file.held, dtype)


def _packs_problem(file: ListedFile) -> str | None:
    """The problem with a Parquet file or the number of its rows, if any."""
    try:
        rows = count_packs(file.path)
    except StoredFileError as error:
        return error.problem
    return None if rows == file.packs else f"{file.path}: {rows:,} packs instead of {file.packs:,}"
