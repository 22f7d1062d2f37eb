"""Messages of other APIs as OpenAI's: those of Anthropic and LangChain, and those that name their speaker by another key.

| from | form |
|---|---|
| Anthropic | calls and results of tools are parts of a content: `tool_use` in an answer, `tool_result` in a user's message |
| LangChain | `type` is the role (human, ai, system, tool); in `messages_to_dict`, the rest is in `data` |
| others | `author` or `speaker` is the role |
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from .conversation import RejectionError
from .json_values import quoted
from .messages import role_of

SPEAKER_KEYS = ("author", "speaker", "type")


def with_role(message: Any) -> Any:  # noqa: ANN401 - as in the row
    """Return the message with its role: its own, or that under a key of SPEAKER_KEYS."""
    if not isinstance(message, dict) or "role" in message:
        return message
    name = next((key for key in SPEAKER_KEYS if isinstance(said := message.get(key), str) and role_of(said)), None)
    if name is None:
        return message
    inner = message.get("data") if name == "type" else None
    fields: dict[str, Any] = {**message, **inner, "data": None} if isinstance(inner, dict) else message
    older = fields.get("additional_kwargs")  # calls as the model's API wrote them
    return {**fields, **(older if isinstance(older, dict) else {}), "role": message[name], "type": None, name: None}


def unfolded(message: Any) -> Iterator[Any]:  # noqa: ANN401 - as in the row
    """The messages that Anthropic writes as one. Raises RejectionError for an answer that goes on after a call."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list) or message.get("role") == "tool":  # whose list may be its result
        yield message
        return
    kinds = [_kind(part) for part in parts]
    if "tool_use" in kinds:
        first = kinds.index("tool_use")
        if set(kinds[first:]) != {"tool_use"}:
            raise RejectionError("not_text", "an answer goes on after a tool_use; leave the row out")
        calls = message.get("tool_calls") or parts[first:]
        yield {**message, "content": parts[:first] or None, "tool_calls": calls}
    elif "tool_result" in kinds:
        for is_result, group in groupby(parts, lambda part: _kind(part) == "tool_result"):
            if is_result:
                yield from map(_result, group)
            else:
                yield {**message, "content": list(group)}
    else:
        yield message


def _result(part: Any) -> dict[str, Any]:  # noqa: ANN401 - as in the row
    content = part.get("content") or ""
    if other := [kind for kind in map(_kind, content if isinstance(content, list) else []) if kind != "text"]:
        raise RejectionError("not_text", f"a tool_result has the type {quoted(other[0])}; only 'text' can be read")
    return {"role": "tool", "content": content, "tool_call_id": part.get("tool_use_id")}


def _kind(part: Any) -> object:  # noqa: ANN401 - as in the row
    return part.get("type") if isinstance(part, dict) else None
