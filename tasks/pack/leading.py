"""The leading packs of a file: how many make so many tokens, what they hold, and a file of them alone.

Packs lie in a file in random order, so the leading ones are a fair sample of it. Only the file that a draw ends in is
read, a row group at a time: once for what its packs hold, and its beginning once more to be written. For 65 M tokens in
packs of 4096 that takes 0.5 s and 3 s.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, BinaryIO, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.publish import Output, publish
from tokenmill.tasks.sources.opening import is_decoder_error
from tokenmill.tasks.storage import filesystem

from .parquet import MOST_ROWS, PADDING, SCHEMA, parquet_writer

MEASURED = ["input_ids", "seq_start_id", "role_start", "role"]


@dataclass(frozen=True, slots=True)
class PackFacts:
    """What some packs hold: `tokens` without the `padding` stored beside them; the longest sequence and the shortest
    pack in stored tokens; the most sequences of a pack.
    """

    sequences: int
    packs: int
    tokens: int
    padding: int
    longest: int
    most_sequences: int
    shortest_pack: int

    @classmethod
    def of(cls, recorded: Mapping[str, Any]) -> Self:
        """The facts that a receipt has of a part; it may have more."""
        return cls(**{field.name: recorded[field.name] for field in fields(cls)})

    @classmethod
    def total(cls, facts: Sequence[Self]) -> Self:
        """The facts of several files together, at least one."""
        columns = {field.name: [getattr(each, field.name) for each in facts] for field in fields(cls)}
        combine = {"longest": max, "most_sequences": max, "shortest_pack": min}
        return cls(**{name: combine.get(name, sum)(values) for name, values in columns.items()})


def leading_packs(place: str, tokens: int) -> PackFacts | None:
    """The facts of those leading packs of a file that together come closest to `tokens`, or None when that is none.

    Raises RunError when the file is damaged.
    """
    taken: list[PackFacts] = []
    with _opened(place) as file:
        for batch in _batches(file, MEASURED):
            found, whole = _measure(batch, tokens - sum(facts.tokens for facts in taken))
            taken += found
            if not whole:
                break
    return PackFacts.total(taken) if taken else None


def _measure(batch: pa.RecordBatch, tokens: int) -> tuple[list[PackFacts], bool]:
    """The facts of the leading packs of a batch, if any, that come closest to `tokens`; and whether it is all of them."""
    stored = np.diff(batch["input_ids"].offsets.to_numpy())
    sequences, first_sequence = _runs(batch["seq_start_id"], stored)
    runs, first_run = _runs(batch["role_start"], stored)
    padding = np.add.reduceat(np.where(batch["role"].flatten().to_numpy() == PADDING, runs, 0), first_run[:-1])
    ends = np.concatenate([[0], np.cumsum(stored - padding)])
    packs = int(np.abs(ends - tokens).argmin())
    if packs == 0:
        return [], False
    facts = PackFacts(
        sequences=int(first_sequence[packs]),
        packs=packs,
        tokens=int(ends[packs]),
        padding=int(padding[:packs].sum()),
        longest=int(sequences[: first_sequence[packs]].max()),
        most_sequences=int(np.diff(first_sequence)[:packs].max()),
        shortest_pack=int(stored[:packs].min()),
    )
    return [facts], packs == len(stored)


def _runs(starts: pa.ListArray, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lengths of the runs that begin at `starts` in packs of `stored` tokens, and where each pack's runs begin
    among them, with an end.
    """
    offsets = starts.offsets.to_numpy() - starts.offsets[0].as_py()
    begins = starts.flatten().to_numpy()
    ends = np.append(begins[1:], 0)
    ends[offsets[1:] - 1] = stored
    return ends - begins, offsets


def write_leading(source: str, target: str, packs: int) -> Output:
    """Write the leading packs of a file as a file of their own: the same rows, schema, metadata and row groups.

    Raises RunError when the file is damaged.
    """
    with (
        _opened(source) as file,
        publish(target) as publication,
        parquet_writer(publication, file.schema_arrow) as writer,
    ):
        for batch in _batches(file, SCHEMA.names):
            writer.write_batch(batch.slice(0, packs))
            packs -= min(packs, len(batch))
            if not packs:
                break
    return publication.output


def _batches(file: pq.ParquetFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a file, a row group at a time: asked for all of them at once, Arrow's buffers grow with the file."""
    for group in range(file.num_row_groups):
        yield from file.iter_batches(MOST_ROWS, row_groups=[group], columns=columns, use_threads=False)


@contextmanager
def _opened(place: str) -> Generator[pq.ParquetFile]:
    system, path = filesystem(place)
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        try:
            yield pq.ParquetFile(stream, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            if not is_decoder_error(error):
                raise
            raise RunError(
                f"{place}: cannot be read: {' '.join(str(error).split())}; remove the folder of this shard and run the same command again"
            ) from error
