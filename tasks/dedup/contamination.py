"""Contamination: documents that hold a run of words out of an evaluation.

A model that has read the questions is not tested by them. A run of 13 words that two texts share is rarely chance, and
is the field's custom since GPT-3; here letters are lowered and punctuation is no part of words. In scripts without blanks
two characters count for a word, or four letters of Thai and its like (`units`), because 13 characters of Chinese or Thai
are phrases that thousands of texts share.

A row of an evaluation that is shorter than a run is looked for whole: all of its units, in their order, wherever they
begin in a document. One that is shorter than three words is a phrase like `New York` and says nothing about where a
document is from; such rows are not looked for, and counted.

Runs are hashes of 64 bits. Those of the evaluations lie sorted in memory, 24 bytes each; of a document's, a table
of bits sets aside nearly all that are not among them. 20 s a million documents of 480 bytes on one core, nearly
all of it normalization.

Evaluations: the files that documents are held against, found, named by content, and read once in a process.

They are a blend like any other, with a text field for each data set; a few megabytes as a rule. A row that cannot be
read would be a hole in what is promised, so it is an error here and not set aside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import orjson
import pyarrow as pa
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.planning import require_no
from tokenmill.tasks.sources.content import ContentIndex
from tokenmill.tasks.sources.cut import cut
from tokenmill.tasks.sources.discovery import discover, name_within
from tokenmill.tasks.sources.files import Slice, slice_of
from tokenmill.tasks.sources.locate import first_row
from tokenmill.tasks.sources.parquet import require_text
from tokenmill.tasks.sources.read import read_texts
from xxhash import xxh3_128_hexdigest

from .documents import Documents, batches, content
from .shingles import PARTS, Length, Sums, Units, bare, runs_of, units_of

WORDS = 13
RUN = Length(words=WORDS, characters=2, letters=4, pieces=2)

LEAST_WORDS = 3
"""What a row must have, in words or as much of other units, to be looked for."""

FIRST_UNITS = 3
"""Units at the beginning of a row that is looked for whole, by which places are found where it may stand: never more than
`LEAST_WORDS` are."""

HITS = pa.schema(
    [
        pa.field("number", pa.int64()),
        pa.field("evaluation", pa.large_string()),
        pa.field("row", pa.int64()),
        pa.field("runs", pa.int64()),
        pa.field("words", pa.large_string()),
    ]
)
"""A document, the evaluation and the row in it that it shares runs with, how many, and the first of them; a row that was
looked for whole is one run. What several rows hold, as instructions often are, counts for the first of them alone."""

SLOTS_PER_RUN = 16
"""Bytes of the table per run: of 16 runs that are not there, one seems to be, and is looked up in vain."""


@dataclass(frozen=True, slots=True)
class Known:
    """Hashes that are looked for: `hashes` uint64 [n], ascending and distinct; `likely` bool is the table."""

    hashes: np.ndarray
    likely: np.ndarray

    @classmethod
    def of(cls, hashes: np.ndarray) -> Self:
        """Hashes that are ascending and distinct."""
        likely = np.zeros(1 << max(10, (SLOTS_PER_RUN * len(hashes)).bit_length()), np.bool_)
        likely[_slots(hashes, likely)] = True
        return cls(hashes, likely)

    def found(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of `hashes` are known: their places, ascending, and the places of the same hashes here."""
        places = np.flatnonzero(self.likely[_slots(hashes, self.likely)])
        known = np.searchsorted(self.hashes, hashes[places])
        same = self.hashes[np.minimum(known, len(self.hashes) - 1)] == hashes[places] if places.size else known > 0
        return places[same], known[same]


@dataclass(frozen=True, slots=True)
class Evaluations:
    """What documents are held against.

    `names` [files], how many rows of each are `short` and looked for whole, and how many are `too_short` to be looked
    for. `runs` [n] are the runs of all other rows and the short ones, `files` int64 [n] and `rows` int64 [n] where each
    occurs first. `openings` are the first units of short rows, and `lengths` int64 how many units such rows have.
    """

    names: Sequence[str]
    short: Sequence[int]
    too_short: Sequence[int]
    runs: Known
    files: np.ndarray
    rows: np.ndarray
    openings: Known
    lengths: np.ndarray

    @classmethod
    def of(cls, evaluations: Mapping[str, pa.LargeStringArray]) -> Self:
        """The runs of some evaluations, by name; the order of the names decides which file holds a run first."""
        found = [_Rows.of(texts) for texts in evaluations.values()]
        whole = _Rows.joined(found)
        files = np.repeat(np.arange(len(found)), [len(each.rows) for each in found])
        hashes, first = np.unique(whole.hashes, return_index=True)
        return cls(
            [*evaluations],
            [len(each.lengths) for each in found],
            [each.too_short for each in found],
            Known.of(hashes),
            files[first],
            whole.rows[first],
            Known.of(np.unique(whole.openings)),
            np.unique(whole.lengths),
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """What is looked for of the rows of a file: the `hashes` of runs and short rows with the number of the row of each,
    and of the short rows the hashes of their `openings` and their `lengths` in units.
    """

    hashes: np.ndarray
    rows: np.ndarray
    openings: np.ndarray
    lengths: np.ndarray
    too_short: int

    @classmethod
    def of(cls, texts: pa.LargeStringArray) -> Self:
        """The rows of one evaluation."""
        return cls.joined([cls._of_batch(texts.slice(start, stop - start), start) for start, stop in batches(texts)])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Several of them, in order."""
        hashes = np.concatenate([np.empty(0, np.uint64), *(each.hashes for each in parts)])
        rows = np.concatenate([np.empty(0, np.int64), *(each.rows for each in parts)])
        openings = np.concatenate([np.empty(0, np.uint64), *(each.openings for each in parts)])
        lengths = np.concatenate([np.empty(0, np.int64), *(each.lengths for each in parts)])
        return cls(hashes, rows, openings, lengths, sum(each.too_short for each in parts))

    @classmethod
    def _of_batch(cls, texts: pa.LargeStringArray, first: int) -> Self:
        units = units_of(bare(texts))
        runs, sums = runs_of(units, RUN), Sums.of(units)
        sizes = np.append(np.cumsum(RUN.weights(units)), 0)
        enough = sizes[runs.ends - 1] - sizes[runs.starts - 1] >= LEAST_WORDS * PARTS
        starts, ends, short = runs.starts[enough], runs.ends[enough], ~runs.whole[enough]
        rows = np.repeat(np.arange(len(texts)), np.diff(runs.offsets))[enough]
        return cls(
            sums.hashes(starts, ends),
            first + rows,
            sums.hashes(starts[short], starts[short] + FIRST_UNITS),
            (ends - starts)[short],
            len(texts) - len(np.unique(rows)),
        )


def hits(documents: Documents, evaluations: Evaluations) -> pa.Table:
    """The runs that a slice of documents shares with evaluations: a table of `HITS`, by document, file and row."""
    return pa.concat_tables([HITS.empty_table(), *(_hits(batch, evaluations) for batch in documents.batches())])


def _hits(documents: Documents, evaluations: Evaluations) -> pa.Table:
    texts = bare(documents.texts)
    units = units_of(texts)
    sums = Sums.of(units)
    starts, ends = _candidates(units, sums, evaluations)
    places, runs = evaluations.runs.found(sums.hashes(starts, ends))
    documents_hit = np.searchsorted(units.bounds, starts[places], side="right") - 1
    keys = np.stack([documents_hit, evaluations.files[runs], evaluations.rows[runs]], axis=1)
    distinct, first, counts = np.unique(keys, axis=0, return_index=True, return_counts=True)
    document, file, row = distinct.T
    words = _spelt(texts, units, starts[places[first]], ends[places[first]])
    names = [evaluations.names[each] for each in file.tolist()]
    return pa.Table.from_arrays(
        [
            pa.array(documents.numbers[document]), pa.array(names, pa.large_string()), pa.array(row),
            pa.array(counts), pa.array(words, pa.large_string()),
        ],
        schema=HITS,
    )  # fmt: skip


def _candidates(units: Units, sums: Sums, evaluations: Evaluations) -> tuple[np.ndarray, np.ndarray]:
    """The runs of documents that may be known, where each starts and ends: those as long as a run, and as many units as
    a short row has, wherever the first units of one stand.
    """
    runs = runs_of(units, RUN)
    starts, ends = runs.starts[runs.whole], runs.ends[runs.whole]
    if not evaluations.lengths.size:
        return starts, ends
    stops = np.repeat(units.bounds[1:], np.diff(units.bounds))
    open_at = np.flatnonzero(np.arange(FIRST_UNITS, FIRST_UNITS + len(stops)) <= stops)
    open_at = open_at[evaluations.openings.found(sums.hashes(open_at, open_at + FIRST_UNITS))[0]]
    short_ends = np.add.outer(evaluations.lengths, open_at)
    number, place = np.nonzero(short_ends <= stops[open_at])
    return np.concatenate([starts, open_at[place]]), np.concatenate([ends, short_ends[number, place]])


def _spelt(texts: pa.LargeStringArray, units: Units, starts: np.ndarray, ends: np.ndarray) -> list[str]:
    """What runs of units say."""
    characters, _ = content(texts)
    first_bytes = np.append(units.starts, len(characters))
    bounds = zip(first_bytes[starts].tolist(), first_bytes[ends].tolist(), strict=True)
    return [characters[start:stop].tobytes().decode().rstrip() for start, stop in bounds]


def _slots(hashes: np.ndarray, likely: np.ndarray) -> np.ndarray:
    """Where hashes stand in a table of 2**k slots: their highest k bits."""
    return hashes >> np.uint64(65 - len(likely).bit_length())


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
