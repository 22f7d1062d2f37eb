"""Exact duplicates: documents whose normalized texts are the same.

Two steps that can be mapped: `sign` for each slice of documents, `resolve` for each partition; the tables of all
partitions together are the answer. 4 s a million documents of 480 bytes on one core, nearly all of it normalization;
memory is one batch of text, then one partition's rows of 32 bytes.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from .documents import Documents
from .edges import edge_table
from .keyed import KEYED, grouped, keys, write_keyed
from .partitions import PartitionedFile, SliceFile, read_numbered


def sign(file: PartitionedFile, documents: Documents) -> None:
    """Append the keys of some documents, whose texts are in normal form, to a file of `KEYED`."""
    for batch in documents.batches():
        write_keyed(file, keys(batch.texts), batch.numbers, batch.ranks)


def resolve(files: Iterable[SliceFile], partition: int, partitions: int) -> pa.Table:
    """The duplicates of one partition, given the files of all slices: a table of `EDGES`, ascending by `dropped`."""
    groups = grouped(read_numbered(files, partition, partitions, KEYED))
    sizes = np.diff(groups.starts)
    best = np.repeat(groups.numbers[groups.starts[:-1]], sizes)
    first = np.repeat(np.minimum.reduceat(groups.numbers, groups.starts[:-1]), sizes) if sizes.size else best
    worse = groups.places > 0
    return edge_table(groups.numbers[worse], best[worse], np.ones(np.count_nonzero(worse)), first[worse])
