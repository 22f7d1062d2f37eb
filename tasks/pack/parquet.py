"""Packed Parquet: one row per pack, with the columns that Megatron-Bridge reads and columns for its origin.

    input_ids     list<int32>  the sequences of the pack, back to back
    loss_mask     list<int8>   1 at i: token i + 1 of the same sequence is trained on; 0 at the last token of each
    seq_start_id  list<int32>  start of each sequence; the first is 0, the end is not stored
    document      list<int64>  per sequence: its row, from 0, among the rows of all shards that were packed together
    role_start    list<int32>  start of each run of tokens by one author
    role          list<int8>   author of the run, a number in `tasks.chat.encoding.ROLES`

The first three belong to `GPTSFTPackedParquetDataset` (Megatron-Bridge 0.6.2), which ignores the others. Its reader keeps
one row group in memory, so row groups are small. The schema's metadata records under `tokenmill` how the file was built.
Byte-stream-split and LZ4 reduce ids to 40 % of their size; zstd would need 20 % less and take 40 % longer to write. The
schema declares that no list and no element is null, which saves Parquet a third of the time for levels.

Packs are in random order, so the leading packs of a file are a fair sample. A draw reads only the file it ends in, one row
group at a time: 65 M tokens in packs of 4096 take 0.5 s to measure and 3 s to write.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, BinaryIO, Self, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.chat.encoding import ROLE_NUMBERS
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.publish import Output, Publication, publish
from tokenmill.tasks.sources.opening import is_decoder_error
from tokenmill.tasks.storage import open_binary

from .algorithms import Packs
from .sequences import IDS, StoredSequences, loss_of
from .settings import PackRecipe

MAX_ROWS = 500
MAX_TOKENS = 2_000_000
"""Per row group, which writers and readers hold in memory."""

FORMAT = "packed-sft"
PADDING = ROLE_NUMBERS["padding"]

ELEMENTS = {
    "input_ids": pa.int32(), "loss_mask": pa.int8(), "seq_start_id": pa.int32(), "document": pa.int64(),
    "role_start": pa.int32(), "role": pa.int8(),
}  # fmt: skip

SCHEMA = pa.schema(
    [
        pa.field(name, pa.list_(pa.field("element", kind, nullable=False)), nullable=False)
        for name, kind in ELEMENTS.items()
    ]
)


@dataclass(frozen=True, slots=True)
class PackWriter:
    """Writes packs from stored sequences, each padded with `pad_id` to a multiple of `pad_seq_to_mult` plus one."""

    stored: StoredSequences
    packs: Packs
    recipe: PackRecipe

    def write(self, file: Publication, metadata: dict[str, Any]) -> dict[str, int]:
        """Write all packs, and return the facts of the file."""
        schema = SCHEMA.with_metadata({"tokenmill": orjson.dumps(metadata)})
        with parquet_writer(file, schema) as writer:
            # One row group at a time, however many packs there are.
            rows, packs = max(1, min(MAX_ROWS, MAX_TOKENS // self.recipe.pack_size)), len(self.packs.offsets) - 1
            for first in range(0, packs, rows):
                writer.write_table(self._table(first, min(first + rows, packs), schema), row_group_size=rows)
        order, counts = self.packs.sequences, np.diff(self.packs.offsets)
        sizes = padded(self.stored.lengths[order], self.recipe.pad_seq_to_mult)
        tokens = int(self.stored.lengths[order].sum())
        return {
            "sequences": len(sizes),
            "packs": len(counts),
            "tokens": tokens,
            "padding": int(sizes.sum()) - tokens,
            "loss_tokens": int(self.stored.trained[order].sum()),
            "longest": int(sizes.max()),
            "most_sequences": int(counts.max()),
            "shortest_pack": int(np.add.reduceat(sizes, self.packs.offsets[:-1]).min()),
        }

    def _table(self, first: int, stop: int, schema: pa.Schema) -> pa.Table:
        """Packs `[first, stop)` as one row group."""
        borders = self.packs.offsets[first : stop + 1]
        order = self.packs.sequences[borders[0] : borders[-1]]
        sequences = borders - borders[0]
        sizes = padded(self.stored.lengths[order], self.recipe.pad_seq_to_mult)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        tokens = ends[sequences]
        starts = ends[:-1] - np.repeat(tokens[:-1], np.diff(sequences))
        role_counts, role_starts, roles = self._roles(order, starts, sizes)
        runs = np.concatenate([np.zeros(1, np.int64), np.cumsum(role_counts)])[sequences]
        ids = np.full(int(sizes.sum()), self.recipe.pad_id or 0, "<u4")
        self.stored.read(order, ids, ends[:-1])
        # The highest bit of a stored token is its loss. Behind a cut, the last token's is of one that isn't here.
        loss = loss_of(ids)
        loss[ends[:-1] + self.stored.lengths[order] - 1] = 0
        ids &= IDS
        columns = [
            (tokens, ids.view("<i4")),
            (tokens, loss),
            (sequences, starts.astype(np.int32)),
            (sequences, self.stored.rows[order]),
            (runs, role_starts.astype(np.int32)),
            (runs, roles),
        ]
        lists = [
            pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values), type=kind)
            for (offsets, values), kind in zip(columns, schema.types, strict=True)
        ]
        return pa.Table.from_arrays(lists, schema=schema)

    def _roles(
        self, order: np.ndarray, starts: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Role runs of some sequences, as far as they are not cut off, plus one for any padding of each: counts, starts, roles."""
        # The number of each run in the stored arrays, sequence by sequence in the order of the packs.
        lengths, counts = self.stored.lengths[order], np.diff(self.stored.runs)[order]
        source = np.repeat(self.stored.runs[order] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        owners = np.repeat(np.arange(len(order)), counts)
        is_kept = self.stored.role_starts[source] < lengths[owners]
        source, owners = source[is_kept], owners[is_kept]
        # Padding is one more run, behind the others of its sequence.
        is_padded = sizes > lengths
        total = np.bincount(owners, minlength=len(order)) + is_padded
        is_run = np.ones(int(total.sum()), np.bool_)
        is_run[np.cumsum(total)[is_padded] - 1] = False
        role_starts = np.empty(len(is_run), np.int64)
        role_starts[is_run] = starts[owners] + self.stored.role_starts[source]
        role_starts[~is_run] = (starts + lengths)[is_padded]
        roles = np.full(len(is_run), PADDING, np.int8)
        roles[is_run] = self.stored.roles[source]
        return total, role_starts, roles


ENCODINGS = {
    "input_ids": "BYTE_STREAM_SPLIT", "loss_mask": "PLAIN", "seq_start_id": "DELTA_BINARY_PACKED",
    "document": "DELTA_BINARY_PACKED", "role_start": "DELTA_BINARY_PACKED", "role": "PLAIN",
}  # fmt: skip

PARQUET: dict[str, Any] = {
    "compression": {f"{name}.list.element": "lz4" if name == "input_ids" else "zstd" for name in ENCODINGS},
    "column_encoding": {f"{name}.list.element": encoding for name, encoding in ENCODINGS.items()},
    "use_dictionary": False,
    "write_statistics": False,
}
"""How columns are written."""


def parquet_writer(file: Publication, schema: pa.Schema) -> pq.ParquetWriter:
    """Return a writer of packs; `schema` is SCHEMA with the file's metadata."""
    return pq.ParquetWriter(cast("BinaryIO", file), schema, **PARQUET)


def padded(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Return the stored lengths, of the form multiple·k + 1, because the trainer sees one token less of each."""
    return -(-(lengths - 1) // multiple) * multiple + 1


MEASURED = ["input_ids", "loss_mask", "seq_start_id", "role_start", "role"]


@dataclass(frozen=True, slots=True)
class PackFacts:
    """Contents of some packs: `tokens` without `padding`, of which `loss_tokens` are trained on; the longest sequence and the
    shortest pack in stored tokens; the largest number of sequences in a pack.
    """

    sequences: int
    packs: int
    tokens: int
    padding: int
    loss_tokens: int
    longest: int
    most_sequences: int
    shortest_pack: int

    @classmethod
    def of(cls, recorded: Mapping[str, Any]) -> Self:
        """Return the facts of a part in a receipt, which may hold more."""
        return cls(**{field.name: recorded[field.name] for field in fields(cls)})

    @classmethod
    def total(cls, facts: Sequence[Self]) -> Self:
        columns = {field.name: [getattr(each, field.name) for each in facts] for field in fields(cls)}
        combine = {"longest": max, "most_sequences": max, "shortest_pack": min}
        return cls(**{name: combine.get(name, sum)(values) for name, values in columns.items()})


def leading_packs(place: str, tokens: int) -> PackFacts | None:
    """Return the facts of the leading packs in a file that are closest to `tokens`, or None for zero packs.

    Raises RunError if the file is damaged.
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
    """Return the facts of the leading packs in a batch that are closest to `tokens`, if any, and whether it is the whole batch."""
    stored = np.diff(batch["input_ids"].offsets.to_numpy())
    sequences, first_sequence = _runs(batch["seq_start_id"], stored)
    runs, first_run = _runs(batch["role_start"], stored)
    padding = np.add.reduceat(np.where(batch["role"].flatten().to_numpy() == PADDING, runs, 0), first_run[:-1])
    # Padding doesn't count as tokens, or padded packs would be fewer than the weight asks for.
    ends = np.concatenate([[0], np.cumsum(stored - padding)])
    packs = int(np.abs(ends - tokens).argmin())
    if packs == 0:
        return [], False
    facts = PackFacts(
        sequences=int(first_sequence[packs]),
        packs=packs,
        tokens=int(ends[packs]),
        padding=int(padding[:packs].sum()),
        loss_tokens=int(batch["loss_mask"].slice(0, packs).flatten().to_numpy().sum()),
        longest=int(sequences[: first_sequence[packs]].max()),
        most_sequences=int(np.diff(first_sequence)[:packs].max()),
        shortest_pack=int(stored[:packs].min()),
    )
    return [facts], packs == len(stored)


def _runs(starts: pa.ListArray, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lengths of the runs that begin at `starts` in packs of `stored` tokens, and the offsets of each pack's runs."""
    offsets = starts.offsets.to_numpy() - starts.offsets[0].as_py()
    begins = starts.flatten().to_numpy()
    ends = np.append(begins[1:], 0)
    ends[offsets[1:] - 1] = stored  # the last run of a pack ends with it
    return ends - begins, offsets


def write_leading(source: str, target: str, packs: int) -> Output:
    """Write the leading packs of a file: the same rows, schema, metadata and row groups. Raises RunError for a damaged file."""
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
    """The rows of a file, one row group at a time; otherwise Arrow's buffers would grow with the file."""
    for group in range(file.num_row_groups):
        yield from file.iter_batches(MAX_ROWS, row_groups=[group], columns=columns, use_threads=False)


@contextmanager
def _opened(place: str) -> Generator[pq.ParquetFile]:
    with open_binary(place) as stream:
        try:
            yield pq.ParquetFile(stream, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            # The caller retries errors of the storage; damage is final.
            if not is_decoder_error(error):
                raise
            raise RunError(
                f"{place}: cannot be read: {' '.join(str(error).split())}; remove the folder of this shard and run the same command again"
            ) from error
