"""Tool calls and tool definitions, in the forms that sources give them.

A call is `{"function": {"name", "arguments"}}` or the bare inside of it, arguments are an object or JSON text, and
older rows have one `function_call` instead of a list. What comes out is one form, and nothing is dropped on the way: a
call that cannot be read rejects its conversation, because the result of a call that is gone teaches the wrong thing.

Arguments and definitions are data, not structure: a null in them means null and stays.
"""

from collections.abc import Mapping
from typing import Any, cast

from .conversation import Arguments, Reason, RejectionError, Role, ToolCall
from .json_values import json_text, kind, listed, parsed, require_utf8

CALL_KEYS = {"name", "arguments", "id", "type", "index", "function"}


def string_at(fields: Mapping[str, Any], key: str, reason: Reason, whose: str) -> str | None:
    """The string under `key`, None where it is absent or empty. Raises RejectionError for anything else."""
    value = fields.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise RejectionError(reason, f"{whose} {key} is {kind(value)}; make it a string")
    require_utf8(value, f"{whose} {key}")
    return value


def read_tool_calls(message: Mapping[str, Any], role: Role) -> list[ToolCall]:
    """The calls in a message, an older `function_call` like any other; most often there are none.

    Raises RejectionError for calls that cannot be read, or that are not by the assistant.
    """
    calls, older = message.get("tool_calls"), message.get("function_call")
    if calls is None and older is None:
        return []
    calls = _array(calls, "bad_tool_calls", "its tool_calls")
    if older is not None and calls:
        raise RejectionError("bad_tool_calls", "it has both tool_calls and function_call; keep tool_calls")
    calls = calls if older is None else [older]
    if calls and role != "assistant":
        raise RejectionError("bad_tool_calls", "it has tool calls, which only the assistant can make")
    return [_call(each, f"tool call {number}") for number, each in enumerate(calls, 1)]


def _array(value: object, reason: Reason, what: str) -> list[Any]:
    """An array, or the JSON text of one; null and an empty string are empty arrays."""
    if isinstance(value, str) and value:
        value = parsed(value, reason, f"{what}, a string,")
    if value is None or value == "":
        return []
    if not isinstance(value, list):
        raise RejectionError(reason, f"{what} is {kind(value)}; make it an array")
    return value


def _call(call: object, place: str) -> ToolCall:
    if not isinstance(call, dict):
        raise RejectionError("bad_tool_calls", f"{place} is {kind(call)}; make it an object with a function")
    function = _function(call)
    if not isinstance(function, dict):
        raise RejectionError("bad_tool_calls", f"the function of {place} is {kind(function)}; make it an object")
    name = string_at(function, "name", "bad_tool_calls", f"{place}'s")
    if name is None:
        raise RejectionError("bad_tool_calls", f"{place} has no function name; its keys: {listed(function)}")
    made: ToolCall = {"type": "function", "function": {"name": name, "arguments": _arguments(function, place)}}
    if identifier := string_at(call, "id", "bad_tool_calls", f"{place}'s"):
        made["id"] = identifier
    given = list(call)  # templates that write a call as JSON write its keys in the order of the source
    return cast(
        "ToolCall", dict(sorted(made.items(), key=lambda item: given.index(item[0]) if item[0] in given else -1))
    )


def _function(outer: Mapping[str, Any]) -> object:
    """What a call or a tool says of its function: under that key, or bare."""
    inner = outer.get("function")
    return outer if inner is None else inner


def _arguments(function: Mapping[str, Any], place: str) -> Arguments:
    value, what = function.get("arguments"), f"the arguments of {place}"
    if value is None or value == "":
        if strange := [key for key in function if key not in CALL_KEYS and function[key] is not None]:
            raise RejectionError("bad_tool_arguments", f"{place} has no arguments, but {listed(strange)}; rename it")
        return Arguments({}, "{}")
    if isinstance(value, str):
        text, value = value, parsed(value, "bad_tool_arguments", what)
    else:
        text = json_text(value, "bad_tool_arguments", what)
    if not isinstance(value, dict):
        raise RejectionError("bad_tool_arguments", f"{what} are {kind(value)}; make them an object")
    return Arguments(value, text)


def read_tools(value: object) -> list[dict[str, Any]]:
    """The tools that a record offers, each as it was given: `{"type", "function": {…}}` or the bare function.

    Raises RejectionError unless `value` is null, empty, or an array of objects with a name, or the JSON text of one.
    """
    tools = _array(value, "bad_tools", "tools")
    for number, tool in enumerate(tools, 1):
        function = _function(tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise RejectionError("bad_tools", f"tool {number} of {len(tools)} is no object with the name of a function")
    if tools:
        json_text(tools, "bad_tools", "tools")
    return list(tools)
