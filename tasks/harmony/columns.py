"""The columns of normalized rows, in their order, and one row of them.

The first 30 are the columns of Harmony data sets that exist, with their names and types, so that what reads those
reads these. Those after them say more: counts of tokens, why a row is invalid, what it is a duplicate of, and where it
stood. Every column may be null.

`id` is the text's, so that equal texts have equal ids wherever they come from; `row_id` is the row's own. Rows with
one `prompt_id` ask the same.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import pyarrow as pa

from .grammar import ParsedMessage
from .message import HarmonyMessage
from .metadata import domain_of, effort_of
from .quality import Quality
from .turns import TEMPLATE_VERSION

STRING, INTEGER, NUMBER, FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()
COUNT = pa.int32()

LOSS_MODE = "assistant_all"
"""What is trained on: every message by the assistant."""

FIRST = pa.schema([
    ("id", STRING),
    ("dataset", STRING),
    ("split", STRING),
    ("text", STRING),
    ("loss_mode", STRING),
    ("quality_valid_harmony", FLAG),
    ("quality_completion_nonempty", FLAG),
    ("quality_has_tool", FLAG),
    ("quality_valid_tool_schema", FLAG),
    ("stats_char_len", INTEGER),
    ("meta_domain", STRING),
    ("meta_difficulty_bin", STRING),
    ("source_uuid", STRING),
    ("source_license", STRING),
    ("source_used_in", pa.list_(STRING)),
    ("source_data_source", STRING),
    ("source_changed_answer_to_majority", FLAG),
    ("source_capability_target", STRING),
    ("source_reasoning", STRING),
    ("source_tools_id", STRING),
    ("source_tools_count", INTEGER),
    ("meta_correctness", NUMBER),
    ("meta_eval_best_setting", STRING),
    ("meta_pass_k", INTEGER),
    ("meta_correct_count", INTEGER),
    ("meta_correctness_low", NUMBER),
    ("meta_correctness_medium", NUMBER),
    ("meta_correctness_high", NUMBER),
    ("meta_correctness_high_with_tool", NUMBER),
    ("meta_correctness_high_no_tool", NUMBER),
])  # fmt: skip
"""The columns that every Harmony data set has. `stats_char_len` counts characters, not bytes."""

MORE = pa.schema([
    ("stats_token_len", COUNT),
    ("stats_completion_tokens", COUNT),
    ("num_messages", COUNT),
    ("num_tool_calls", COUNT),
    ("quality_error_code", STRING),
    ("quality_is_duplicate", FLAG),
    ("dup_of", STRING),
    ("prompt_id", STRING),
    ("template_version", STRING),
    ("messages_json", STRING),
    ("source_row", INTEGER),
    ("source_file", STRING),
    ("row_id", STRING),
    ("quality_error_offset", INTEGER),
    ("quality_completion_ends_with_return", FLAG),
    ("num_tool_results", COUNT),
    ("meta_effort", STRING),
    ("meta_difficulty", STRING),
    ("meta_correctness_own", NUMBER),
    ("meta_eval_json", STRING),
    ("meta_expected_answer", STRING),
    ("meta_parallel_calls", COUNT),
    ("meta_renamed_tools", STRING),
    ("meta_escaped_strings", COUNT),
    ("meta_dropped_thoughts", COUNT),
    ("meta_dropped_trailing", COUNT),
    ("dedup_outcome", STRING),
    ("dup_jaccard", NUMBER),
    ("untrained_messages", pa.list_(COUNT)),
])  # fmt: skip
"""The columns after them. `stats_completion_tokens` counts the messages by the assistant, headers and ends included.
`dup_of` is the `row_id` of the row that stayed in this one's stead when duplicates were looked for; should that be
contaminated or beyond the cap, its own `dedup_outcome` says so. `untrained_messages` are the numbers, from 0, of messages
by the assistant that the source keeps from being trained on."""

SCHEMA = pa.schema([*FIRST, *MORE])

JUDGED = [each.name for each in fields(Quality) if each.name in SCHEMA.names]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stood in its source; `row` counts from 0, `blend_split` is None where a blend has none."""

    dataset: str
    split: str
    file: str
    row: int
    blend_split: str | None = None


def row(
    place: Place,
    text: str,
    messages: Sequence[ParsedMessage],
    quality: Quality,
    facts: Mapping[str, Any],
    *,
    structured: bool = False,
) -> dict[str, Any]:
    """A row: a value for every column of SCHEMA.

    `messages` are those that the text was parsed as, none if it could not be. `facts` are the columns that the
    composition knows; raises KeyError for one that is no column. With `structured`, the messages are also written as
    JSON. What is null here and not in `facts`, deduplication fills in.
    """
    if unknown := facts.keys() - set(SCHEMA.names):
        raise KeyError(f"no columns: {', '.join(sorted(unknown))}; SCHEMA has none of that name")
    judged = {name: getattr(quality, name) for name in JUDGED}
    return dict.fromkeys(SCHEMA.names) | judged | dict(facts) | {
        "id": sha1(text),
        "dataset": place.dataset,
        "split": place.split,
        "text": text,
        "loss_mode": LOSS_MODE,
        "stats_char_len": len(text),
        "meta_domain": domain_of(place.dataset),
        "meta_difficulty_bin": effort_of(place.split),
        "prompt_id": sha1(text[: _prompt_end(text, messages)]),
        "template_version": TEMPLATE_VERSION,
        "messages_json": _json(messages) if structured else None,
        "source_row": place.row,
        "source_file": place.file,
        "row_id": sha1(json.dumps([*_place(place), TEMPLATE_VERSION])),
    }  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table with SCHEMA."""
    return pa.Table.from_pylist(list(rows), SCHEMA)


def sha1(text: str) -> str:
    """The SHA-1 of a text in UTF-8, 40 hexadecimal digits: a name, not a seal."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _place(place: Place) -> list[str | int]:
    """What tells a row from all others."""
    within = [place.dataset, place.file, place.row]
    return within if place.blend_split is None else [place.blend_split, *within]


def _prompt_end(text: str, messages: Sequence[ParsedMessage]) -> int:
    """Where the first message by the assistant begins."""
    return next((message.start for message in messages if message.author == "assistant"), len(text))


def _json(messages: Sequence[ParsedMessage]) -> str:
    """The messages as JSON, without their places and what they do not have."""
    return json.dumps([_fields(message.message) for message in messages], ensure_ascii=False)


def _fields(message: HarmonyMessage) -> dict[str, Any]:
    given = asdict(message)
    del given["trained"]
    if message.content_type is None:
        del given["constrained"]
    return {key: value for key, value in given.items() if value is not None}
