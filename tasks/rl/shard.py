"""Build an RL shard: JSON Lines, the fates of rows, quarantined rows and a receipt from a slice of rows.

If the transforms return the parsed object itself, the row is written as the bytes that were read; any other row is written as
compact JSON. So unchanged rows keep key order, numbers as they are spelled, duplicate keys and escapes. (Only a byte order mark is
removed, and line breaks within a row become blanks.) A row costs 1 to 4 µs.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, cast

import numpy as np
import orjson
import pyarrow as pa
import zstandard
from tokenmill.tasks.chat.json_values import quoted
from tokenmill.tasks.shards.build import ShardBuilder, building
from tokenmill.tasks.shards.plan import PARTS, WHOLE, PlannedShard, parts_of
from tokenmill.tasks.shards.publish import Publication
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.sources.exact_json import compact, repeated_key
from tokenmill.tasks.sources.files import BadRow, BytesBatch, RecordBatch, Rejected
from tokenmill.tasks.sources.formats import read_objects, read_records
from tokenmill.tasks.sources.json_lines import split_lines
from tokenmill.tasks.sources.json_rows import BYTE_ORDER_MARK, excerpt, excerpt_of
from tokenmill.tasks.sources.opening import BLOCK_BYTES
from tokenmill.tasks.storage import filesystem
from tokenmill.tasks.tokenize.encoders import Encoder
from xxhash import xxh3_64_intdigest

from .rows import Record, RowTarget, Transform, accept
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
    """Transforms, target and token counter of a dataset; `lengths` is None if no tokens are counted."""

    transforms: Sequence[Transform]
    target: RowTarget
    lengths: RowLengths | None = None

    def done(self, records: Sequence[Record]) -> list[Record | Rejected]:
        """Transform and check records."""
        found: list[Record | Rejected] = [*records]
        for transform in self.transforms:
            found = [each if type(each) is Rejected else transform(cast("Record", each)) for each in found]
        check = self.target.check
        return [each if type(each) is Rejected else check(cast("Record", each)) or each for each in found]

    @property
    def reads_rows(self) -> bool:
        """Whether any transform or check needs the parsed row."""
        return bool(self.transforms or self.lengths or self.target.form) or self.target.check is not accept


@dataclass(slots=True)
class _PartFile:
    """A file of JSON Lines, plain or as one zstd frame with a checksum, and the forms of its rows.

    Concatenated frames are a valid file, so compressed shards can be joined without decompression.
    """

    file: Publication
    frame: "zstandard.ZstdCompressionObj | None"
    forms: set[str] = field(default_factory=set[str])

    def write(self, rows: Sequence[bytes]) -> None:
        data = b"\n".join([*rows, b""])
        self.file.write(data if self.frame is None else self.frame.compress(data))


def write_shard(shard: PlannedShard, recipe: RlRecipe, work: Work, store: Store, on_bad_row: OnBadRow) -> Receipt:
    """Build an RL shard.

    Raises BadRowError for a bad row if the policy is `fail`, RunError if the source changed since the plan, OSError from
    the storage.
    """
    with building(shard, store, on_bad_row) as builder:
        writer = _RowWriter(builder, recipe, work)
        # Rows that nothing looks into aren't parsed; formats without a text per row give records all the same.
        unread = None if work.reads_rows else read_objects(shard.part)
        if unread is None:
            for batch in read_records(shard.part, ()):
                writer.write(batch)
        else:
            for batch in unread:
                writer.pass_on(batch)
        for part in writer.parts.values():
            if part.frame is not None:
                part.file.write(part.frame.flush())  # the end of the frame, with its checksum
        builder.write_fates()
        forms = {name: sorted(part.forms) for name, part in writer.parts.items() if part.forms}
        builder.facts = {"untouched": writer.untouched, "forms": forms}
    return builder.receipt


@dataclass(slots=True)
class _RowWriter:
    """Writes rows to the parts of a shard; `untouched` counts those written as they were read."""

    builder: ShardBuilder
    recipe: RlRecipe
    work: Work
    parts: dict[str, _PartFile] = field(default_factory=dict[str, _PartFile])
    untouched: int = 0

    def write(self, batch: RecordBatch) -> None:
        """Count the rows of a batch, and write those that are good and not too long."""
        found = self.work.done(batch.records)
        # A row that no transform changed is written as it was read. Records without bytes come from Parquet, which may hold NaN.
        raws = batch.raw or [None] * len(found)
        lines = [
            _as_read(raw) if raw is not None and each is record else _line(each, finite=raw is not None)
            for each, record, raw in zip(found, batch.records, raws, strict=True)
        ]
        rejected = {index: line for index, line in enumerate(lines) if isinstance(line, Rejected)}
        begins = {
            index: excerpt(batch.raw[index]) if batch.raw else excerpt_of(batch.records[index]) for index in rejected
        }
        self.builder.count(
            batch,
            [BadRow(int(batch.rows[index]), why.reason, why.detail, begins[index]) for index, why in rejected.items()],
        )
        # From here on by index: rows that are kept share arrays with the batch.
        indices = np.delete(np.arange(len(lines)), [*rejected])
        tokens = np.zeros(len(lines), np.int64)
        if self.work.lengths is not None and indices.size:
            tokens[indices] = self.work.lengths.of([cast("Record", found[index]) for index in indices.tolist()])
            fits = tokens[indices] <= self.work.lengths.most
            self.builder.drop("oversize", batch.rows[indices[~fits]])
            indices = indices[fits]
        self.untouched += sum([found[index] is batch.records[index] for index in indices.tolist()])
        for index in indices.tolist():
            self.builder.unread.update(self.work.target.unread(cast("Record", found[index])))
        for name, chosen in _by_part(indices, batch, self.recipe):
            self._keep(name, batch, chosen, cast("list[bytes]", lines), int(tokens[chosen].sum()))
            if self.work.target.form:
                records = [cast("Record", found[index]) for index in chosen.tolist()]
                self._part(name).forms.update(map(self.work.target.form, records))

    def pass_on(self, batch: BytesBatch) -> None:
        """Count the rows of a batch, and write them as they were read."""
        self.builder.count(batch)
        self.untouched += len(batch.raw)
        lines = batch.raw if batch.lines else [_as_read(raw) for raw in batch.raw]
        for name, chosen in _by_part(np.arange(len(lines)), batch, self.recipe):
            self._keep(name, batch, chosen, lines, 0)

    def _keep(
        self, name: str, batch: RecordBatch | BytesBatch, chosen: np.ndarray, lines: Sequence[bytes], tokens: int
    ) -> None:
        """Write the chosen rows, by index, to a part."""
        self._part(name).write([lines[index] for index in chosen.tolist()])
        self.builder.keep(name, batch.rows[chosen], tokens)

    def _part(self, name: str) -> _PartFile:
        if name not in self.parts:
            file = self.builder.open(f"{name}.{ENDINGS[self.recipe.compression]}")
            zstd = self.recipe.compression == "zstd"
            frame = zstandard.ZstdCompressor(write_checksum=True).compressobj() if zstd else None
            self.parts[name] = _PartFile(file, frame)
        return self.parts[name]


def _line(found: Record | Rejected, *, finite: bool) -> bytes | Rejected:
    """Return the bytes of a row that is written; `finite` means that it is without NaN and infinity, which aren't valid JSON."""
    if isinstance(found, Rejected):
        return found
    try:
        line = _written(found)
    except (TypeError, ValueError, RecursionError) as error:  # values that only Parquet has; deep nesting
        return Rejected("not_json", f"the row holds a value that cannot be written as JSON: {error}; remove it")
    # orjson writes NaN and infinity as null. Only a row with null is searched for them, by the slower encoder that finds them.
    if not finite and isinstance(line, bytes) and b"null" in line:
        try:
            json.dumps(found, allow_nan=False, default=str)
        except ValueError:
            return Rejected(
                "not_json", "the row contains NaN or an infinity, which isn't valid JSON; drop or replace the value"
            )
    return line


def _written(record: Record) -> bytes | Rejected:
    """A changed row as compact JSON."""
    try:
        return orjson.dumps(record, option=orjson.OPT_PASSTHROUGH_SUBCLASS)
    except TypeError:
        # An object with a repeated key, which is kept as a subclass of dict, or an integer that orjson can't write.
        if (key := repeated_key(record)) is not None:
            why = f"the row is rewritten, and the key {quoted(key)} appears twice in one of its objects"
            return Rejected("repeated_key", f"{why}; keep one, or leave the field out with select")
        return compact(record)


def _as_read(raw: bytes) -> bytes:
    """A row without byte order mark and line breaks, which can only be white space between values; a final carriage
    return remains.
    """
    raw = raw.removeprefix(BYTE_ORDER_MARK)
    if b"\n" not in raw and b"\r" not in raw:
        return raw
    line = raw.replace(b"\n", b" ").replace(b"\r", b" ")
    return line[:-1] + b"\r" if raw.endswith(b"\r") else line


def _by_part(indices: np.ndarray, batch: RecordBatch | BytesBatch, recipe: RlRecipe) -> list[tuple[str, np.ndarray]]:
    """The parts that are not empty, each with the indices of its rows."""
    if recipe.valid_from is not None:
        numbers = batch.rows[indices] >= recipe.valid_from
    elif recipe.holdout_seed is not None:
        # By the row as it was read, so that transforms and other rows don't move it to a different split.
        if isinstance(batch, RecordBatch) and not batch.raw:
            rows = [repr(batch.records[index]).encode() for index in indices.tolist()]
        else:
            rows = [batch.raw[index].removeprefix(BYTE_ORDER_MARK).strip() for index in indices.tolist()]
        digests = [xxh3_64_intdigest(row, recipe.holdout_seed) for row in rows]
        numbers = parts_of(np.asarray(digests, np.uint64), recipe.holdout_valid, recipe.holdout_test)
    else:
        return [(WHOLE, indices)] if indices.size else []
    found = [(name, indices[numbers == number]) for number, name in enumerate(PARTS)]
    return [(name, chosen) for name, chosen in found if chosen.size]


def inspect_rl_shard(store: Store, receipt: Receipt) -> list[str]:
    """Problems of the files in a shard: lines that are not JSON objects, and counts that differ from the receipt."""
    compression = receipt.identity["recipe"]["compression"]
    problems: list[str] = []
    for part, count in receipt.parts.items():
        place = store.path(receipt.key, f"{part}.{ENDINGS[compression]}")
        try:
            problems += [f"{place}: {problem}" for problem in _file(place, compression, count.documents)]
        except (pa.ArrowException, OSError) as error:
            problems.append(f"{place}: cannot be read: {error}")
    return problems


def _file(place: str, compression: str, documents: int) -> list[str]:
    system, path = filesystem(place)
    found = 0
    with cast("BinaryIO", system.open(path, "rb")) as stream:
        content = stream if compression == "none" else pa.CompressedInputStream(stream, compression)
        for rows in split_lines(iter(lambda: content.read(BLOCK_BYTES), b"")):
            for row in rows:
                found += 1
                if not isinstance(row, bytes) or not _is_object(row):
                    return [f"line {found:,} is not a JSON object"]
    return [] if found == documents else [f"holds {found:,} lines, but its receipt records {documents:,}"]


def _is_object(row: bytes) -> bool:
    try:
        return isinstance(orjson.loads(row), dict)
    except orjson.JSONDecodeError:
        return False
