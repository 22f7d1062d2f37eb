"""Inputs that a user names instead of a blend, and rows of a form that a preparation doesn't read.

A file of rows is taken as a blend of that one dataset. Conversations given to a preparation of documents, or documents to
one of conversations, are rejected before building, with the command to use. For that the first rows of each dataset
are read if the file is local; others are left to the check of bad rows.
"""

import re
from collections.abc import Mapping, Sequence
from glob import has_magic
from itertools import islice
from json import JSONDecoder
from typing import Any, Literal, cast

from tokenmill.tasks.blend.load import from_page, load_blend
from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.errors import InputError, closest
from tokenmill.tasks.storage import absolute, filesystem, is_local
from tokenmill.tasks.strict import parse

from .files import Record, Slice, field_path
from .formats import describe, read_records, without_ending
from .json_rows import BYTE_ORDER_MARK
from .opening import SourceCorrupt
from .row_filter import value_at

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

BLENDS = ".json"
"""The ending of blends, which data files may have too."""

HUB_NAME = re.compile(r"hf://(?:datasets/)?(?:[^/@]+/)?([^/@]+)")
"""The repository of a dataset of the hub, without its organization."""

HEAD_BYTES = 1 << 20
"""Bytes of a file in which its first row most likely ends."""

BLEND_KEY = re.compile(r'\A\{\s*"(?:_[^"]*|datasets|train|valid|test)"')


def read_blend(blend: Blend | Mapping[str, Any] | str) -> Blend:
    """The blend, as `load_blend` reads it; a file of rows, such as `a.jsonl`, or a dataset of the hub is a blend of it."""
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
    """Whether a place is a file of rows or a dataset of the hub, not a blend; only a `.json` file is opened."""
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
    return isinstance(first, list) or text[end:].lstrip().startswith("{") or _is_row(first)


def _is_row(content: object) -> bool:
    """Whether the only object in a file is a row; a blend may have misspelled keys."""
    if not isinstance(content, dict):
        return False
    keys = cast("dict[str, object]", content)
    if not QUESTIONS.union(TURNS, ("text",)).isdisjoint(keys):
        return True
    return bool(keys) and not any(key.startswith("_") or closest(key, Blend.model_fields) for key in keys)


def with_keys(blend: Blend, named: object, keys: Mapping[str, Any]) -> Blend:
    """The blend of a file of rows or of rows from Python, with these keys of its dataset.

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
    """Raises InputError if the first rows of a slice of a local dataset all have the other form, unless fields are named."""
    named = form == "conversations" and (source.messages_field or source.named_fields)
    if form is None or named or not is_local(part.file.uri):
        return
    found = form_of(first_records(part), source)
    if found is not None and found != form:
        needed = f"field {source.text_field!r}" if form == "documents" else f"list of messages ({', '.join(TURNS)})"
        raise InputError(
            f"dataset {source.name!r}: {part.file.uri} holds {found}, without a {needed}; prepare it with "
            f"{COMMANDS[found]} (to plan it: --kind {COMMANDS[found].split()[1]}), or name a different field in the blend"
        )


def first_records(part: Slice) -> list[Record]:
    """The records of the first batches of a slice; none if a column holds other bytes than text, which the kind's own reader counts."""
    try:
        return [record for batch in islice(read_records(part, []), FIRST_BATCHES) for record in batch.records]
    except SourceCorrupt:
        return []


def form_of(records: Sequence[Record], source: DataSource) -> Form | None:
    """Return the form that all rows have; None if they differ, or have a different one."""
    forms: set[Form | None] = {_form(record, source) for record in records}
    return forms.pop() if len(forms) == 1 else None


def _form(record: Record, source: DataSource) -> Form | None:
    """The form of a row; one that can be read in both ways has none, and so has one with fields of other forms."""
    text = value_at(record, field_path(source.text_field))
    if isinstance(text, str) and text.startswith(HARMONY_TEXT):
        return None
    turns = any(isinstance(record.get(name), list) for name in TURNS)
    if isinstance(text, str) == turns or not QUESTIONS.isdisjoint(record):
        return None
    return "conversations" if turns else "documents"
