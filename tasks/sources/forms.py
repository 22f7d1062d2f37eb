"""What a user names instead of a blend, and what rows hold instead of what a preparation reads.

A file of rows is taken as a blend of that one data set. Conversations given to a preparation of documents, or documents to
one of conversations, are refused before anything is built, with the command to use. For that the first rows of each data set
are read if the file is local; others are left to the check of bad rows.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Literal

from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import is_local

from .files import Record, Slice
from .formats import describe, read_records, without_ending

Form = Literal["documents", "conversations"]

COMMANDS: Mapping[Form, str] = {
    "documents": "tokenmill pretrain or tokenmill dedup",
    "conversations": "tokenmill sft or tokenmill harmony",
}
"""The commands that prepare rows of a form."""

TURNS = ("messages", "conversations")
"""The lists that conversations are in."""

QUESTIONS = frozenset({"prompt", "input", "question", "problem", "instruction", "query"})
"""Fields of a conversation without a list."""

FIRST_BATCHES = 2
"""Batches of about a mebibyte whose rows are looked at."""

BLENDS = ".json"
"""The ending of blends, which files of rows may have too."""


def read_blend(blend: Blend | Mapping[str, Any] | str) -> Blend:
    """The blend, as `load_blend` reads it; a file of rows, such as `a.jsonl`, is a blend of that data set."""
    if not isinstance(blend, str) or blend.endswith(BLENDS) or describe(blend) is None:
        return load_blend(blend)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", without_ending(blend.rpartition("/")[2])).strip("-._")
    return load_blend({"datasets": [{"name": name[:100] or "rows", "path": blend}]})


def require_form(source: DataSource, form: Form | None, part: Slice) -> None:
    """Raises InputError if the first rows of a slice of a local data set all have the other form."""
    if form is None or not is_local(part.file.uri):
        return
    first = islice(read_records(part, []), FIRST_BATCHES)
    found = form_of([record for batch in first for record in batch.records], source)
    if found is not None and found != form:
        needed = f"field {source.text_field!r}" if form == "documents" else f"list of messages ({', '.join(TURNS)})"
        raise InputError(
            f"data set {source.name!r}: {part.file.uri} holds {found}, without a {needed}; prepare it with "
            f"{COMMANDS[found]}, or name another field in the blend"
        )


def form_of(records: Sequence[Record], source: DataSource) -> Form | None:
    """The form that all rows have; None if they differ, or have another."""
    forms: set[Form | None] = {_form(record, source) for record in records}
    return forms.pop() if len(forms) == 1 else None


def _form(record: Record, source: DataSource) -> Form | None:
    """The form of a row; one that can be read in both ways has none, and so has one with fields of other forms."""
    text: Any = record
    for key in source.text_field.split("."):
        text = text.get(key) if isinstance(text, dict) else None
    turns = any(isinstance(record.get(name), list) for name in (*TURNS, source.messages_field or TURNS[0]))
    if isinstance(text, str) == turns or not QUESTIONS.isdisjoint(record):
        return None
    return "conversations" if turns else "documents"
