"""How many sequences of two packed SFT preparations differ, however each has packed them.

A sequence is its ids and its shifted loss mask; both sides become multisets of hashes of these, because order and packs
are each side's own.

    python -m bench.sft_difference OURS PEER [SHOWN]

Each is a Parquet file or a folder with some. Prints as JSON how many sequences each has, how many of each the other has
not, and the ids and masks of the first SHOWN of these (none).
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_128_digest

COLUMNS = ["input_ids", "loss_mask", "seq_start_id"]

Found = tuple[np.ndarray, np.ndarray]


def sequences(place: Path) -> Iterator[Found]:
    """Ids (int32) and mask (int8) of every sequence."""
    for path in [place] if place.is_file() else sorted(place.rglob("packs/*/*.parquet")):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(64, columns=COLUMNS):
                yield from (each for row in zip(*(batch[name] for name in COLUMNS), strict=True) for each in _cut(*row))


def _cut(ids: pa.ListScalar, mask: pa.ListScalar, starts: pa.ListScalar) -> Iterator[Found]:
    """The sequences of one pack."""
    tokens, loss = ids.values.to_numpy().astype(np.int32), mask.values.to_numpy().astype(np.int8)
    begins = starts.values.to_pylist()
    for start, stop in zip(begins, [*begins[1:], len(tokens)], strict=True):
        yield tokens[start:stop], loss[start:stop]


def digest(found: Found) -> bytes:
    """A hash of ids and mask; the mask is as long as the ids, so where one ends is no question."""
    ids, mask = found
    return xxh3_128_digest(ids.tobytes() + mask.tobytes())


def shown(place: Path, only: Counter[bytes], most: int) -> list[list[list[int]]]:
    """Ids and mask of the first sequences whose hash is in `only`."""
    found = (each for each in sequences(place) if most and digest(each) in only)
    return [[array.tolist() for array in each] for each, _ in zip(found, range(most), strict=False)]


def main() -> None:
    """Compare two, with the arguments of the module's docstring."""
    ours, peer, *rest = sys.argv[1:]
    most = int(rest[0]) if rest else 0
    mine, theirs = (Counter(digest(each) for each in sequences(Path(place))) for place in (ours, peer))
    print(
        json.dumps(
            {
                "sequences": [mine.total(), theirs.total()],
                "only": [(mine - theirs).total(), (theirs - mine).total()],
                "shown": [shown(Path(ours), mine - theirs, most), shown(Path(peer), theirs - mine, most)],
            }
        )
    )


if __name__ == "__main__":
    main()
