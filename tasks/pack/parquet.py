"""Packed Parquet: one row a pack, in the columns that Megatron-Bridge reads, and beside them where everything came from.

    input_ids     list<int32>  the sequences of the pack, back to back
    loss_mask     list<int8>   1 at i: token i + 1 of the same sequence is trained on; 0 at the last token of each
    seq_start_id  list<int32>  where each sequence begins; the first is 0, the end is not stored
    document      list<int64>  per sequence: the row, from 0, in the slice of the source that the shard is made of
    role_start    list<int32>  where the author of the tokens changes
    role          list<int8>   who it is from there on, a number in `tasks.chat.encoding.ROLES`

The first three are those of `GPTSFTPackedParquetDataset` (Megatron-Bridge 0.6.2), which ignores the others. Its reader
keeps one row group in memory, so these are small. The schema's metadata says under `tokenmill` how the file was made.
Tokens hardly compress as a dictionary; split by bytes and with zstd they take 40 % of their size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.chat.encoding import ROLE_NUMBERS
from tokenmill.tasks.shards.publish import Publication

from .algorithms import Packs
from .settings import SftRecipe
from .spool import Spooled

MOST_ROWS = 500
MOST_TOKENS = 8_000_000
"""Per row group, which writer and reader hold in memory."""

FORMAT = "packed-sft"
PADDING = ROLE_NUMBERS["padding"]

SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.int8())),
        pa.field("seq_start_id", pa.list_(pa.int32())),
        pa.field("document", pa.list_(pa.int64())),
        pa.field("role_start", pa.list_(pa.int32())),
        pa.field("role", pa.list_(pa.int8())),
    ]
)


@dataclass(frozen=True, slots=True)
class PackWriter:
    """Writes packs of spooled sequences. `pad_id` fills a sequence up to a multiple of the recipe's plus one."""

    spooled: Spooled
    packs: Packs
    recipe: SftRecipe

    def write(self, file: Publication, metadata: dict[str, Any]) -> dict[str, int]:
        """Write all packs, and return the facts of the file."""
        schema = SCHEMA.with_metadata({"tokenmill": orjson.dumps(metadata)})
        with parquet_writer(file, schema) as writer:
            rows, packs = max(1, min(MOST_ROWS, MOST_TOKENS // self.recipe.pack_size)), len(self.packs.offsets) - 1
            for first in range(0, packs, rows):
                writer.write_table(self._table(first, min(first + rows, packs), schema), row_group_size=rows)
        return self._facts()

    def _table(self, first: int, stop: int, schema: pa.Schema) -> pa.Table:
        """Packs `[first, stop)` as one row group."""
        borders = self.packs.offsets[first : stop + 1]
        order = self.packs.sequences[borders[0] : borders[-1]]
        sequences = borders - borders[0]
        stored = padded(self.spooled.lengths[order], self.recipe.pad_seq_to_mult)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(stored)])
        tokens = ends[sequences]
        starts = ends[:-1] - np.repeat(tokens[:-1], np.diff(sequences))
        role_counts, role_starts, roles = self._roles(order, starts, stored)
        runs = np.concatenate([np.zeros(1, np.int64), np.cumsum(role_counts)])[sequences]
        pad = np.full(self.recipe.pad_seq_to_mult, self.recipe.pad_id or 0, np.int32)
        columns = [
            _lists(tokens, self._gathered(self.spooled.ids, order, stored, pad)),
            _lists(tokens, self._gathered(self.spooled.loss, order, stored, np.zeros(len(pad), np.int8))),
            _lists(sequences, starts.astype(np.int32)),
            _lists(sequences, self.spooled.documents[order]),
            _lists(runs, role_starts.astype(np.int32)),
            _lists(runs, roles),
        ]
        return pa.Table.from_arrays(columns, schema=schema)

    def _gathered(self, values: np.ndarray, order: np.ndarray, stored: np.ndarray, pad: np.ndarray) -> np.ndarray:
        """The values of some sequences, each filled up to its stored length, back to back."""
        return np.concatenate([np.empty(0, values.dtype), *self._slices(values, order, stored, pad)])

    def _slices(
        self, values: np.ndarray, order: np.ndarray, stored: np.ndarray, pad: np.ndarray
    ) -> Iterator[np.ndarray]:
        starts, stops = self.spooled.offsets[order].tolist(), self.spooled.offsets[order + 1].tolist()
        for start, stop, size in zip(starts, stops, stored.tolist(), strict=True):
            yield values[start:stop]
            if size > stop - start:
                yield pad[: size - (stop - start)]

    def _roles(
        self, order: np.ndarray, starts: np.ndarray, stored: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Role runs of some sequences, with one more for the padding of each that has any: counts, starts, roles."""
        lengths = self.spooled.lengths[order]
        counts = self.spooled.runs[order + 1] - self.spooled.runs[order]
        is_padded = stored > lengths
        total = counts + is_padded
        ends = np.cumsum(total)
        is_run = np.ones(int(total.sum()), np.bool_)
        is_run[ends[is_padded] - 1] = False
        source = np.repeat(self.spooled.runs[order] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        role_starts = np.empty(len(is_run), np.int64)
        role_starts[is_run] = np.repeat(starts, counts) + self.spooled.role_starts[source]
        role_starts[~is_run] = (starts + lengths)[is_padded]
        roles = np.full(len(is_run), PADDING, np.int8)
        roles[is_run] = self.spooled.roles[source]
        return total, role_starts, roles

    def _facts(self) -> dict[str, int]:
        stored = padded(self.spooled.lengths, self.recipe.pad_seq_to_mult)
        counts = np.diff(self.packs.offsets)
        filled = np.add.reduceat(stored[self.packs.sequences], self.packs.offsets[:-1])
        tokens = int(self.spooled.lengths.sum())
        return {
            "sequences": len(stored),
            "packs": len(counts),
            "tokens": tokens,
            "padding": int(stored.sum()) - tokens,
            "loss_tokens": int(np.count_nonzero(self.spooled.loss)),
            "longest": int(stored.max()),
            "most_sequences": int(counts.max()),
            "shortest_pack": int(filled.min()),
        }


ENCODINGS = {
    "input_ids": "BYTE_STREAM_SPLIT", "loss_mask": "PLAIN", "seq_start_id": "DELTA_BINARY_PACKED",
    "document": "DELTA_BINARY_PACKED", "role_start": "DELTA_BINARY_PACKED", "role": "PLAIN",
}  # fmt: skip


def parquet_writer(file: Publication, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer of packs: `schema` is SCHEMA with metadata of the file's own."""
    return pq.ParquetWriter(
        cast("BinaryIO", file), schema, compression="zstd", compression_level=1, use_dictionary=False,
        write_statistics=False, column_encoding={f"{name}.list.element": ENCODINGS[name] for name in ENCODINGS},
    )  # fmt: skip


def padded(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """The stored lengths: the next of the form multiple·k + 1, because the trainer sees one token less of each."""
    return -(-(lengths - 1) // multiple) * multiple + 1


def _lists(offsets: np.ndarray, values: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))
