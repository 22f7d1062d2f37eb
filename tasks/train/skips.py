"""What a training leaves out, for example after a spike of the loss, without moving any other sample.

    {"step": 120}
    {"data": "xxh3_128:…", "source": 0, "document": 17, "sequence": null, "row": "/data/a.jsonl:5"}

One JSON object per line. A step that is left out reads its samples, so that what is read stays as planned, but updates no
weight; the learning rate of later steps is that without the list. A document that is left out is not trained on: its tokens
stay inputs, so that its neighbours stay where they are, but not labels.
"""

from collections.abc import Iterable, Sequence

import orjson
from pydantic import Field
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute
from tokenmill.tasks.strict import Strict, parse


class SkippedStep(Strict, frozen=True):
    """A step that updates nothing, counted from 1."""

    step: int = Field(ge=1)


class SkippedDocument(Strict, frozen=True):
    """A document that is not trained on, in the data whose content is `data`.

    `source` numbers the prefixes of the train split, in order, and `document` counts in the prefix. For packs, `source` is 0,
    `document` numbers all packs of the split, and `sequence`, None for documents, counts in the pack. `row` names the source row for people.
    """

    data: str
    source: int = Field(ge=0)
    document: int = Field(ge=0)
    sequence: int | None = Field(default=None, ge=0)
    row: str = ""


Skipped = SkippedStep | SkippedDocument


def read_skip_list(place: str) -> list[Skipped]:
    """The entries of a list. Raises InputError for a missing file or a line that is no entry."""
    content = read_bytes(absolute(place))
    if content is None:
        raise InputError(
            f"skip_list: {place} does not exist; write one with: tokenmill batch MODEL --skip-list {place}"
        )
    return [_entry(line, f"{place}:{number}") for number, line in enumerate(content.splitlines(), 1) if line.strip()]


def _entry(line: bytes, where: str) -> Skipped:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InputError(f'{where}: {error}; write one JSON object per line, such as {{"step": 120}}') from error
    return parse(SkippedStep if isinstance(fields, dict) and "step" in fields else SkippedDocument, fields, where)


def extend_skip_list(place: str, entries: Iterable[Skipped]) -> int:
    """Add entries that a list does not have yet, and create it if needed; returns how many it has then."""
    content = read_bytes(absolute(place))
    known = read_skip_list(place) if content else []
    entries = [*known, *(entry for entry in dict.fromkeys(entries) if entry not in known)]
    publish_bytes(absolute(place), b"".join(orjson.dumps(entry.model_dump()) + b"\n" for entry in entries))
    return len(entries)


def check_skipped(skipped: Sequence[Skipped], data: str, steps: int) -> None:
    """Raises InputError for a document of other data than `data`, and for a step after the last of `steps`."""
    late = next((step for step in skipped_steps(skipped) if step > steps), None)
    if late is not None:
        raise InputError(f"skip_list: step {late:,} is listed, but this training has {steps:,}; remove the line")
    other = next((each for each in skipped if isinstance(each, SkippedDocument) and each.data != data), None)
    if other is not None:
        raise InputError(
            f"skip_list: {other.row or 'a document'} was listed for data of content {other.data}, but this training reads "
            f"{data}; list it again with tokenmill batch"
        )


def skipped_steps(skipped: Iterable[Skipped]) -> frozenset[int]:
    """The steps that are left out."""
    return frozenset(each.step for each in skipped if isinstance(each, SkippedStep))
