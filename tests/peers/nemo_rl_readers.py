"""The peer: what NeMo-RL and NeMo-Gym do with a row of a JSON Lines file, as far as the row decides whether that works.

Facts of NeMo-RL's datasets (`nemo_rl/data/datasets`: ResponseDataset, OpenAIFormatDataset, PreferenceDataset,
BinaryPreferenceDataset, NemoGymDataset), of its processors (`nemo_rl/data/processors.py`) and rollouts, and of the request
that NeMo-Gym validates (`nemo_gym_request`). Written anew, without tokenizers: where NeMo-RL renders a chat template,
a strict one is rendered here.

Files go through `pyarrow.json`, which is what `datasets` loads them with: every row gets every field of the file, with
nulls for those that it had not, and a field that is text in one place and a number in the next cannot be loaded.
(From release 5 on, `datasets` falls back to Python values there, and the number reaches the trainer as a number.)

Readers take the rows of a file and return what is read of each, or raise what comes: ArrowInvalid, AssertionError,
LookupError, NotImplementedError, TypeError, ValueError, jinja2.TemplateError.
"""

import io
import json
from typing import Any

import jinja2
import pyarrow as pa
from pyarrow import json as arrow_json

from tests.peers.nemo_gym_request import Request

Row = dict[str, Any]

GENERATION = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 4096}

TEMPLATE = """
{%- for message in messages -%}
    {%- if message["role"] not in ["system", "developer", "user", "assistant", "tool"] -%}
        {{- raise_exception("unknown role") -}}
    {%- endif -%}
    {%- set said = "" if message["content"] is none and message["tool_calls"] else message["content"] -%}
    {{- "<" + message["role"] + ">" + said -}}
    {%- for call in message["tool_calls"] or [] -%}{%- set keys = call.keys() -%}{{- "<call>" -}}{%- endfor -%}
{%- endfor -%}
"""
"""Strict as those of models are: text is added to text, and roles are known."""


def refuse(reason: str) -> None:
    raise jinja2.TemplateError(reason)


_ENVIRONMENT = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
_ENVIRONMENT.globals["raise_exception"] = refuse
_COMPILED = _ENVIRONMENT.from_string(TEMPLATE)


def render(messages: list[Row], tools: list[Row] | None = None) -> str:
    """The conversation as text; tools must be mappings, as transformers asks."""
    for tool in [] if tools is None else tools:
        if not isinstance(tool, dict):
            raise TypeError("tools should be JSON schemas")
    return _COMPILED.render(messages=[{"tool_calls": None, **message} for message in messages])


def load(rows: list[Row]) -> tuple[list[str], list[Row]]:
    """The columns and rows of a file, as `datasets` gives them."""
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    table = arrow_json.read_json(io.BytesIO(lines))
    return table.column_names, table.to_pylist()


def add_task_name(columns: list[str], rows: list[Row]) -> list[Row]:
    if "task_name" in columns:
        raise ValueError("the table has the column task_name already")
    return [{**row, "task_name": "data"} for row in rows]


def response_dataset(rows: list[Row]) -> list[Row]:
    columns, loaded = load(rows)
    if "messages" in columns:
        return add_task_name(columns, loaded)
    user, assistant = (
        [{"role": role, "content": row[field]} for row in loaded]
        for role, field in [("user", "input"), ("assistant", "output")]
    )
    return [{"messages": list(pair), "task_name": "data"} for pair in zip(user, assistant, strict=True)]


def openai_format(rows: list[Row], *, preserving: bool) -> list[Row]:
    """Read through columns, or line by line with `use_preserving_dataset: true`."""
    loaded = rows if preserving else load(rows)[1]
    for row in loaded:
        assert row["messages"][-1]["role"] == "assistant"
    return [{"messages": row["messages"], "tools": row.get("tools")} for row in loaded]


def read_sft(rows: list[Row]) -> list[str]:
    """ResponseDataset and the processor of SFT: the text that is trained on, of each row."""
    return [render(row["messages"], row.get("tools")) for row in response_dataset(rows)]


def read_chat(rows: list[Row]) -> list[str]:
    """The same conversations through all three ways: ResponseDataset, and openai_format with columns and without."""
    ways = [response_dataset(rows), *(openai_format(rows, preserving=each) for each in (False, True))]
    read = [[render(row["messages"], row.get("tools")) for row in way] for way in ways]
    assert read[0] == read[1] == read[2]
    return read[0]


def read_grpo_math(rows: list[Row]) -> list[tuple[str, str]]:
    """ResponseDataset and `math_hf_data_processor`: prompt and ground truth."""
    messages = [row["messages"] for row in response_dataset(rows)]
    return [(render([{"role": "user", "content": each[0]["content"]}]), each[1]["content"]) for each in messages]


def read_preferences(rows: list[Row]) -> list[tuple[str, str]]:
    """PreferenceDataset and `preference_preprocessor`: the preferred and the other conversation."""
    return [preferred(row) for row in add_task_name(*load(rows))]


def read_pairs(rows: list[Row]) -> list[tuple[str, str]]:
    """BinaryPreferenceDataset and `preference_preprocessor`."""
    return [preferred(ranks_of(row)) for row in load(rows)[1]]


def ranks_of(row: Row) -> Row:
    prompt = row["prompt"]
    context = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    answers = [[{"role": "assistant", "content": row[field]}] for field in ("chosen", "rejected")]
    return {
        "context": context,
        "completions": [{"rank": rank, "completion": each} for rank, each in enumerate(answers)],
    }


def preferred(row: Row) -> tuple[str, str]:
    first, second = row["completions"]
    if first["rank"] == second["rank"]:
        raise NotImplementedError("ties")
    chosen, rejected = (first, second) if first["rank"] < second["rank"] else (second, first)
    return render(row["context"] + chosen["completion"]), render(row["context"] + rejected["completion"])


def read_gym(rows: list[Row]) -> list[Row]:
    """NemoGymDataset, whose lines stay as they are, and the request that a rollout makes of each."""
    loaded = [json.loads(json.dumps(row)) for row in rows]
    return [rollout(row, number) for number, row in enumerate(loaded)]


def rollout(row: Row, number: int) -> Row:
    params, most = row["responses_create_params"], GENERATION["max_new_tokens"]
    params["temperature"] = GENERATION["temperature"]
    params["top_p"] = GENERATION["top_p"]
    asked = params.get("max_output_tokens")
    params["max_output_tokens"] = most if asked is None else min(asked, most)
    row["_rowidx"] = number
    Request.model_validate(params)
    if not isinstance(row["agent_ref"]["name"], str) or not row["agent_ref"]["name"]:
        raise ValueError("no agent answers to that")
    return row


FAILURES = (
    pa.ArrowInvalid,
    AssertionError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
    jinja2.TemplateError,
)
