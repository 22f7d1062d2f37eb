"""Build an RL shard: JSON Lines, a document map, quarantined rows and a receipt from a slice of rows.

If the transforms return the parsed object itself, the row is written as the bytes that were read; any other row is written as
compact JSON, and numbers keep their spelling. So unchanged rows keep key order, duplicate keys and escapes. (Only a byte order
mark is removed, and line breaks within a row become blanks.) A row costs 1 to 4 µs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import orjson
import pyarrow as pa
import zstandard
from tokenmill.tasks.chat.json_values import quoted
from tokenmill.tasks.shards.build import ShardBuilder, building
from tokenmill.tasks.shards.holdout import PARTS, parts_of
from tokenmill.tasks.shards.manifest import WHOLE
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.publish import Publication
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.exact_json import compact, repeated_key
from tokenmill.tasks.sources.files import BadRow, BytesBatch, RecordBatch, Rejected
from tokenmill.tasks.sources.formats import read_objects
from tokenmill.tasks.sources.json_rows import BYTE_ORDER_MARK, excerpt, excerpt_of
from tokenmill.tasks.tokenize.document_map import FILE as MAP
from tokenmill.tasks.tokenize.document_map import RowOutcomes
from tokenmill.tasks.tokenize.encoders import Encoder
from xxhash import xxh3_64_intdigest

from .rows import Record, Target, Transform, accept
from .settings import Compression, RlRecipe

ENDINGS: dict[Compression, str] = {"none": "jsonl", "zstd": "jsonl.zst"}


@dataclass(frozen=True, slots=True)
class RowLengths:
    """Counts the tokens of the texts that the target reads, without those that a chat template adds (about ten per message).
    NeMo-RL truncates a row longer than the context to a few tokens without loss, so such rows are dropped here.
    """

    texts: Callable[[Record], Sequence[str]]
    encoder: Encoder
    most: int

    def of(self, records: Sequence[Record]) -> np.ndarray:
        """Tokens per record, int64."""
        texts = [list(self.texts(record)) for record in records]
        owners = np.repeat(np.arange(len(texts)), [len(of_row) for of_row in texts])
        encoded = self.encoder.encode(pa.array([text for of_row in texts for text in of_row], pa.large_string()))
        return np.bincount(owners, encoded.lengths, len(texts)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Work:
    """Transforms, target and token counter of a data set; `lengths` is None if no tokens are counted."""

    transforms: Sequence[Transform]
    target: Target
    lengths: RowLengths | None = None

    def done(self, record: Record) -> Record | Rejected:
        """Transform and check a record."""
        for transform in self.transforms:
            found = transform(record)
            if isinstance(found, Rejected):
                return found
            record = found
        return self.target.check(record) or record

    @property
    def reads_rows(self) -> bool:
        """Whether it matters to anything what a row holds."""
        return bool(self.transforms or self.lengths or self.target.form) or self.target.check is not accept


@dataclass(slots=True)
class _Part:
    """A file of JSON Lines, plain or as one zstd frame with a checksum, and the forms of its rows.

    Concatenated frames are a valid file, so compressed shards can be joined without decompression.
    """

    file: Publication
    frame: "zstandard.ZstdCompressionObj | None"
    forms: set[str] = field(default_factory=set[str])

    def write(self, rows: Sequence[bytes]) -> None:
        data = b"\n".join([*rows, b""])
        self.file.write(data if self.frame is None else self.frame.compress(data))


Row = tuple[Record, bytes]
"""A record and its written bytes."""


def write_shard(shard: PlannedShard, recipe: RlRecipe, work: Work, store: Store, on_bad_row: OnBadRow) -> Receipt:
    """Build an RL shard.

    Raises BadRowError for a bad row if the policy is `fail`, RunError if the source changed since the plan, OSError from
    the storage.
    """

    def read(batch: RecordBatch, index: int) -> Row | BadRow:
        found = work.done(batch.records[index])
        line = _line(batch.records[index], found, batch.raw[index] if batch.raw else None)
        if isinstance(line, Rejected):
            return _bad_row(batch, index, line)
        return cast("Record", found), line

    with building(shard, store, on_bad_row) as builder:
        writer = _Writer(builder, recipe, work)
        unread = None if work.reads_rows else read_objects(shard.part)
        if unread is None:
            for batch, rows in builder.records((), read):
                writer.write(batch, rows)
        else:
            for batch in unread:
                builder.count(batch)
                writer.pass_on(batch)
        for part in writer.parts.values():
            if part.frame is not None:
                part.file.write(part.frame.flush())
        builder.open(MAP).write(writer.outcomes.dump(builder.rows_in))
        forms = {name: sorted(part.forms) for name, part in writer.parts.items() if part.forms}
        builder.facts = {"untouched": writer.untouched, "forms": forms}
    return builder.receipt


@dataclass(slots=True)
class _Writer:
    """Writes rows to the parts of a shard; `untouched` counts those written as they were read."""

    builder: ShardBuilder
    recipe: RlRecipe
    work: Work
    parts: dict[str, _Part] = field(default_factory=dict[str, _Part])
    outcomes: RowOutcomes = field(default_factory=RowOutcomes)
    untouched: int = 0

    def write(self, batch: RecordBatch, rows: Mapping[int, Row]) -> None:
        """Write the rows of a batch, by index, that are not too long."""
        indices, tokens = np.fromiter(rows, np.int64, len(rows)), np.zeros(len(rows), np.int64)
        if self.work.lengths is not None and rows:
            tokens = self.work.lengths.of([record for record, _ in rows.values()])
            kept = np.flatnonzero(tokens <= self.work.lengths.most)
            self.builder.drop("oversize", len(tokens) - len(kept))
            indices, tokens = indices[kept], tokens[kept]
        self.untouched += sum(rows[index][0] is batch.records[index] for index in indices.tolist())
        for name, chosen in _by_part(indices, batch, self.recipe):
            found = [rows[index] for index in indices[chosen].tolist()]
            part = self._part(name)
            part.write([line for _, line in found])
            self.outcomes.keep(name, batch.rows[indices[chosen]])
            self.builder.keep(name, len(found), int(tokens[chosen].sum()))
            if self.work.target.form:
                part.forms.update(self.work.target.form(record) for record, _ in found)

    def pass_on(self, batch: BytesBatch) -> None:
        """Write all rows of a batch as they were read."""
        self.untouched += len(batch.raw)
        together = b"\n".join(batch.raw)
        clean = together.count(b"\n") < len(batch.raw) and b"\r" not in together and BYTE_ORDER_MARK not in together
        lines = batch.raw if clean else [_as_read(raw) for raw in batch.raw]
        for name, chosen in _by_part(np.arange(len(batch.raw)), batch, self.recipe):
            self._part(name).write([lines[index] for index in chosen.tolist()])
            self.outcomes.keep(name, batch.rows[chosen])
            self.builder.keep(name, len(chosen))

    def _part(self, name: str) -> _Part:
        if name not in self.parts:
            file = self.builder.open(f"{name}.{ENDINGS[self.recipe.compression]}")
            zstd = self.recipe.compression == "zstd"
            frame = zstandard.ZstdCompressor(write_checksum=True).compressobj() if zstd else None
            self.parts[name] = _Part(file, frame)
        return self.parts[name]


def _line(record: Record, found: Record | Rejected, raw: bytes | None) -> bytes | Rejected:
    """The bytes of a row: `raw`, its own, if it has any and `found` is the same object as `record`."""
    if isinstance(found, Rejected):
        return found
    if raw is not None and found is record:
        return _as_read(raw)
    try:
        line = _written(found)
    except (TypeError, RecursionError) as error:  # values that only Parquet has, such as bytes; deep nesting
        return Rejected("not_json", f"the row holds a value that cannot be written as JSON: {error}; leave it out")
    if raw is None and isinstance(line, bytes) and b"null" in line and not _finite(found):
        return Rejected("not_json", "the row holds NaN or an infinity, which JSON cannot say; leave it out")
    return line


def _written(record: Record) -> bytes | Rejected:
    """A changed row as compact JSON."""
    try:
        return orjson.dumps(record, option=orjson.OPT_PASSTHROUGH_SUBCLASS)
    except TypeError:
        key = repeated_key(record)
        if key is not None:
            why = f"the row is rewritten, and the key {quoted(key)} stands twice in one of its objects"
            return Rejected("repeated_key", f"{why}; keep one, or leave the field out with select")
        return compact(record)


def _finite(record: Record) -> bool:
    """Whether all numbers are finite; orjson writes null for others."""
    try:
        json.dumps(record, allow_nan=False, default=str)
    except ValueError:
        return False
    return True


def _as_read(raw: bytes) -> bytes:
    """A row without byte order mark and line breaks, which can only be white space between values; a final carriage
    return stays.
    """
    raw = raw.removeprefix(BYTE_ORDER_MARK)
    if b"\n" not in raw and b"\r" not in raw:
        return raw
    line = raw.replace(b"\n", b" ").replace(b"\r", b" ")
    return line[:-1] + b"\r" if raw.endswith(b"\r") else line


def _bad_row(batch: RecordBatch, index: int, why: Rejected) -> BadRow:
    beginning = excerpt(batch.raw[index]) if batch.raw else excerpt_of(batch.records[index])
    return BadRow(int(batch.rows[index]), why.reason, why.detail, beginning)


def _by_part(indices: np.ndarray, batch: RecordBatch | BytesBatch, recipe: RlRecipe) -> list[tuple[str, np.ndarray]]:
    """The parts that are not empty, each with the positions of its rows in `indices`."""
    if recipe.valid_from is not None:
        numbers = batch.rows[indices] >= recipe.valid_from
    elif recipe.holdout_seed is not None:
        digests = _digests(batch, indices.tolist(), recipe.holdout_seed)
        numbers = parts_of(np.asarray(digests, np.uint64), recipe.holdout_valid, recipe.holdout_test)
    else:
        return [(WHOLE, np.arange(len(indices)))] if indices.size else []
    found = [(name, np.flatnonzero(numbers == number)) for number, name in enumerate(PARTS)]
    return [(name, chosen) for name, chosen in found if chosen.size]


def _digests(batch: RecordBatch | BytesBatch, indices: Sequence[int], seed: int) -> list[int]:
    """A hash of each row as it was read, 64 bits, so that no transform and no other row moves it to another split."""
    if isinstance(batch, RecordBatch) and not batch.raw:
        return [xxh3_64_intdigest(repr(batch.records[index]).encode(), seed) for index in indices]
    raw = batch.raw
    return [xxh3_64_intdigest(raw[index].removeprefix(BYTE_ORDER_MARK).strip(), seed) for index in indices]
