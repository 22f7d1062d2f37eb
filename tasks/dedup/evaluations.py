"""Evaluations: the files that documents are held against, found, named by content, and read once in a process.

They are a blend like any other, with a text field for each data set; a few megabytes as a rule. A row that cannot be
read would be a hole in what is promised, so it is an error here and not set aside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.planning import require_no
from tokenmill.tasks.sources.discovery import discover, name_within
from tokenmill.tasks.sources.files import Slice, slice_of
from tokenmill.tasks.sources.formats import first_row, read_texts
from tokenmill.tasks.sources.parquet import require_text
from tokenmill.tasks.sources.slices import ContentIndex, cut
from xxhash import xxh3_128_hexdigest

from .contamination import Evaluations

WHOLE_FILES = 1 << 62
"""Bytes per slice: each file is one."""


@dataclass(frozen=True, slots=True)
class EvaluationFile:
    """A file of an evaluation: what it is called, the field of its texts, and where it lies."""

    name: str
    text_field: str
    part: Slice


@dataclass(frozen=True, slots=True)
class Held:
    """What documents are held against, and how many `rows` each file has."""

    evaluations: Evaluations
    rows: Sequence[int]

    @property
    def books(self) -> list[dict[str, Any]]:
        """For each file its name, its rows, and how many are looked for whole or too short to be looked for."""
        found = self.evaluations
        return [
            {"name": name, "rows": rows, "whole": short, "too_short": few}
            for name, rows, short, few in zip(found.names, self.rows, found.short, found.too_short, strict=True)
        ]


def find_evaluations(blend: Blend | str | None) -> tuple[EvaluationFile, ...]:
    """The files of a blend of evaluations, in order; none for None.

    Raises InputError for anything that a person must mend first.
    """
    if blend is None:
        return ()
    parts = load_blend(blend).parts()
    found = [
        file
        for split, sources in parts.items()
        for source in sources
        for file in _files(f"{split}/{source.name}" if split in SPLITS else source.name, source)
    ]
    names = [file.name for file in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"evaluations: two files are called {twice!r}; list them as data sets of their own")
    return tuple(found)


def evaluation_sources(blend: Blend | str | None) -> list[tuple[str, str]]:
    """What messages call each evaluation of a blend of them, and its path."""
    parts = {} if blend is None else load_blend(blend).parts()
    return [(f"evaluation {source.name!r}", source.path) for sources in parts.values() for source in sources]


def _files(name: str, source: DataSource) -> list[EvaluationFile]:
    require_no(source, ["used_in", "filters", "converter", "transforms"], "evaluations")
    fields = [source.text_field]
    slices = [part for file in discover(source) for part in cut(file, WHOLE_FILES, fields, require_text)]
    slices = ContentIndex().identify(slices, fields, "content")
    if not slices:
        raise InputError(
            f"evaluations: data set {source.name!r}: {source.path} holds no rows; mend the path or remove it"
        )
    return [
        EvaluationFile(f"{name}/{name_within(source.path, part.file.uri)}", source.text_field, part) for part in slices
    ]


def fingerprint(files: Sequence[EvaluationFile]) -> str | None:
    """A hash of what the files hold and are called; None for no files."""
    content = [[file.name, file.text_field, file.part.content, file.part.file.compression] for file in files]
    return xxh3_128_hexdigest(orjson.dumps(content)) if files else None


def evaluation_records(files: Sequence[EvaluationFile]) -> list[dict[str, Any]]:
    """The files as plain JSON, for workers."""
    return [asdict(file) for file in files]


def evaluations_from(records: Sequence[Mapping[str, Any]]) -> tuple[EvaluationFile, ...]:
    """The files of records that `evaluation_records` made."""
    return tuple(EvaluationFile(each["name"], each["text_field"], slice_of(each["part"])) for each in records)


@lru_cache(maxsize=1)
def held(files: tuple[EvaluationFile, ...]) -> Held:
    """What one file or more hold. Raises InputError for a row that cannot be read."""
    texts: dict[str, pa.LargeStringArray] = {}
    numbers: list[np.ndarray] = []
    for file in files:
        batches = list(read_texts(file.part, file.text_field))
        for row in (row for batch in batches for row in batch.bad):
            place = f"{file.part.file.uri}:{first_row(file.part) + row.row + 1}"
            raise InputError(f"evaluations: {place}: {row.reason}: {row.detail}; mend the row, or take it out")
        texts[file.name] = pa.concat_arrays([pa.array([], pa.large_string()), *(batch.texts for batch in batches)])
        numbers.append(np.concatenate([np.empty(0, np.int64), *(batch.rows for batch in batches)]))
    counts = [len(rows) for rows in numbers]
    found = Evaluations.of(texts)
    starts = np.cumsum([0, *counts[:-1]])
    rows = np.concatenate(numbers)[starts[found.files] + found.rows]
    return Held(replace(found, rows=rows), counts)
