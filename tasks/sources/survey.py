"""A look at a dataset before it is prepared: the share that its filter keeps, and whether rows have the fields that it names.

Up to eight slices, evenly spread, are looked at, of each the first batch (about a mebibyte; Parquet: four). Row groups that the
statistics exclude are counted by the footer. It is an estimate: in a file sorted by score, the first rows aren't a sample of the others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.blend.predicates import where_of
from tokenmill.tasks.errors import InputError, closest

from .files import Record, Row, Slice, field_path
from .formats import format_of
from .json_rows import pick_records
from .parquet import Parquet, column_batches, require_any
from .parquet_batches import decoded_bytes, taken
from .row_filter import filter_of, value_at

MAX_SLICES = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """The rows that were looked at, and the estimated shares of rows and of bytes of a dataset that are kept."""

    rows: int
    kept_rows: float
    kept_bytes: float


@dataclass(frozen=True, slots=True)
class _Look:
    """The first batch of a slice: rows and bytes, those that are kept, and the share of the slice in row groups that are read."""

    rows: int
    size: int
    kept_rows: int
    kept_size: int
    read: float = 1.0


def spread(slices: Sequence[Slice]) -> list[Slice]:
    """The slices to look at."""
    places = np.linspace(0, len(slices) - 1, min(len(slices), MAX_SLICES)).round().astype(int).tolist()
    return [slices[place] for place in dict.fromkeys(places)]


def survey(source: DataSource, slices: Sequence[Slice]) -> Sample:
    """Look at a dataset with a filter; `slices` are some of it.

    Raises InputError if no row of JSON has a field that the filter names, or none can be judged.
    """
    records: list[Record] = []
    problems: list[str] = []
    looks = [look for part in slices for look in _looks(replace(part, content=""), records, problems)]
    if records:
        keys = {key for part in slices for key in part.keys}
        _require_fields(source, [name for name in filter_of(slices[0]).fields if name not in keys], records)
    if records and len(problems) == len(records):
        raise InputError(f"dataset {source.name!r}: {problems[0]}")
    rows, size = (max(1, sum(getattr(look, name) for look in looks)) for name in ("rows", "size"))
    read = sum(look.read > 0 for look in looks) / max(1, len(looks))  # the others count as slices of the same size
    return Sample(
        rows=sum(look.rows for look in looks),
        kept_rows=read * sum(look.kept_rows * look.read for look in looks) / rows,
        kept_bytes=read * sum(look.kept_size * look.read for look in looks) / size,
    )


def _looks(part: Slice, records: list[Record], problems: list[str]) -> Iterator[_Look]:
    """Return the first batch of a slice, if it has rows; add JSON records to `records`, and reasons for unjudged ones to `problems`."""
    source_format = format_of(part.file)
    if isinstance(source_format, Parquet):
        batches = column_batches(part, part.fields, require_any)
        batch = next((each for each in batches if not isinstance(each, range)), None)
        if batch is None:
            yield _Look(0, 0, 0, 0, 0.0)
            return
        kept = taken(batch, np.flatnonzero(filter_of(part).of_batch(batch)))
        yield _Look(len(batch), decoded_bytes(batch), len(kept), decoded_bytes(kept), source_format.share_read(part))
        return
    for rows in cast("Iterator[list[Row]]", source_format.rows(part)):
        found = pick_records(rows, 0)
        records += found.records
        kept, why = filter_of(part).of_records(found.records)
        problems += why.values()
        sizes = np.fromiter(map(len, found.raw), np.int64, len(found.raw))
        yield _Look(len(sizes), int(sizes.sum()), int(kept.sum()), int(sizes[kept].sum()))
        return


def _require_fields(source: DataSource, fields: Sequence[str], records: Sequence[Record]) -> None:
    optional = where_of(source.where).optional if source.where else frozenset[tuple[str, ...]]()
    for field in fields:
        *above, name = field_path(field)
        objects = (value_at(record, above) for record in records)
        if (*above, name) not in optional and not any(isinstance(each, dict) and name in each for each in objects):
            near = closest(field, {name for record in records for name in record})
            remedy = f"did you mean {near!r}?" if near else f"rows have {', '.join(sorted(records[0])) or 'no fields'}"
            rare = f"; if only few rows have it, write `{field} is null or …`" if source.where else ""
            raise InputError(
                f"dataset {source.name!r}: none of the first {len(records):,} rows has the field {field!r}, which its filter "
                f"names; {remedy}{rare}"
            )
