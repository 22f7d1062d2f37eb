"""Parquet files of every shape that two writers make, through whole preparations.

Arrow and DuckDB write text as strings, views, bytes and dictionaries, alone or in structs that may be null, with nulls
and bytes that are not UTF-8, beside columns of any other type: in both kinds of pages, in row groups and pages of any
size, with every compression and encoding. The files are cut into slices of random size.

The rows are known before they are written: the published tokens spell exactly the texts, in order, and the quarantine
names exactly the other rows. Read as records, the rows have all their values.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.formats import read_records
from tokenmill.tasks.sources.slices import cut

from bench.torture.conservation import Verdict, assert_conserved
from bench.torture.processes import each

COUNT = 500

TEXT_TYPES = (
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view(), pa.binary_view()),
    *(pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int16(), pa.large_string())),
    *(pa.dictionary(pa.int32(), pa.binary()), pa.dictionary(pa.int64(), pa.large_binary())),
)
VIEWS = (pa.string_view(), pa.binary_view())
"""Arrow does not write these in several row groups or batches."""

NOT_UTF8 = (b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"ok \xe2\x82", b"\x80 ok", b"\xf5\x80\x80\x80")
WORDS = ("a", "the", "é", "漢字", "😀", "\x00", "\n", '"\\', "\u2028", " ", "word", "\ufeff", "\U0010ffff", "long" * 50)

OTHER_TYPES = (
    *(pa.int8(), pa.uint64(), pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.binary(), pa.null()),
    *(pa.decimal128(30, 4), pa.date32(), pa.time64("us"), pa.timestamp("us", "UTC"), pa.timestamp("ms"), pa.binary(3)),
    *(pa.list_(pa.string()), pa.large_list(pa.int64()), pa.map_(pa.string(), pa.int32()), pa.list_(pa.int16(), 2)),
    *(
        pa.struct({"x": pa.string(), "y": pa.list_(pa.struct({"z": pa.int64()}))}),
        pa.dictionary(pa.int8(), pa.string()),
    ),
)
COMPRESSIONS = ("none", "snappy", "gzip", "zstd", "lz4", "brotli")
ENCODINGS = ("PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY")
PATHS = ("text", "text", "content.text", "a.b.text")
ROWS = (1, 2, 63, 65, 600)
ROW_GROUPS = (1, 7, 64, 5_000)
SHARD_SIZES = (1, 1_000, 20_000, 1 << 30)


def run(count: int, seed: int) -> str:
    """Prepare `count` files. Raises AssertionError with the seed of the first wrong one."""
    rows = list(each(prepare_file, [f"{seed}-{number}" for number in range(count)]))
    return f"{len(rows):,} files of {sum(rows):,} rows: each row is a document or has its reason"


def prepare_file(seed: str) -> int:
    """Prepare the file of a seed, and read it as records; how many rows it has."""
    source = random.Random(seed)
    write = source.choice([_write_by_arrow, _write_by_arrow, _write_by_duckdb])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        field = source.choice(PATHS)
        try:
            rows, verdicts = write(source, path, field, source.choice(ROWS))
            assert_conserved(path, verdicts, field, source.choice(SHARD_SIZES))
            assert _records(path, source.choice(SHARD_SIZES), [name for name in rows if name != "text"]) == _by_row(
                rows
            )
        except Exception as error:
            raise AssertionError(f"the Parquet file of seed {seed!r}") from error
    return len(verdicts)


Columns = Mapping[str, Sequence[Any]]
"""The values of columns, as Python has them."""


def _write_by_arrow(source: random.Random, path: Path, field: str, count: int) -> tuple[Columns, list[Verdict]]:
    kind = source.choice(TEXT_TYPES)
    texts = [_text(source, spoiled=True) for _ in range(count)]
    others = {f"column {number}": _column(source, count) for number in range(source.randint(1, 4))}
    wrapped, verdicts = _wrapped(source, field, _text_array(texts, kind), [*map(_verdict, texts)])
    names = [field.split(".", maxsplit=1)[0], *others]
    source.shuffle(names)
    table = pa.table({name: others.get(name, wrapped) for name in names})
    pq.write_table(table, path, **_arrow_options(source, kind, field))
    return {name: column.to_pylist(maps_as_pydicts="lossy") for name, column in others.items()}, verdicts


def _arrow_options(source: random.Random, kind: pa.DataType, field: str) -> dict[str, Any]:
    dictionary = source.random() < 0.5 or pa.types.is_dictionary(kind)
    return {
        "row_group_size": ROW_GROUPS[-1] if kind in VIEWS else source.choice(ROW_GROUPS),
        "version": source.choice(["1.0", "2.4", "2.6"]),
        "data_page_version": source.choice(["1.0", "2.0"]),
        "data_page_size": source.choice([10, 1_000, None]),
        "dictionary_pagesize_limit": source.choice([10, None]),
        "write_batch_size": None if kind in VIEWS else source.choice([1, 50, None]),
        "compression": source.choice(COMPRESSIONS),
        "use_dictionary": dictionary,
        "column_encoding": None if dictionary else {field: source.choice(ENCODINGS)},
        "write_statistics": False,  # Arrow has none for bytes that are not UTF-8
        "write_page_checksum": source.random() < 0.5,
        "write_page_index": source.random() < 0.3,
        "store_schema": source.random() < 0.7,
    }


def _write_by_duckdb(source: random.Random, path: Path, field: str, count: int) -> tuple[Columns, list[Verdict]]:
    texts = [_text(source, spoiled=False) for _ in range(count)]
    text = pa.array([text and text.decode() for text in texts], pa.string())
    wrapped, verdicts = _wrapped(source, field, text, [*map(_verdict, texts)])
    others = {
        "number": [source.getrandbits(40) for _ in texts],
        "listed": [[None, "é"] if text else [] for text in texts],
    }
    table = pa.table({field.split(".", maxsplit=1)[0]: wrapped, "number": others["number"], "listed": pa.array(others["listed"], pa.list_(pa.string()))})  # fmt: skip
    compression = source.choice(["uncompressed", "snappy", "gzip", "zstd", "lz4_raw", "brotli"])
    with duckdb.connect() as connection:
        connection.register("rows", table)
        connection.execute(
            f"COPY rows TO '{path}' (FORMAT parquet, COMPRESSION {compression}, ROW_GROUP_SIZE 2048, "
            f"PARQUET_VERSION {source.choice(['v1', 'v2'])}, STRING_DICTIONARY_PAGE_SIZE_LIMIT {source.choice([1, 10**6])})"
        )
    return others, verdicts


def _text(source: random.Random, *, spoiled: bool) -> bytes | None:
    draw = source.random()
    if draw < 0.1:
        return None
    if spoiled and draw < 0.15:
        return source.choice(NOT_UTF8)
    return "".join(source.choices(WORDS, k=source.choice([0, 1, 3, 30]))).encode()


def _verdict(text: bytes | None) -> Verdict:
    if text is None:
        return "null_text"
    try:
        return "text", text.decode()
    except UnicodeDecodeError:
        return "invalid_utf8"


def _text_array(texts: Sequence[bytes | None], kind: pa.DataType) -> pa.Array:
    """The texts as a column of that type, which nobody checks for being UTF-8."""
    if pa.types.is_dictionary(kind):
        known = list(dict.fromkeys(text for text in texts if text is not None))
        numbers = pa.array([None if text is None else known.index(text) for text in texts], kind.index_type)
        return pa.DictionaryArray.from_arrays(numbers, _text_array(known, kind.value_type))
    same = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    content = pa.array(texts, same.get(kind, kind))
    return content.view(kind) if kind in same else content


def _wrapped(
    source: random.Random, field: str, column: pa.Array, verdicts: list[Verdict]
) -> tuple[pa.Array, list[Verdict]]:
    """The column in the structs that lead to it, some of which are null."""
    for name in reversed(field.split(".")[1:]):
        null = np.array([source.random() < 0.05 for _ in verdicts], np.bool_)
        column = pa.StructArray.from_arrays([column], [name], mask=pa.array(null))
        verdicts = ["null_text" if gone else verdict for gone, verdict in zip(null, verdicts, strict=True)]
    return column, verdicts


def _column(source: random.Random, count: int) -> pa.Array:
    kind = source.choice(OTHER_TYPES)
    return pa.array([_value(source, kind) for _ in range(count)], kind)


def _value(source: random.Random, kind: pa.DataType) -> Any:
    """Null, or a value of that type."""
    if source.random() < 0.2 or pa.types.is_null(kind):
        return None
    make = next((make for is_kind, make in MAKERS.items() if is_kind(kind)), _of_number)
    return make(source, kind)


def _of_number(source: random.Random, kind: pa.DataType) -> Any:
    number = pa.scalar(source.randint(0, 100), pa.int64() if kind.bit_width == 64 else pa.int32())
    return number.cast(kind).as_py()


def _listed(source: random.Random, kind: pa.DataType) -> list[Any]:
    return [_value(source, kind.value_type) for _ in range(source.randint(0, 3))]


MAKERS: dict[Callable[[pa.DataType], bool], Callable[[random.Random, pa.DataType], Any]] = {
    pa.types.is_struct: lambda source, kind: {field.name: _value(source, field.type) for field in kind},
    pa.types.is_map: lambda source, kind: [
        (key, _value(source, kind.item_type)) for key in source.sample("abc", source.randint(0, 3))
    ],
    pa.types.is_fixed_size_list: lambda source, kind: [_value(source, kind.value_type) for _ in range(kind.list_size)],
    pa.types.is_list: _listed,
    pa.types.is_large_list: _listed,
    pa.types.is_dictionary: lambda source, _: source.choice("abc"),
    pa.types.is_fixed_size_binary: lambda source, kind: source.randbytes(kind.byte_width),
    pa.types.is_string: lambda source, _: source.choice(WORDS),
    pa.types.is_binary: lambda source, _: source.choice(NOT_UTF8),
}


def _records(path: Path, shard_size: int, fields: Sequence[str]) -> list[dict[str, Any]]:
    [file] = discover(DataSource(name="rows", path=str(path)))
    parts = cut(file, shard_size, fields)
    return [record for part in parts for batch in read_records(part, fields) for record in batch.records]


def _by_row(columns: Columns) -> list[dict[str, Any]]:
    """The values of each row, without those that are null."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [_without_nulls(row) for row in rows]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value
