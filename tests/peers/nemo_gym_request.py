"""The peer: the request that NeMo-Gym's servers validate, made of the types that OpenAI publishes.

NeMo-Gym (`nemo_gym/openai_utils.py`, `NeMoGymResponseCreateParamsNonStreaming`) takes OpenAI's parameters of a response
by their types in the `openai` package, of which it allows 2.7.2 at most, and forbids any other. Where it departs from
these types, what departs is written here, as facts: which parameters it knows, which keys of an item may be absent or
null, and parts of video. In one point this is stricter: NeMo-Gym takes an object that is no item it knows for an empty
list of MCP tools, and the model never sees what it said. Here such a list has to name its type.

    python -m tests.peers.nemo_gym_request > tasks/rl/targets/nemo_gym_request.json

writes the schema by which rows are checked, without a class or a function of Python, so that `openai` is not needed.
"""

import json
import sys
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NotRequired, get_origin, get_type_hints

from openai.types.responses import (
    EasyInputMessageParam,
    ResponseCodeInterpreterToolCall,
    ResponseComputerToolCall,
    ResponseCustomToolCall,
    ResponseFileSearchToolCall,
    ResponseFunctionToolCallParam,
    ResponseFunctionWebSearch,
    ResponseOutputMessageParam,
    ResponseOutputRefusalParam,
    ResponseOutputTextParam,
    ResponseReasoningItem,
    response_input_item,
    response_input_param,
    response_output_item,
)
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from openai.types.responses.response_input_message_content_list_param import ResponseInputContentParam
from pydantic import BeforeValidator, TypeAdapter, create_model
from typing_extensions import TypedDict, is_typeddict

Schema = dict[str, Any]

KNOWN = (
    "background", "include", "input", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model",
    "parallel_tool_calls", "previous_response_id", "prompt", "reasoning", "service_tier", "store", "stream", "temperature",
    "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user",
)  # fmt: skip
"""The parameters that a request may have; OpenAI has others."""

NEVER_NULL = ("input", "parallel_tool_calls", "tool_choice", "tools")
"""All others may be null. Only `input` must be there."""

TOKEN_IDS = {
    "prompt_token_ids": list[int],
    "generation_token_ids": list[int],
    "generation_log_probs": list[float],
    "routed_experts": str | list[list[list[int]]] | None,
}
"""What a trained policy puts beside an item: where one of these is, the first three must be."""


class Video(TypedDict):
    """A part of content that NeMo-Gym adds to OpenAI's: a video, by one of two names."""

    type: Literal["input_video"]
    video_url: NotRequired[str | dict[str, Any]]
    video: NotRequired[str | dict[str, Any]]


def one_source(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "input_video":
        sources = [part[key] for key in ("video_url", "video") if key in part]
        assert len(sources) == 1
        address = sources[0].get("url") if isinstance(sources[0], dict) else sources[0]
        assert isinstance(address, str)
        assert address.strip()
    return part


TokenIds = create_model(
    "TokenIds", **{name: (kind, None if name == "routed_experts" else ...) for name, kind in TOKEN_IDS.items()}
)


def whole_token_ids(item: Any) -> Any:
    if isinstance(item, dict) and item.keys() & TOKEN_IDS.keys():
        TokenIds.model_validate({key: item[key] for key in item if key in TOKEN_IDS})
    return item


def relaxed(kind: Any, name: str, optional: tuple[str, ...] = (), without: tuple[str, ...] = (), **types: Any) -> Any:
    """A type of OpenAI's as a model in which some keys may be absent, others are not looked at or of another type."""
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        required = {
            key for key, hint in hints.items() if kind.__total__ or "Required[" in str(hint).partition("[")[0] + "["
        }
    else:
        hints = {key: each.annotation for key, each in kind.model_fields.items()}
        required = {key for key, each in kind.model_fields.items() if each.is_required()}
    fields = {key: types.get(key, plain_hint(hint)) for key, hint in hints.items() if key not in without}
    required -= set(optional)
    return create_model(name, **{key: (hint, ... if key in required else None) for key, hint in fields.items()})


def plain_hint(hint: Any) -> Any:
    """A type without `Required`, which models do not know, and lists for iterables, which pydantic would not look into."""
    if str(hint).startswith(("typing.Required", "typing_extensions.Required")):
        return plain_hint(hint.__args__[0])
    return list[hint.__args__[0]] if get_origin(hint) is Iterable else hint


Part = Annotated[ResponseInputContentParam | Video, BeforeValidator(one_source)]

Item = Annotated[
    relaxed(EasyInputMessageParam, "Message", content=str | list[Part])
    | relaxed(response_input_param.Message, "InputMessage", content=list[Part])
    | relaxed(
        ResponseOutputMessageParam, "OutputMessage", optional=("role", "status", "type"),
        content=list[
            relaxed(ResponseOutputTextParam, "OutputText", optional=("type",), logprobs=get_type_hints(ResponseOutputTextParam)["logprobs"] | None)
            | relaxed(ResponseOutputRefusalParam, "Refusal", optional=("type",))
        ],
    )
    | relaxed(
        ResponseFunctionToolCallParam, "Call", optional=("type",), id=str | None,
        status=get_type_hints(ResponseFunctionToolCallParam)["status"] | None,
    )
    | relaxed(response_input_param.FunctionCallOutput, "Result", optional=("type",))
    | relaxed(ResponseReasoningItem, "Reasoning", optional=("type",), without=("status",))
    | relaxed(response_output_item.McpCall, "McpCall", optional=("type", "id", "server_label"), id=str | None, server_label=str | None, status=str | None)
    | relaxed(response_output_item.McpListTools, "McpTools", optional=("id", "server_label", "tools"), id=str | None, server_label=str | None, tools=list[Any])
    | relaxed(response_output_item.McpApprovalRequest, "McpRequest", optional=("type", "id", "server_label"), id=str | None, server_label=str | None)
    | ResponseFileSearchToolCall | ResponseFunctionWebSearch | ResponseComputerToolCall
    | response_output_item.ImageGenerationCall | ResponseCodeInterpreterToolCall | response_output_item.LocalShellCall
    | ResponseCustomToolCall | response_input_item.ComputerCallOutput | response_input_item.ResponseCustomToolCallOutput
    | response_input_item.LocalShellCallOutput | response_input_item.McpApprovalResponse,
    BeforeValidator(whole_token_ids),
]  # fmt: skip


def parameters() -> dict[str, Any]:
    hints = {
        key: plain_hint(hint)
        for key, hint in get_type_hints(ResponseCreateParamsNonStreaming, include_extras=True).items()
    }
    hints |= {"input": str | list[Item], "parallel_tool_calls": bool}
    kinds = {key: hints[key] if key in NEVER_NULL else hints[key] | None for key in KNOWN}
    return {key: (kind, ... if key == "input" else None) for key, kind in kinds.items()}


Request = create_model("Request", __config__={"extra": "forbid"}, **parameters())
"""The model; `Request.model_validate(params)` raises what NeMo-Gym answers a request with."""


def schemas() -> Schema:
    """A request and token ids as schemas of pydantic-core, plain JSON: objects as typed dictionaries, nothing in Python."""
    referred: dict[str, Schema] = {}
    request, token_ids = (_plain(TypeAdapter(each).core_schema, referred) for each in (Request, TokenIds))
    definitions = [each | {"ref": name} for name, each in referred.items()]
    return {"request": {"type": "definitions", "schema": request, "definitions": definitions}, "token_ids": token_ids}


def _plain(given: Schema, referred: dict[str, Schema], extra: str = "ignore") -> Schema:
    """`extra` is what becomes of unknown keys: typed dictionaries in a model do as the model does."""
    kind = given["type"]
    if kind == "definitions":
        for each in given["definitions"]:
            referred[_name(each["ref"])] = {}
            referred[_name(each["ref"])] = _plain(each, referred)
    if kind == "model":
        extra = given["config"].get("extra_fields_behavior", "ignore")
    if kind in {"definitions", "model", "default", "function-before"}:
        return _plain(given["schema"], referred, extra)
    if kind == "definition-ref":
        return {"type": kind, "schema_ref": _name(given["schema_ref"])}
    if kind in {"model-fields", "typed-dict"}:
        fields = {key: _field(each, referred, extra) for key, each in given["fields"].items()}
        named = fields.get("type", {}).get("schema", {}).get("expected", ["object"])
        forbids = {"extra_behavior": extra} if extra == "forbid" else {}
        return {"type": "typed-dict", "cls_name": " or ".join(named), "fields": fields, **forbids}
    if kind == "json-or-python":
        return _plain(given["json_schema"], referred, extra)
    if kind == "union":
        choices = [each[0] if isinstance(each, tuple) else each for each in given["choices"]]
        return {"type": kind, "choices": [_plain(each, referred, extra) for each in choices]}
    parts = ("schema", "items_schema", "keys_schema", "values_schema")
    inner = {key: _plain(given[key], referred, extra) for key in parts if key in given}
    named = {"expected": sorted(given["expected"], key=str)} if kind == "literal" else {}
    return {"type": "list" if kind == "generator" else kind, **inner, **named}


def _field(given: Schema, referred: dict[str, Schema], extra: str) -> Schema:
    required = given.get("required", given["schema"]["type"] != "default")
    return {"type": "typed-dict-field", "schema": _plain(given["schema"], referred, extra), "required": required}


def _name(reference: str) -> str:
    """The name of a type without its place in memory."""
    return reference.rsplit(":", 1)[0]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(schemas(), separators=(",", ":"), sort_keys=True) + "\n")
