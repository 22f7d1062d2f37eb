"""Inputs that a user names instead of a blend, and rows of a form that a preparation doesn't read.

A file of rows is taken as a blend of that one dataset. Conversations given to a preparation of documents, or documents to
one of conversations, are rejected before building, with the command to use. For that the first rows of each dataset
are read if the file is local; others are left to the check of bad rows.

A dataset with a filter is surveyed: the share that is kept, and whether rows have the fields that the filter names. Up to eight slices,
evenly spread, are read, of each the first batch (about a mebibyte; Parquet: four). Row groups that the statistics exclude are counted
by the footer. It is an estimate: in a file sorted by score, the first rows aren't a sample of the others.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import has_magic
from itertools import islice
from json import JSONDecoder
from typing import Any, Literal, cast

import numpy as np
from tokenmill.tasks.blend.load import from_page, load_blend
from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.blend.predicates import where_of
from tokenmill.tasks.errors import InputError, closest
from tokenmill.tasks.storage import absolute, filesystem, is_local
from tokenmill.tasks.strict import parse

from .files import Record, Row, Slice, field_path
from .formats import describe, format_of, read_records, without_ending
from .json_rows import BYTE_ORDER_MARK, pick_records
from .opening import SourceCorrupt
from .parquet import Parquet, column_batches, require_any
from .parquet_batches import decoded_bytes, taken
from .row_filter import filter_of, value_at

Form = Literal["documents", "conversations"]

COMMANDS: Mapping[Form, str] = {
    "documents": "tokenmill pretrain or tokenmill dedup",
    "conversations": "tokenmill sft or tokenmill harmony",
}
"""The commands that prepare rows of a form."""

TURNS = ("messages", "conversations")
"""The lists that conversations are in."""

QUESTIONS = frozenset({"prompt", "input", "question", "problem", "instruction", "query", "input_ids", "prompt_ids"})
"""Fields of a conversation without a list of messages."""

FIRST_BATCHES = 2
"""Batches of about a mebibyte whose rows are looked at."""

MAX_SLICES = 8
"""Slices of a dataset that a survey reads."""

BLENDS = ".json"
"""The ending of blends, which data files may have too."""

HUB_NAME = re.compile(r"hf://(?:datasets/)?(?:[^/@]+/)?([^/@]+)")
"""The repository of a dataset of the hub, without its organization."""

HEAD_BYTES = 1 << 20
"""Bytes of a file in which its first row most likely ends."""

BLEND_KEY = re.compile(r'\A\{\s*"(?:_[^"]*|datasets|train|valid|test)"')


def read_blend(blend: Blend | Mapping[str, Any] | str) -> Blend:
    """Return the blend, as `load_blend` reads it; a file of rows, such as `a.jsonl`, or a dataset of the hub is a blend of it."""
    if not isinstance(blend, str) or not is_rows(blend):  # a blend is a file, too, and may end in .json as rows do
        return load_blend(blend)
    repository = None if describe(blend) else HUB_NAME.match(from_page(blend))
    name = (
        repository[1]
        if repository
        else re.sub(r"[^A-Za-z0-9._-]+", "-", without_ending(blend.rpartition("/")[2])).strip("-._")
    )
    return load_blend({"datasets": [{"name": name[:100] or "rows", "path": blend}]})


def is_rows(place: str) -> bool:
    """Return whether a place is a file of rows or a dataset of the hub, not a blend; only a `.json` file is opened."""
    if not place.endswith(BLENDS):
        return describe(place) is not None or from_page(place).startswith("hf://")
    system, path = filesystem(absolute(place))
    if has_magic(path) and not system.exists(path):
        return True
    if not system.isfile(path):
        return False
    with system.open(path, "rb") as file:
        head = cast("bytes", file.read(HEAD_BYTES))
    text = head.removeprefix(BYTE_ORDER_MARK).decode(errors="replace").lstrip()
    try:
        first, end = JSONDecoder().raw_decode(text)
    except ValueError:  # cut off, or not JSON
        return text.startswith("[") or (len(head) == HEAD_BYTES and not BLEND_KEY.search(text))
    if isinstance(first, list) or text[end:].lstrip().startswith("{"):
        return True
    keys = cast("dict[str, object]", first) if isinstance(first, dict) else {}
    is_known = not QUESTIONS.union(TURNS, ("text",)).isdisjoint(keys)
    # Another single object is a row, unless a key is nearly one of a blend's: that may be misspelled.
    return is_known or (bool(keys) and not any(key.startswith("_") or closest(key, Blend.model_fields) for key in keys))


def with_keys(blend: Blend, named: object, keys: Mapping[str, Any]) -> Blend:
    """Return the blend of a file of rows or of rows from Python, with these keys of its dataset.

    `named` is the source of the blend. Raises InputError if that is a blend.
    """
    if not keys:
        return blend
    if isinstance(named, Blend | Mapping) or (isinstance(named, str) and not is_rows(named)):
        where = named if isinstance(named, str) else "the blend"
        raise InputError(
            f"{next(iter(keys))}: is a key of a dataset, not a setting; write it into its entry in {where}"
        )
    (source,) = blend.training()
    return parse(Blend, {"datasets": [{**source.model_dump(exclude_unset=True), **keys}]}, "settings")


HARMONY_TEXT = "<|start|>"
"""How a text begins that is a conversation, for those who read it so."""


def require_form(source: DataSource, form: Form | None, part: Slice) -> None:
    """Raises InputError if the first rows of a slice in a local dataset all have the other form, unless fields are named."""
    named = form == "conversations" and (source.messages_field or source.named_fields)
    if form is None or named or not is_local(part.file.uri):  # first rows of other files cost a request each
        return
    forms: set[Form | None] = {_form(record, source) for record in first_records(part)}
    found = forms.pop() if len(forms) == 1 else None  # rows that differ are left to the check of bad rows
    if found is not None and found != form:
        needed = f"field {source.text_field!r}" if form == "documents" else f"list of messages ({', '.join(TURNS)})"
        raise InputError(
            f"dataset {source.name!r}: {part.file.uri} holds {found}, without a {needed}; prepare it with "
            f"{COMMANDS[found]} (to plan it: --kind {COMMANDS[found].split()[1]}), or name a different field in the blend"
        )


def first_records(part: Slice) -> list[Record]:
    """Return the records of the first batches of a slice; none if a column holds other bytes than text, which the kind's own reader counts."""
    try:
        return [record for batch in islice(read_records(part, []), FIRST_BATCHES) for record in batch.records]
    except SourceCorrupt:
        return []


def _form(record: Record, source: DataSource) -> Form | None:
    """The form of a row; one that can be read in both ways has none, and so has one with fields of other forms."""
    text = value_at(record, field_path(source.text_field))
    if isinstance(text, str) and text.startswith(HARMONY_TEXT):
        return None
    turns = any(isinstance(record.get(name), list) for name in TURNS)
    if isinstance(text, str) == turns or not QUESTIONS.isdisjoint(record):
        return None
    return "conversations" if turns else "documents"


@dataclass(frozen=True, slots=True)
class Sample:
    """The rows that were looked at, and the estimated shares of rows and of bytes in a dataset that are kept."""

    rows: int
    kept_rows: float
    kept_bytes: float


def spread(slices: Sequence[Slice]) -> list[Slice]:
    """Return the slices to look at."""
    places = np.linspace(0, len(slices) - 1, min(len(slices), MAX_SLICES)).round().astype(int).tolist()
    return [slices[place] for place in dict.fromkeys(places)]


def survey(source: DataSource, slices: Sequence[Slice]) -> Sample:
    """Look at a dataset with a filter; `slices` are some of it.

    Raises InputError if no row of JSON has a field that the filter names, or none can be judged.
    """
    records: list[Record] = []
    problems: list[str] = []
    # Of the first batch of each slice: rows, bytes, both of what is kept, and the share in row groups that are read.
    looks: list[tuple[float, ...]] = []
    for part in (replace(part, content="") for part in slices):  # nothing is hashed, as only the first batch is read
        source_format, chosen = format_of(part.file), filter_of(part)
        if isinstance(source_format, Parquet):
            batches = column_batches(part, part.fields, require_any)
            batch = next((each for each in batches if not isinstance(each, range)), None)
            if batch is None:  # no row group is read
                looks.append((0, 0, 0, 0, 0.0))
                continue
            kept = taken(batch, np.flatnonzero(chosen.of_batch(batch)))
            sizes = decoded_bytes(batch), len(kept), decoded_bytes(kept)
            looks.append((len(batch), *sizes, source_format.share_read(part)))
        elif (block := next(cast("Iterator[list[Row]]", source_format.rows(part)), None)) is not None:
            found = pick_records(block, 0)
            records += found.records
            mask, why = chosen.of_records(found.records)
            problems += why.values()
            lengths = np.fromiter(map(len, found.raw), np.int64, len(found.raw))
            looks.append((len(lengths), lengths.sum(), mask.sum(), lengths[mask].sum(), 1.0))
    if records:
        keys = {key for part in slices for key in part.keys}
        _require_fields(source, [name for name in filter_of(slices[0]).fields if name not in keys], records)
    if records and len(problems) == len(records):
        raise InputError(f"dataset {source.name!r}: {problems[0]}")
    rows, size, kept_rows, kept_size, share = np.array(looks or [[0.0] * 5]).T
    read = np.mean(share > 0)  # slices that aren't read count as of the same size
    return Sample(
        rows=int(rows.sum()),
        kept_rows=float(read * (kept_rows * share).sum() / max(1, rows.sum())),
        kept_bytes=float(read * (kept_size * share).sum() / max(1, size.sum())),
    )


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
