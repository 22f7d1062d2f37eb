"""Preparations as Python functions: `from tokenmill import pretrain`."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import Parameter, Signature, signature
from itertools import chain, islice
from os import PathLike, fspath
from typing import Any, Protocol, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic.fields import FieldInfo
from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.kinds import KINDS, preparation
from tokenmill.tasks.shards.publish import publish
from tokenmill.tasks.sources.forms import with_keys
from tokenmill.tasks.storage import absolute
from tokenmill.tasks.strict import parse

from .direct import run_preparation
from .options import source_keys

ROW_GROUP_BYTES = 64 << 20
"""Bytes of a table that are in memory while it is written."""


def function_of(name: str) -> Callable[..., dict[str, Any]]:
    """Return the function that prepares a blend or rows from Python. Raises InputError and RunError as the command does."""

    def prepare_data(
        data: Blend | dict[str, Any] | str | PathLike[str] | Iterable[Mapping[str, Any]] | ArrowStream,
        output_dir: str | PathLike[str],
        **settings: object,
    ) -> dict[str, Any]:
        output_dir, named = fspath(output_dir), _text_of(data)
        settings = {name: _text_of(value) for name, value in settings.items()}
        kind = preparation(name)
        keys = {key: settings.pop(key) for key in source_keys(kind.settings, settings)}
        # A DatasetDict of `datasets` is a dict, too.
        if isinstance(named, (str, Blend, dict)) and not hasattr(named, "with_format"):
            blend = kind.read_blend(cast("Blend | Mapping[str, Any] | str", named))
        else:
            blend = kind.read_blend(blend_of_rows(named, output_dir))
        blend = with_keys(blend, cast("object", named), keys)
        return run_preparation(kind, blend, output_dir, parse(kind.settings, settings, "settings"))

    prepare_data.__name__, prepare_data.__doc__ = name, KINDS[name].summary
    own = [*signature(prepare_data).parameters.values()][:2]
    keywords = [
        Parameter(key, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
        for key, field in parameters(name).items()
    ]
    prepare_data.__signature__ = Signature(
        [*own, *keywords], return_annotation=dict[str, Any]
    )  # for help() and completion
    return prepare_data


def parameters(name: str) -> dict[str, FieldInfo]:
    """Return the settings of a kind, and after them the keys of a dataset, which apply to rows and tables."""
    kind = preparation(name)
    fields = {key: field for key, field in kind.settings.model_fields.items() if key not in kind.hidden}
    keys = source_keys(kind.settings, DataSource.model_fields)
    return fields | {key: DataSource.model_fields[key] for key in keys}


def _text_of(value: object) -> object:
    return fspath(value) if isinstance(value, PathLike) else value


ROWS_AT_ONCE = 1_000
"""Rows of a table of `datasets`."""


class ArrowStream(Protocol):
    """A table that other libraries can read: of pandas, polars, pyarrow, DuckDB, `datasets`."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """See https://arrow.apache.org/docs/format/CDataInterface/PyCapsuleInterface.html."""
        ...


def blend_of_rows(rows: object, output_dir: str) -> dict[str, Any]:
    """Return a blend of one dataset, `rows`, which are written beside the output folder: OUT.rows.jsonl, or .parquet for a table.

    Raises InputError for a row that is not a JSON object, and for a table that Parquet can't hold.
    """
    if hasattr(rows, "with_format"):
        rows = _of_datasets(rows)
    if hasattr(rows, "__arrow_c_stream__"):
        return _blend_of_table(rows, f"{absolute(output_dir)}.rows.parquet")
    if not isinstance(rows, Iterable):
        remedy = "collect() it" if hasattr(rows, "collect") else "give a blend, rows as dicts, or a table"
        raise InputError(f"data: {type(rows).__name__} doesn't contain rows; {remedy}")
    place = f"{absolute(output_dir)}.rows.jsonl"
    with publish(place) as file:
        for number, row in enumerate(cast("Iterable[object]", rows), 1):
            if not isinstance(row, Mapping):
                raise InputError(
                    f"row {number}: {type(row).__name__}, not a dict; give rows as dicts, such as {{'text': '…'}}"
                )
            try:
                line = orjson.dumps(dict(row), option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
                if b"null" in line:  # orjson writes NaN and infinities so, too
                    json.dumps(dict(row), allow_nan=False, default=_plain)
            except (TypeError, ValueError) as error:
                raise InputError(f"row {number}: {error}; rows must hold JSON values") from error
            file.write(line)
    return {"datasets": [{"name": "rows", "path": place}]}


def _of_datasets(rows: Any) -> pa.RecordBatchReader:  # noqa: ANN401 - `datasets` may not be installed
    """A `Dataset` or `IterableDataset` as a stream of tables, in any format. Raises InputError for several splits."""
    if isinstance(rows, Mapping):
        splits = [*cast("Mapping[str, object]", rows)]
        raise InputError(f"data: holds the splits {', '.join(splits)}; give one, such as data[{splits[0]!r}]")
    tables = cast("Iterator[pa.Table]", rows.with_format("arrow").iter(ROWS_AT_ONCE))
    first = next(tables, pa.table({}))
    batches = (batch for table in chain([first], tables) for batch in table.cast(first.schema).to_batches())
    return pa.RecordBatchReader.from_batches(first.schema, batches)


def _storable(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with categories of polars as dictionaries that Parquet can hold."""
    columns = [
        pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(pa.large_string()))
        if isinstance(column, pa.DictionaryArray) and pa.types.is_string_view(column.type.value_type)
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _blend_of_table(table: object, place: str) -> dict[str, Any]:
    try:
        reader = pa.RecordBatchReader.from_stream(table)
        batches = map(_storable, reader)
        first = [*islice(batches, 1)]
        schema = first[0].schema if first else reader.schema
        with publish(place) as file, pq.ParquetWriter(file, schema) as writer:
            held: list[pa.RecordBatch] = []
            for batch in chain(first, batches):
                held.append(batch)
                if sum(each.nbytes for each in held) >= ROW_GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(held))
                    held.clear()
            writer.write_table(pa.Table.from_batches(held, schema))
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"data: {type(table).__name__} can't be read as a table with a row for each text: {reason}"
        ) from error
    return {"datasets": [{"name": "rows", "path": place}]}


def _plain(value: Any) -> object:  # noqa: ANN401 - whatever orjson writes and json does not
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
