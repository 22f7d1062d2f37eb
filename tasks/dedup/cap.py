"""At most `k` documents of one prompt: the best ones.

Data sets of reasoning hold many answers to one question, and a question with a hundred weighs a hundred times as much.
Which are the best is the caller's to say: `ranks_of` of correctness and of negative lengths keeps correct and short
ones. 1 s a million documents.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from .keyed import KEYED, grouped, keys, write_keyed
from .partitions import NONE, PartitionedFile, SliceFile, read_numbered

CAPPED = pa.schema([pa.field("dropped", pa.int64())])


def sign(file: PartitionedFile, numbers: np.ndarray, prompts: pa.LargeStringArray, ranks: np.ndarray) -> int:
    """Append the prompts of some documents to a file of `KEYED`: `numbers` int64 [n], the prompt id of each, `ranks`
    uint64 [n]. The number of those without a prompt (null), which are not counted among any.
    """
    known = prompts.is_valid().to_numpy(zero_copy_only=False)
    write_keyed(file, keys(prompts.drop_null()), numbers[known], ranks[known])
    return prompts.null_count


def resolve(
    files: Iterable[SliceFile], partition: int, partitions: int, most: int, gone: np.ndarray = NONE
) -> pa.Table:
    """The documents of one partition that are beyond the best `most` of their prompt: a table of `CAPPED`, ascending.

    Documents that are `gone` (int64, ascending) are not counted.
    """
    groups = grouped(read_numbered(files, partition, partitions, KEYED, gone))
    return pa.Table.from_arrays([pa.array(np.sort(groups.numbers[groups.places >= most]))], schema=CAPPED)
