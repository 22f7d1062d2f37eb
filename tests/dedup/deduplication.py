"""The steps of deduplication wired in one process, in any order that a test asks for."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenmill.tasks.dedup import near
from tokenmill.tasks.dedup.documents import (
    EDGES,
    KEYED,
    NumberedTexts,
    beyond_cap,
    exact_duplicates,
    write_prompt_keys,
    write_text_keys,
)
from tokenmill.tasks.dedup.near import BANDS_SCHEMA, MADE_OF, SHINGLED, Compared, compare_large_buckets
from tokenmill.tasks.dedup.partitions import NONE, SliceFile, partitioned
from tokenmill.tasks.dedup.shingles import normalized


def large(texts):
    return pa.array(texts, pa.large_string())


def documents(texts, ranks=None, numbers=None):
    """Documents of these texts, all equally good and numbered from 0 unless said otherwise."""
    numbers = np.arange(len(texts)) if numbers is None else np.asarray(numbers, np.int64)
    ranks = np.zeros(len(texts)) if ranks is None else np.asarray(ranks)
    return NumberedTexts(numbers, large(texts), ranks.astype(np.uint64))


@dataclass
class Wiring:
    """How the work is cut up and in which order its parts are done; results must not depend on any of it."""

    folder: Path
    partitions: int = 3
    slice_size: int = 10_000
    seed: int | None = None
    crowds: list[Compared] = field(default_factory=list)

    def _shuffled(self, things):
        things = list(things)
        if self.seed is not None:
            random.Random(self.seed).shuffle(things)
        return things

    def _slices(self, whole):
        for start in self._shuffled(range(0, len(whole.numbers), self.slice_size)):
            stop = start + self.slice_size
            texts = whole.texts.slice(start, self.slice_size)
            yield start, NumberedTexts(whole.numbers[start:stop], texts, whole.ranks[start:stop])

    def _place(self, name):
        return str(self.folder / f"{name}.arrow")

    def _local(self, part):
        """The documents of a slice under the numbers that they have in it, their texts in normal form."""
        return NumberedTexts(part.numbers - part.numbers[0], normalized(part.texts), part.ranks)

    def exact(self, whole):
        files = []
        for start, part in self._slices(whole):
            with partitioned(self._place(f"exact-{start}"), KEYED, self.partitions) as file:
                write_text_keys(file, self._local(part))
            files.append(SliceFile(file.output.path, int(part.numbers[0])))
        parts = self._shuffled(range(self.partitions))
        return pa.concat_tables(exact_duplicates(files, part, self.partitions) for part in parts)

    def verified(self, whole, threshold=0.8, gone=NONE):
        """The pairs of leaders, by partition, then those of the crowds."""
        return [*self._leaders(whole, threshold, gone), *(each.verified for each in self.crowds)]

    def _leaders(self, whole, threshold, gone):
        bands, shingled, pairs, crowded = [], [], [], []
        for start, part in self._slices(whole):
            names = self._place(f"bands-{start}"), self._place(f"shingles-{start}")
            sign_near(self._local(part), *names, self.partitions)
            bands.append(SliceFile(names[0], int(part.numbers[0])))
            shingled.append(SliceFile(names[1], int(part.numbers[0])))
        parts = range(self.partitions)
        for part in self._shuffled(parts):
            name = self._place(f"pairs-{part}")
            buckets = near.read_buckets(bands, part, self.partitions, gone)
            pairs.append(near.write_candidates(buckets, name, self.partitions).path)
            crowded.append(buckets.crowded)
        found = [
            near.verify(pairs, self._shuffled(shingled), part, self.partitions, threshold)
            for part in self._shuffled(parts)
        ]
        left = near.certain_drops(found, np.concatenate([table["number"].to_numpy() for table in crowded]))
        self.crowds = [compare_large_buckets(table, left, self._shuffled(shingled), threshold) for table in crowded]
        return found

    def near(self, whole, threshold=0.8):
        return near.resolve(self.verified(whole, threshold))

    def cap(self, whole, prompts, most, gone=NONE):
        files = []
        for start, part in self._slices(whole):
            local = part.numbers - part.numbers[0]
            with partitioned(self._place(f"cap-{start}"), KEYED, self.partitions) as file:
                write_prompt_keys(file, local, prompts.slice(start, len(local)), part.ranks)
            files.append(SliceFile(file.output.path, int(part.numbers[0])))
        parts = self._shuffled(range(self.partitions))
        return pa.concat_tables(beyond_cap(files, part, self.partitions, most, gone) for part in parts)


def sign_near(documents, bands, shingled, partitions):
    """Write the bands and the shingles of documents to the files of these names."""
    with (
        partitioned(bands, BANDS_SCHEMA, partitions) as band_file,
        partitioned(shingled, SHINGLED, 1) as shingle_file,
        partitioned(f"{shingled}.units", MADE_OF, 1) as unit_file,
    ):
        return near.sign(band_file, shingle_file, unit_file, documents)


def left(whole, *drops):
    """The documents that no table of drops names."""
    gone = np.concatenate([np.empty(0, np.int64), *(table["dropped"].to_numpy() for table in drops)])
    stays = np.flatnonzero(~np.isin(whole.numbers, gone))
    return NumberedTexts(whole.numbers[stays], whole.texts.take(pa.array(stays)), whole.ranks[stays])


def edges(table):
    """The edges, by the document dropped: which one stayed, and how alike they are."""
    assert table.schema == EDGES
    return {row["dropped"]: (row["kept"], row["jaccard"]) for row in table.to_pylist()}
