"""Contamination: documents that share a run of 13 words with an evaluation.

Runs of 13 words are the field's convention since GPT-3. Case and punctuation are ignored. In scripts without blanks two
characters count as a word, or four letters of Thai and similar scripts (see `shingles`), because thousands of texts share
phrases of 13 characters.

An evaluation row shorter than 13 words is searched for as a whole. Rows shorter than three words aren't evidence about a document's
origin; they are skipped and counted.

Evaluations are a blend with a text field per dataset, usually a few megabytes. An unreadable row is an error, because skipping
it would hide contamination.

Evaluation runs are sorted 64-bit hashes in memory, 24 bytes each, behind a table that rejects nearly all other hashes.
Searching takes 20 s per million documents of 480 bytes on one core, nearly all of it normalization.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import orjson
import pyarrow as pa
from tokenmill.tasks.blend.models import SPLITS, Blend
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.planning import require_no
from tokenmill.tasks.sources.discovery import discover, name_within
from tokenmill.tasks.sources.files import Slice, slice_of
from tokenmill.tasks.sources.formats import first_row, read_texts
from tokenmill.tasks.sources.forms import read_blend
from tokenmill.tasks.sources.parquet import require_text
from tokenmill.tasks.sources.slices import ContentIndex, cut
from xxhash import xxh3_128_hexdigest

from .documents import NumberedTexts, batches, content
from .partitions import NONE
from .shingles import PARTS, RunLength, Sums, Units, normalized_words, runs_of, units_of

WORDS = 13
RUN = RunLength(words=WORDS, characters=2, letters=4, pieces=2)

MIN_WORDS = 3
"""The minimum length of a row to search for, in words or the equivalent in other units."""

FIRST_UNITS = 3
"""The first units of a short row, which locate its possible places; at most `MIN_WORDS`."""

HITS = pa.schema(
    {
        "number": pa.int64(),
        "evaluation": pa.large_string(),
        "row": pa.int64(),
        "runs": pa.int64(),
        "words": pa.large_string(),
    }
)
"""A document, an evaluation and its row, the number of shared runs, and the words of the first. A short row found whole is one
run. A run in several rows counts for the first of them.
"""

SLOTS_PER_RUN = 16
"""Slots of the table per run: one in 16 unknown hashes passes and is looked up needlessly."""


@dataclass(frozen=True, slots=True)
class Known:
    """A set of hashes: `hashes` uint64 [n], ascending, distinct; `likely` bool, a table indexed by their highest bits."""

    hashes: np.ndarray
    likely: np.ndarray

    @classmethod
    def of(cls, hashes: np.ndarray) -> Self:
        """Return a set of ascending, distinct hashes."""
        likely = np.zeros(1 << max(10, (SLOTS_PER_RUN * len(hashes)).bit_length()), np.bool_)
        likely[_slots(hashes, likely)] = True
        return cls(hashes, likely)

    def found(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of `hashes` are in the set: their positions, ascending, and the positions of the same hashes in the set."""
        places = np.flatnonzero(self.likely[_slots(hashes, self.likely)])  # rejects all but one in 16 others
        known = np.searchsorted(self.hashes, hashes[places])
        same = self.hashes[np.minimum(known, len(self.hashes) - 1)] == hashes[places] if places.size else known > 0
        return places[same], known[same]


@dataclass(frozen=True, slots=True)
class Evaluations:
    """The runs to search for in documents.

    For each of `names`, `short` counts rows that are searched for as a whole and `too_short` rows that are skipped. `runs` [n]
    are the runs of the other rows and the whole short rows; `files` int64 [n] and `rows` int64 [n] are the first position of
    each. `openings` are the first units of short rows, and `lengths` int64 their lengths in units.
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
        """Return the runs of evaluations by name; equal runs are kept once, for the first name in order."""
        hashes, openings = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        files, rows, lengths = [NONE], [NONE], [NONE]
        short, too_short = [0] * len(evaluations), [0] * len(evaluations)
        for number, texts in enumerate(evaluations.values()):
            for start, stop in batches(texts):
                units = units_of(normalized_words(texts.slice(start, stop - start)))
                runs, sums = runs_of(units, RUN), Sums.of(units)
                sizes = np.append(np.cumsum(RUN.weights(units)), 0)
                # Two words alone are in too many texts.
                enough = sizes[runs.ends - 1] - sizes[runs.starts - 1] >= MIN_WORDS * PARTS
                starts, ends, part = runs.starts[enough], runs.ends[enough], ~runs.whole[enough]
                of = np.repeat(np.arange(stop - start), np.diff(runs.offsets))[enough]
                hashes.append(sums.hashes(starts, ends))
                files.append(np.full(len(of), number))
                rows.append(start + of)
                openings.append(sums.hashes(starts[part], starts[part] + FIRST_UNITS))
                lengths.append((ends - starts)[part])
                short[number] += len(lengths[-1])
                too_short[number] += stop - start - len(np.unique(of))
        # A run in several rows counts for the first.
        distinct, first = np.unique(np.concatenate(hashes), return_index=True)
        return cls(
            [*evaluations],
            short,
            too_short,
            Known.of(distinct),
            np.concatenate(files)[first],
            np.concatenate(rows)[first],
            Known.of(np.unique(np.concatenate(openings))),
            np.unique(np.concatenate(lengths)),
        )


def hits(documents: NumberedTexts, evaluations: Evaluations) -> pa.Table:
    """Return the runs that documents share with evaluations: a table of `HITS`, by document, file and row."""
    return pa.concat_tables([HITS.empty_table(), *(_hits(batch, evaluations) for batch in documents.batches())])


def _hits(documents: NumberedTexts, evaluations: Evaluations) -> pa.Table:
    texts = normalized_words(documents.texts)
    units = units_of(texts)
    sums = Sums.of(units)
    starts, ends = _candidates(units, sums, evaluations)
    places, runs = evaluations.runs.found(sums.hashes(starts, ends))
    documents_hit = np.searchsorted(units.bounds, starts[places], side="right") - 1
    keys = np.stack([documents_hit, evaluations.files[runs], evaluations.rows[runs]], axis=1)
    # A hit is a document with a row: how many runs they share, and where the first is.
    distinct, first, counts = np.unique(keys, axis=0, return_index=True, return_counts=True)
    document, file, row = distinct.T
    characters, _ = content(texts)
    first_bytes = np.append(units.starts, len(characters))
    bounds = zip(first_bytes[starts[places[first]]].tolist(), first_bytes[ends[places[first]]].tolist(), strict=True)
    words = [characters[start:stop].tobytes().decode().rstrip() for start, stop in bounds]
    names = [evaluations.names[each] for each in file.tolist()]
    return pa.Table.from_arrays(
        [
            pa.array(documents.numbers[document]), pa.array(names, pa.large_string()), pa.array(row),
            pa.array(counts), pa.array(words, pa.large_string()),
        ],
        schema=HITS,
    )  # fmt: skip


def _candidates(units: Units, sums: Sums, evaluations: Evaluations) -> tuple[np.ndarray, np.ndarray]:
    """The bounds of runs that may be known: runs of full length, and runs as long as a short row at each possible opening."""
    runs = runs_of(units, RUN)
    starts, ends = runs.starts[runs.whole], runs.ends[runs.whole]
    if not evaluations.lengths.size:
        return starts, ends
    # A short row is looked for only where its first units are, instead of at every unit in every length.
    stops = np.repeat(units.bounds[1:], np.diff(units.bounds))
    open_at = np.flatnonzero(np.arange(FIRST_UNITS, FIRST_UNITS + len(stops)) <= stops)
    open_at = open_at[evaluations.openings.found(sums.hashes(open_at, open_at + FIRST_UNITS))[0]]
    short_ends = np.add.outer(evaluations.lengths, open_at)
    number, place = np.nonzero(short_ends <= stops[open_at])  # those that end within their text
    return np.concatenate([starts, open_at[place]]), np.concatenate([ends, short_ends[number, place]])


def _slots(hashes: np.ndarray, likely: np.ndarray) -> np.ndarray:
    """The slots of hashes in a table of 2**k slots: their highest k bits."""
    return hashes >> np.uint64(65 - len(likely).bit_length())


WHOLE_FILES = 1 << 62
"""Bytes per slice: larger than any file, so that each file is one slice."""


@dataclass(frozen=True, slots=True)
class EvaluationFile:
    """A file of an evaluation: its name, its text field and its slice."""

    name: str
    text_field: str
    part: Slice


def find_evaluations(blend: Blend | str | None) -> tuple[EvaluationFile, ...]:
    """Return the files of a blend of evaluations, in order; none for None. Raises InputError for an unusable blend or file."""
    if blend is None:
        return ()
    found: list[EvaluationFile] = []
    for split, source in ((split, source) for split, each in read_blend(blend).parts().items() for source in each):
        require_no(source, ["used_in", "filters", "where", "converter", "transforms", "fim"], "evaluations")
        fields = [source.text_field]
        slices = [part for file in discover(source) for part in cut(file, WHOLE_FILES, fields, require_text)]
        slices = ContentIndex().identify(slices, fields, "hash")  # part of every shard's identity, so always read
        if not slices:
            raise InputError(
                f"evaluations: dataset {source.name!r}: {source.path} doesn't contain rows; fix the path or remove the "
                "dataset"
            )
        name = f"{split}/{source.name}" if split in SPLITS else source.name
        for part in slices:
            file = name_within(source.path, part.file.uri)
            found.append(EvaluationFile(f"{name}/{file}", source.text_field, part))
    names = [file.name for file in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"evaluations: two files are called {twice!r}; list each as a separate dataset")
    return tuple(found)


def evaluation_sources(blend: Blend | str | None) -> list[tuple[str, str]]:
    """Each evaluation's name in messages, and its path."""
    parts = {} if blend is None else read_blend(blend).parts()
    return [(f"evaluation {source.name!r}", source.path) for sources in parts.values() for source in sources]


def fingerprint(files: Sequence[EvaluationFile]) -> str | None:
    """Return a hash of the files' names and content; None if files not found."""
    content = [[file.name, file.text_field, file.part.content, file.part.file.compression] for file in files]
    return xxh3_128_hexdigest(orjson.dumps(content)) if files else None


def evaluation_records(files: Sequence[EvaluationFile]) -> list[dict[str, Any]]:
    """Return the files as plain JSON, for workers."""
    return [asdict(file) for file in files]


def evaluations_from(records: Sequence[Mapping[str, Any]]) -> tuple[EvaluationFile, ...]:
    """Return the files that `evaluation_records` made."""
    return tuple(EvaluationFile(each["name"], each["text_field"], slice_of(each["part"])) for each in records)


@lru_cache(maxsize=1)
def load_evaluations(files: tuple[EvaluationFile, ...]) -> tuple[Evaluations, list[dict[str, Any]]]:
    """Read evaluation files, once per process: their runs, and for each file its name, its rows, and how many of them are
    searched for as a whole or are too short. Raises InputError for a row that cannot be read.
    """
    texts: dict[str, pa.LargeStringArray] = {}
    numbers: list[np.ndarray] = []
    for file in files:
        batches = list(read_texts(file.part, file.text_field))
        for row in (row for batch in batches for row in batch.bad):
            place = f"{file.part.file.uri}:{first_row(file.part) + row.row + 1}"
            raise InputError(f"evaluations: {place}: {row.reason}: {row.detail}; fix or remove the row")
        texts[file.name] = pa.concat_arrays([pa.array([], pa.large_string()), *(batch.texts for batch in batches)])
        numbers.append(np.concatenate([np.empty(0, np.int64), *(batch.rows for batch in batches)]))
    counts = [len(rows) for rows in numbers]
    found = Evaluations.of(texts)
    starts = np.cumsum([0, *counts[:-1]])  # blank rows aren't texts, so a text's number isn't its row's
    rows = np.concatenate(numbers)[starts[found.files] + found.rows]
    counted = zip(found.names, counts, found.short, found.too_short, strict=True)
    records = [{"name": name, "rows": of, "whole": whole, "too_short": few} for name, of, whole, few in counted]
    return replace(found, rows=rows), records
