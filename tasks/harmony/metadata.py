"""Columns that say where a row comes from and how hard it is, as far as its record tells.

Sources have their own names and habits: a list may hold other things than strings, an object may be its JSON text, and
most fields are absent somewhere. What is not what it should be is null here, never an error: a row is not worth less
for an odd label.

Of Nemotron-Math-v2: low, medium and high are efforts at which a teacher was asked eight times each, with a tool and
without, and the rates are how often it solved the problem. `meta_correctness` is the best of these rates;
`meta_correctness_own` that of the row's own effort and tools, and `meta_difficulty` is judged by it.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import orjson
from tokenmill.tasks.sources.exact_json import compact, loads, with_placeholders

from .turns import Effort

DOMAINS = (
    ("proofs", "proof"),
    ("science", "science"),
    ("agentic", "agentic"),
    ("instruction-following", "chat_if"),
    ("math", "math"),
)
"""What a data set's name holds, and its domain; the first that fits."""

EFFORTS: tuple[Effort, ...] = ("low", "medium", "high")

EASY, HARD = 0.75, 0.25
"""Rates from which on a problem is easy, and up to which it is hard."""

Value = TypeVar("Value")
Block = Mapping[str, Any]


def domain_of(dataset: str) -> str | None:
    """The domain of a data set by its name, None where that does not tell."""
    name = dataset.lower()
    return next((domain for part, domain in DOMAINS if part in name), None)


def effort_of(split: str) -> Effort | None:
    """The effort that a split is named after."""
    return next((effort for effort in EFFORTS if split.startswith(effort)), None)


def of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that any source may have, under the names that sources use."""
    return {
        "source_uuid": _if(str, record.get("uuid")),
        "source_license": _if(str, record.get("license")),
        "source_used_in": _strings(record.get("used_in")),
        "source_data_source": _if(str, record.get("data_source")) or _if(str, record.get("source")),
        "source_changed_answer_to_majority": _if(bool, record.get("changed_answer_to_majority")),
        "source_capability_target": _if(str, record.get("capability_target")),
        "source_reasoning": _if(str, record.get("reasoning")),
        "meta_expected_answer": _if(str, record.get("expected_answer")),
    }


def of_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The id of a list of tools, by which a catalog holds it, and its length; no id for none."""
    if not tools:
        return {"source_tools_id": None, "source_tools_count": 0}
    plain, restored = with_placeholders(list(tools))
    text = restored(orjson.dumps(plain, option=orjson.OPT_SORT_KEYS).decode())
    return {
        "source_tools_id": hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(),
        "source_tools_count": len(tools),
    }


def of_evaluation(record: Mapping[str, Any], effort: Effort | None, *, tools: bool) -> dict[str, Any]:
    """What `metadata` says of the problem: rates per effort, with a tool and without. `effort` and `tools` are the
    row's own.
    """
    given = _object(record.get("metadata"))
    rates = {name: float(block["accuracy"]) for name, block in _blocks(given).items()}
    best = max(rates, key=rates.__getitem__, default=None)
    own = rates.get(f"reason_{effort}_{_with(tools=tools)}")
    return {
        "meta_correctness": None if best is None else rates[best],
        "meta_eval_best_setting": best,
        "meta_pass_k": None if best is None else _count(given[best].get("count")),
        "meta_correct_count": None if best is None else _count(given[best].get("pass")),
        **{f"meta_correctness_{each}": _best(rates, f"reason_{each}") for each in EFFORTS},
        "meta_correctness_high_with_tool": rates.get("reason_high_with_tool"),
        "meta_correctness_high_no_tool": rates.get("reason_high_no_tool"),
        "meta_correctness_own": own,
        "meta_difficulty": None if own is None else _difficulty(own),
        "meta_eval_json": _json(given) if given else None,
    }


def _json(given: Mapping[str, Any]) -> str | None:
    try:
        return compact(given).decode()
    except TypeError:  # what Parquet holds and JSON does not
        return None


def _difficulty(rate: float) -> str:
    if rate >= EASY:
        return "easy"
    return "hard" if rate <= HARD else "medium"


def _with(*, tools: bool) -> str:
    return "with_tool" if tools else "no_tool"


def _best(rates: Mapping[str, float], beginning: str) -> float | None:
    return max((rate for name, rate in rates.items() if name.startswith(beginning)), default=None)


def _blocks(given: Mapping[str, Any]) -> dict[str, Block]:
    """The blocks with a rate; null is a block that Parquet has made up."""
    blocks = {name: cast("Block", block) for name, block in given.items() if isinstance(block, Mapping)}
    return {name: block for name, block in blocks.items() if _is_rate(block.get("accuracy"))}


def _is_rate(value: object) -> bool:
    return _count(value) is not None or (isinstance(value, float) and math.isfinite(value))


def _object(value: object) -> Mapping[str, Any]:
    """An object, or the JSON text of one; anything else is an empty one."""
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError:
            return {}
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _if(wanted: type[Value], value: object) -> Value | None:
    """The value if it is of that very type: a boolean is no number."""
    return value if type(value) is wanted else None


def _count(value: object) -> int | None:
    """The value if it is an integer that a column holds."""
    found = _if(int, value)
    return found if found is not None and -(1 << 63) <= found < 1 << 63 else None


def _strings(value: object) -> list[str] | None:
    if not isinstance(value, list):
        return None
    items = cast("list[object]", value)
    return [str(item) for item in items] if all(isinstance(item, str) for item in items) else None
