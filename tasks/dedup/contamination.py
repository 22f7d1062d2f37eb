"""Contamination: documents that hold a run of words out of an evaluation.

A model that has read the questions is not tested by them. A run of 13 words that two texts share is rarely chance, and
is the field's custom since GPT-3; here letters are lowered and punctuation is no part of words. A shorter evaluation text
cannot be found that way, and is counted instead of being passed over in silence.

Runs are hashes of 64 bits. Those of the evaluations lie sorted in memory, 12 bytes each; of a document's, a table
of bits sets aside nearly all that are not among them. 20 s a million documents of 480 bytes on one core, nearly
all of it normalization.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
from pyarrow import compute

from tasks.dedup.documents import Documents, batches
from tasks.dedup.normalize import bare
from tasks.dedup.shingles import shingles

WORDS = 13

HITS = pa.schema(
    [
        pa.field("number", pa.int64()),
        pa.field("evaluation", pa.large_string()),
        pa.field("row", pa.int64()),
        pa.field("runs", pa.int64()),
        pa.field("words", pa.large_string()),
    ]
)
"""A document, the evaluation and the row in it that it shares runs with, how many, and the first of them. What several
rows hold, as instructions often are, counts for the first of them alone."""

SLOTS_PER_RUN = 16
"""Bytes of the table per run: of 16 runs that are not there, one seems to be, and is looked up in vain."""


@dataclass(frozen=True, slots=True)
class Evaluations:
    """What documents are held against.

    `names` [files] and how many rows of each are too `short` to be found. `hashes` uint64 [runs] are all runs, ascending
    and distinct, `files` int64 [runs] and `rows` int64 [runs] where each occurs first. `likely` bool is the table.
    """

    names: Sequence[str]
    short: Sequence[int]
    hashes: np.ndarray
    files: np.ndarray
    rows: np.ndarray
    likely: np.ndarray

    @classmethod
    def of(cls, evaluations: Mapping[str, pa.LargeStringArray]) -> Self:
        """The runs of some evaluations, by name; the order of the names decides which file holds a run first."""
        found = [_runs_of(texts) for texts in evaluations.values()]
        hashes = np.concatenate([np.empty(0, np.uint64), *(hashes for hashes, _, _ in found)])
        rows = np.concatenate([np.empty(0, np.int64), *(rows for _, rows, _ in found)])
        files = np.repeat(np.arange(len(found)), [len(rows) for _, rows, _ in found])
        hashes, first = np.unique(hashes, return_index=True)
        likely = np.zeros(1 << max(10, (SLOTS_PER_RUN * len(hashes)).bit_length()), np.bool_)
        likely[_slots(hashes, likely)] = True
        return cls([*evaluations], [short for _, _, short in found], hashes, files[first], rows[first], likely)

    def found(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of `hashes` are runs of an evaluation: their places, ascending, and the places of the runs here."""
        places = np.flatnonzero(self.likely[_slots(hashes, self.likely)])
        runs = np.searchsorted(self.hashes, hashes[places])
        same = self.hashes[np.minimum(runs, len(self.hashes) - 1)] == hashes[places] if places.size else runs > 0
        return places[same], runs[same]


def hits(documents: Documents, evaluations: Evaluations) -> pa.Table:
    """The runs that a slice of documents shares with evaluations: a table of `HITS`, by document, file and row."""
    return pa.concat_tables([HITS.empty_table(), *(_hits(batch, evaluations) for batch in documents.batches())])


def _hits(documents: Documents, evaluations: Evaluations) -> pa.Table:
    texts = bare(documents.texts)
    found = shingles(texts, WORDS)
    places, runs = evaluations.found(found.hashes)
    documents_hit = np.searchsorted(found.offsets, places, side="right") - 1
    keys = np.stack([documents_hit, evaluations.files[runs], evaluations.rows[runs]], axis=1)
    distinct, first, counts = np.unique(keys, axis=0, return_index=True, return_counts=True)
    document, file, row = distinct.T
    starts = (places[first] - found.offsets[document]).tolist()
    words = [
        " ".join(texts[each].as_py().split(" ")[start : start + WORDS])
        for each, start in zip(document.tolist(), starts, strict=True)
    ]
    names = [evaluations.names[each] for each in file.tolist()]
    return pa.Table.from_arrays(
        [
            pa.array(documents.numbers[document]), pa.array(names, pa.large_string()), pa.array(row),
            pa.array(counts), pa.array(words, pa.large_string()),
        ],
        schema=HITS,
    )  # fmt: skip


def _runs_of(texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray, int]:
    """The runs of one evaluation, the row of each, and how many rows have too few words for one."""
    hashes, rows, short = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], 0
    for start, stop in batches(texts):
        some = bare(texts.slice(start, stop - start))
        blanks = compute.call_function("count_substring", [some], compute.MatchSubstringOptions(" "))
        long = np.flatnonzero(blanks.to_numpy() >= WORDS - 1)
        found = shingles(some.take(pa.array(long)), WORDS)
        hashes.append(found.hashes)
        rows.append(np.repeat(start + long, found.counts))
        short += stop - start - len(long)
    return np.concatenate(hashes), np.concatenate(rows), short


def _slots(hashes: np.ndarray, likely: np.ndarray) -> np.ndarray:
    """Where hashes stand in a table of 2**k slots: their highest k bits."""
    return hashes >> np.uint64(65 - len(likely).bit_length())
