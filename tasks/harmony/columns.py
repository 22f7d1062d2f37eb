"""Columns of normalized rows, in their order, and the metadata of a source's records.

The first 30 columns have the names and types of existing Harmony datasets, so that their readers work here too. Every column
may be null. `id` identifies the text: equal texts have equal ids. `row_id` identifies the row. Rows with the same prompt share
a `prompt_id`.

Names and types differ between sources: a list may hold values other than strings, an object may be given as JSON text, and most
fields are missing somewhere. Metadata of the wrong type is null, never an error. In Nemotron-Math-v2, a teacher answered every
problem eight times at low, medium and high effort, with and without a tool; the rates are its pass rates. `meta_correctness` is
the best of these rates, `meta_correctness_own` the rate for the row's own effort and tools. `meta_difficulty` is derived from
the latter.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, TypeVar, cast

import pyarrow as pa
from tokenmill.tasks.sources.exact_json import compact, loads

from .message import TEMPLATE_VERSION, Effort, HarmonyMessage
from .semantics import JUDGED, ValidText

STRING, INTEGER, NUMBER, FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()
COUNT = pa.int32()

LOSS_MODE = "assistant_all"  # every message by the assistant is trained on

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
"""The columns that every Harmony dataset has. `stats_char_len` counts characters, not bytes."""

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
"""Further columns. `stats_completion_tokens` counts the assistant's messages, headers and ends included. `dup_of` is the
`row_id` of the row kept instead. If that row is dropped too, as contaminated or beyond the cap, see its `dedup_outcome`.
`untrained_messages` are the numbers, from 0, of assistant messages that the source excludes from training."""

SCHEMA = pa.schema([*FIRST, *MORE])
COLUMNS = frozenset(SCHEMA.names)
EMPTY = dict.fromkeys(SCHEMA.names)

DOMAINS = (
    ("proofs", "proof"),
    ("science", "science"),
    ("agentic", "agentic"),
    ("instruction-following", "chat_if"),
    ("math", "math"),
)
"""Part of a dataset's name, and its domain; the first match applies."""

EFFORTS: tuple[Effort, ...] = ("low", "medium", "high")

EASY, HARD = 0.75, 0.25  # the lowest pass rate of easy problems, and the highest of hard ones

Value = TypeVar("Value")
Block = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """A row's source; `row` counts from 0, `blend_split` is None for a flat blend."""

    dataset: str
    split: str
    file: str
    row: int
    blend_split: str | None = None


def row(
    place: Place, found: ValidText, facts: Mapping[str, Any], messages: Sequence[HarmonyMessage] | None = None
) -> dict[str, Any]:
    """Return a value for every column of SCHEMA.

    `facts` are columns from the composition; raises KeyError for an unknown one. `messages`, if given, are also written as
    JSON. Deduplication fills in its own columns.
    """
    if not facts.keys() <= COLUMNS:
        # A fact without a column would be lost without a word.
        unknown = ", ".join(sorted(facts.keys() - COLUMNS))
        raise KeyError(f"not in SCHEMA: {unknown}; add the column, or remove the fact")
    # One digest for both ids: of the prompt first, then of the whole text.
    text, digest = found.text, hashlib.sha1(found.text[: found.prompt].encode(), usedforsecurity=False)
    prompt_id = digest.hexdigest()
    digest.update(text[found.prompt :].encode())
    written: list[dict[str, Any]] = []
    for message in messages or ():
        given = asdict(message)
        # `constrained` is about a content type; `trained` has a column of its own.
        absent = {"trained"} if message.content_type is not None else {"trained", "constrained"}
        written.append({key: value for key, value in given.items() if value is not None and key not in absent})
    # The same row may be in several splits of a blend.
    identity = [*([] if place.blend_split is None else [place.blend_split]), place.dataset, place.file, place.row]
    name = place.dataset.lower()
    return {
        **EMPTY,
        **{name: getattr(found.quality, name) for name in JUDGED},
        **facts,
        "id": digest.hexdigest(),
        "dataset": place.dataset,
        "split": place.split,
        "text": text,
        "loss_mode": LOSS_MODE,
        "stats_char_len": len(text),
        "meta_domain": next((domain for part, domain in DOMAINS if part in name), None),
        "meta_difficulty_bin": effort_of(place.split),
        "prompt_id": prompt_id,
        "template_version": TEMPLATE_VERSION,
        "messages_json": None if messages is None else json.dumps(written, ensure_ascii=False),
        "source_row": place.row,
        "source_file": place.file,
        "row_id": sha1(json.dumps([*identity, TEMPLATE_VERSION])),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """One or more rows as a table with SCHEMA."""
    arrays: list[pa.Array] = []
    for values, kind in zip(zip(*map(itemgetter(*SCHEMA.names), rows), strict=True), SCHEMA.types, strict=True):
        first = values[0]
        # Most columns hold one value, often null, and are made without looking at each. Equal floats may differ (0.0 and -0.0).
        if isinstance(first, float | list) or values.count(first) != len(values):
            arrays.append(pa.array(values, kind))
        elif first is None:
            arrays.append(pa.nulls(len(values), kind))
        else:
            arrays.append(pa.repeat(pa.scalar(first, kind), len(values)))
    return pa.table(arrays, SCHEMA)


def sha1(text: str) -> str:
    """Return the SHA-1 of a text in UTF-8, in hexadecimal; an identifier, not a protection."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def effort_of(split: str) -> Effort | None:
    """Return the effort in the name of a split."""
    return next((effort for effort in EFFORTS if split.startswith(effort)), None)


KEPT = frozenset({"capability_target", "expected_answer", "changed_answer_to_majority", "data_source"})
"""Fields beside a conversation that become columns."""


def of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Columns that any source may have."""
    used = record.get("used_in")
    are_names = isinstance(used, list) and all(isinstance(name, str) for name in cast("list[object]", used))
    return {
        "source_uuid": _if(str, record.get("uuid")),
        "source_license": _if(str, record.get("license")),
        "source_used_in": [*map(str, cast("list[str]", used))] if are_names else None,
        "source_data_source": _if(str, record.get("data_source")) or _if(str, record.get("source")),
        "source_changed_answer_to_majority": _if(bool, record.get("changed_answer_to_majority")),
        "source_capability_target": _if(str, record.get("capability_target")),
        "source_reasoning": _if(str, record.get("reasoning")),
        "meta_expected_answer": _if(str, record.get("expected_answer")),
    }


def of_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of tools, and the id of their list in the catalog, if there are any."""
    if not tools:
        return {"source_tools_id": None, "source_tools_count": 0}
    text = compact(list(tools), sort_keys=True)
    return {
        "source_tools_id": hashlib.sha1(text, usedforsecurity=False).hexdigest(), "source_tools_count": len(tools)
    }  # fmt: skip


def of_evaluation(record: Mapping[str, Any], effort: Effort | None, *, tools: bool) -> dict[str, Any]:
    """Columns from `metadata`: pass rates per effort, with and without a tool. `effort` and `tools` are the row's own."""
    value: object = record.get("metadata")
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError:  # as if it weren't there
            value = None
    given = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
    rates: dict[str, float] = {}
    for name, block in given.items():
        rate: object = (
            cast("Block", block).get("accuracy") if isinstance(block, Mapping) else None
        )  # Parquet adds null blocks
        if _count(rate) is not None or (isinstance(rate, float) and math.isfinite(rate)):
            rates[name] = float(cast("float", rate))
    best = max(rates, key=rates.__getitem__, default=None)
    own = rates.get(f"reason_{effort}_{'with_tool' if tools else 'no_tool'}")
    hardness = None if own is None else "easy" if own >= EASY else "hard" if own <= HARD else "medium"
    try:
        whole = compact(given).decode() if given else None
    except TypeError:  # values that Parquet has and JSON lacks
        whole = None
    of_effort = {each: [rate for name, rate in rates.items() if name.startswith(f"reason_{each}")] for each in EFFORTS}
    return {
        "meta_correctness": None if best is None else rates[best],
        "meta_eval_best_setting": best,
        "meta_pass_k": None if best is None else _count(given[best].get("count")),
        "meta_correct_count": None if best is None else _count(given[best].get("pass")),
        **{f"meta_correctness_{each}": max(found, default=None) for each, found in of_effort.items()},
        "meta_correctness_high_with_tool": rates.get("reason_high_with_tool"),
        "meta_correctness_high_no_tool": rates.get("reason_high_no_tool"),
        "meta_correctness_own": own,
        "meta_difficulty": hardness,
        "meta_eval_json": whole,
    }


def _if(wanted: type[Value], value: object) -> Value | None:
    """The value if it has exactly that type: a boolean is not a number."""
    return value if type(value) is wanted else None


def _count(value: object) -> int | None:
    """The value if it is an integer of 64 bits."""
    # Parquet has no larger ones, and an overflow would fail a whole row group.
    found = _if(int, value)
    return found if found is not None and -(1 << 63) <= found < 1 << 63 else None
