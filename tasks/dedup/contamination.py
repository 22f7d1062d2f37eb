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
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from .documents import Documents, batches, content
from .normalize import bare
from .shingles import PARTS, Length, Sums, runs_of
from .units import Units, units_of

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
