"""Parse one message: reasoning, tool calls, tools and loss flags, in the forms that sources use.

Plain messages (a role and a string) and answers with reasoning take fast paths; all others are checked in full and rejected at
the first fault.

Reasoning is under a separate key; contents are kept as they are (see `conversation`).

A tool call is `{"function": {"name", "arguments"}}` or only the inner object; arguments are an object or JSON text, and older
rows have one `function_call`. An unreadable call rejects its conversation, because a result without its call would train the
wrong behavior. Nulls in arguments and definitions are data and are kept.

Loss flags in the data restrict training:

| key | source | value |
|---|---|---|
| `weight` | OpenAI's fine-tuning API, older ShareGPT data | 0 or 1 |
| `train` | axolotl | true or false |
| `loss` | ms-swift, AgentInstruct | true or false |
| `trainable` | tinker-cookbook | true or false |
| `train_detail` | axolotl | `[{"begin_offset", "end_offset", "train"}, …]`, characters of the content, end included |
| `step_loss_mask` | slime | 0 or 1 |

axolotl's content parts have `train` or `weight` as well. A message is excluded if any flag excludes it. With `train_detail`,
only its characters and the end of turn are trained on. Where `reasoning_truncated` is true, of an answer or of a row (whose last
answer it is), a budget ended the reasoning: the text between it and the answer, `</think>`, isn't the model's, and isn't
trained on. Data that asks to train on other roles is rejected, and so are other
keys that speak of loss, masks or training.
"""

import itertools
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

from tokenmill.tasks.errors import nearest

from .conversation import Arguments, Message, Range, Reason, RejectionError, Role, ToolCall
from .json_values import json_text, kind, listed, parsed, quoted, require_single_keys, require_utf8
from .shapes import is_telling

SPELLINGS = ("reasoning_content", "reasoning", "thinking")
"""The keys of reasoning. Only the first is always text; `thinking: true` is a setting."""


def given_reasoning(message: Mapping[str, Any], role: Role) -> str | None:
    """Return the reasoning under a separate key, None if absent or blank."""
    value = message.get(SPELLINGS[0])
    if value is not None and not isinstance(value, str):
        raise RejectionError("bad_reasoning", f"its {SPELLINGS[0]} is {kind(value)}; make it a string, or remove it")
    if structured := [key for key in SPELLINGS[1:] if message.get(key) and isinstance(message[key], list)]:
        key = structured[0]
        raise RejectionError("bad_reasoning", f"its {key} is {kind(message[key])}; make it a string, or remove it")
    found = {text for key in SPELLINGS if isinstance(text := message.get(key), str) and not _blank(text)}
    if not found:
        return None
    if role != "assistant":
        raise RejectionError("reasoning_not_by_assistant", "it has reasoning, which only the assistant can have")
    # The same text under several keys counts once.
    if len(found) > 1:
        raise RejectionError("reasoning_twice", f"it has different reasoning under more than one of {SPELLINGS}")
    reasoning = found.pop()
    require_utf8(reasoning, "its reasoning")
    return reasoning


def _blank(text: str) -> bool:
    return not text or text.isspace()


ARGUMENTS = ("arguments", "args", "input")  # the keys of a call's arguments: OpenAI's, LangChain's, Anthropic's

CALL_KEYS = {"name", *ARGUMENTS, "id", "type", "index", "function"}


def string_at(fields: Mapping[str, Any], key: str, reason: Reason, whose: str) -> str | None:
    """Return the string under `key`, None if absent or empty. Raises RejectionError for anything else."""
    value = fields.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise RejectionError(reason, f"{whose} {key} is {kind(value)}; make it a string")
    require_utf8(value, f"{whose} {key}")
    return value


def read_tool_calls(message: Mapping[str, Any], role: Role) -> list[ToolCall]:
    """Return the calls in a message, including an older `function_call`. Raises RejectionError for calls that cannot be read
    or are not by the assistant.
    """
    calls, older = message.get("tool_calls"), message.get("function_call")
    if calls is None:
        calls = message.get("function_calls") or None
    if calls is None and older is None:
        return []
    calls = _array(calls, "bad_tool_calls", "its tool_calls")
    if older is not None and calls:
        raise RejectionError("bad_tool_calls", "it has both tool_calls and function_call; keep tool_calls")
    # `function_call` is the older form of the API, for one call.
    calls = calls if older is None else [older]
    if calls and role != "assistant":
        raise RejectionError("bad_tool_calls", "it has tool calls, which only the assistant can make")
    return [_call(each, f"tool call {number}") for number, each in enumerate(calls, 1)]


def _array(value: object, reason: Reason, what: str) -> list[Any]:
    """An array, or the JSON text of one; null and an empty string count as empty arrays."""
    if isinstance(value, str) and value:
        value = parsed(value, reason, f"{what} (a string)")
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
        raise RejectionError("bad_tool_calls", f"{place} doesn't have a function name; its keys: {listed(function)}")
    made: ToolCall = {"type": "function", "function": {"name": name, "arguments": _arguments(function, place)}}
    if identifier := string_at(call, "id", "bad_tool_calls", f"{place}'s"):
        made["id"] = identifier
    given = list(call)  # templates that write a call as JSON write its keys in the order of the source
    return cast(
        "ToolCall", dict(sorted(made.items(), key=lambda item: given.index(item[0]) if item[0] in given else -1))
    )


def _function(outer: Mapping[str, Any]) -> object:
    """The function of a call or a tool: under that key, or the object itself."""
    inner = outer.get("function")
    return outer if inner is None else inner


def _arguments(function: Mapping[str, Any], place: str) -> Arguments:
    given, what = [function[key] for key in ARGUMENTS if function.get(key) is not None], f"the arguments of {place}"
    value = given[0] if given else None
    if value is None or value == "":
        # Arguments under an unknown name would be lost without a word.
        if strange := [key for key in function if key not in CALL_KEYS and function[key] is not None]:
            raise RejectionError(
                "bad_tool_arguments", f"{place} doesn't have arguments, but {listed(strange)}; rename it"
            )
        return Arguments({}, "{}")
    if isinstance(value, str):
        # The text is kept as it is, for templates that write it.
        text, value = value, parsed(value, "bad_tool_arguments", what)
    else:
        text = json_text(value, "bad_tool_arguments", what)
    if not isinstance(value, dict):
        raise RejectionError("bad_tool_arguments", f"{what} are {kind(value)}; make them an object")
    return Arguments(value, text)


def read_tools(value: object) -> list[dict[str, Any]]:
    """Return the tools of a record as given: `{"type", "function": {…}}` or the function itself. Raises RejectionError unless
    `value` is null, empty, or an array of named objects, or the JSON text of one.
    """
    tools = _array(value, "bad_tools", "tools")
    tools = [
        parsed(tool, "bad_tools", f"tool {place} of {len(tools)}") if isinstance(tool, str) else tool
        for place, tool in enumerate(tools, 1)
    ]
    for number, tool in enumerate(tools, 1):
        function = _function(tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise RejectionError("bad_tools", f"tool {number} of {len(tools)} isn't an object with a function name")
    if tools:
        json_text(tools, "bad_tools", "tools")
    # A tool of Anthropic's API is a function under other names; its other fields are for the API.
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    return [
        {name: tool[key] for key, name in names.items() if tool.get(key)} if tool.get("input_schema") else tool
        for tool in tools
    ]


RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""What templates get from a row by other fields, or not at all."""


def read_template_kwargs(value: object) -> dict[str, Any]:
    """Return the variables that a record has for its template, those that are null omitted. Raises RejectionError unless `value` is
    null or an object of names, or the JSON text of one.
    """
    if isinstance(value, str) and value:
        value = parsed(value, "bad_template_kwargs", "chat_template_kwargs (a string)")
    if not value:
        return {}
    if not isinstance(value, dict):
        raise RejectionError("bad_template_kwargs", f"chat_template_kwargs is {kind(value)}; make it an object")
    given = {name: each for name, each in cast("dict[str, Any]", value).items() if each is not None}
    if wrong := [name for name in RESERVED if name in given]:
        raise RejectionError("bad_template_kwargs", f"chat_template_kwargs has {wrong[0]}, which rows can't set")
    # Plain JSON, because the variables are part of the keys of caches.
    return json.loads(json_text(given, "bad_template_kwargs", "chat_template_kwargs"))


WHOLE = ("weight", "train", "step_loss_mask", "loss", "trainable")
DETAIL = "train_detail"

NOTHING: tuple[Range, ...] = ()

CUT = ("reasoning_truncated", "thinking_truncated")  # flags of answers whose reasoning a budget ended


def is_cut(fields: Mapping[str, Any]) -> bool:
    """Return whether a message or row has a flag that a budget ended its reasoning. Raises RejectionError for a flag that can't be read."""
    flags = [_flag(fields, name) for name in CUT if name in fields]
    return any(flags)


def trained_characters(fields: Mapping[str, Any], role: Role, content: str | None) -> tuple[Range, ...] | None:
    """Return the characters of `content` that may be trained on, as ranges in order; none if the message is omitted, None if
    nothing restricts training.

    `fields` is the message in its source, `content` its text. Raises RejectionError for flags that cannot be read or
    followed.
    """
    flags = [flag for name in WHOLE if (flag := _flag(fields, name)) is not None]
    # Flags of parts are nearer to the text than `train_detail`.
    detail = _of_parts(fields.get("content"))
    if detail is None:
        detail = _of_detail(fields.get(DETAIL))
    if role != "assistant":
        if detail or any(fields.get(name) for name in ("train", "loss", "trainable")):
            raise _bad("asks to be trained on, which is for the assistant only; remove its flags of loss")
        return None
    if not all(flags):
        return NOTHING
    if detail is None:
        return None
    # in order, within the content, and adjacent ones merged, because a range is a run of tokens
    size = len(content or "")
    made: list[Range] = []
    for start, stop in sorted((start, min(stop, size)) for start, stop in detail if start < size):
        if made and start <= made[-1][1]:
            start, stop = made[-1][0], max(made.pop()[1], stop)  # noqa: PLW2901 - grown to the left
        if start < stop:
            made.append((start, stop))
    return tuple(made)


def _flag(fields: Mapping[str, Any], name: str) -> bool | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or value not in (0, 1):
        raise _bad(f"has {name}={value if isinstance(value, int | float) else quoted(value)}; make it 0 or 1")
    return bool(value)


def _of_parts(content: object) -> list[Range] | None:
    """The ranges of the parts trained on, None if no part has a flag."""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if not any(_part_flags(part) for part in parts):
        return None
    ranges: list[Range] = []
    place = 0
    for part in content if isinstance(content, list) else []:
        text = part if isinstance(part, str) else str(part.get("text"))
        if isinstance(part, str) or all(_part_flags(part)):
            ranges.append((place, place + len(text)))
        place += len(text)
    return ranges


def _part_flags(part: Mapping[str, Any]) -> list[bool]:
    return [flag for name in ("weight", "train") if (flag := _flag(part, name)) is not None]


def _of_detail(detail: object) -> list[Range] | None:
    if detail is None:
        return None
    if not isinstance(detail, list):
        raise _bad(f"has {DETAIL} as {kind(detail)}; make it an array of begin_offset, end_offset and train")
    ranges: list[Range] = []
    for number, entry in enumerate(detail, 1):
        fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
        begin, end, train = (fields.get(name) for name in ("begin_offset", "end_offset", "train"))
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end or not isinstance(train, bool):
            shape = '{"begin_offset": 0, "end_offset": 9, "train": true}'
            raise _bad(f"has a {DETAIL} whose entry {number} is not of the form {shape}")
        # axolotl includes the end offset.
        ranges += [(begin, end + 1)] if train else []
    return ranges


def _bad(what: str) -> RejectionError:
    return RejectionError("bad_loss_flag", f"it {what}")


PLAIN = {"role", "content"}
REASONED = {*PLAIN, SPELLINGS[0]}

SPEAKERS: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "chatgpt", "chatbot", "model", "ai", "bot", "bing", "bard", "agent", "function_call", "tool_call"),
        "assistant",
    ),
    **dict.fromkeys(
        ("tool", "function", "observation", "function_response", "tool_response", "tool_result", "tool_output",
         "ipython", "environment"),
        "tool",
    ),
}  # fmt: skip
"""The roles of messages and the speakers of turns, in lower case. `function` is the older name of `tool`."""


def role_of(name: str) -> Role | None:
    """Return the role of a speaker in any case, with words joined by `_`, `-` or a space; None if it isn't known."""
    return SPEAKERS.get(name) or SPEAKERS.get(re.sub(r"[-\s]+", "_", name.strip().lower()))


CALLS = ("function_call", "tool_call", "function-call", "tool-call")  # speakers whose text is a call, or several


def is_call(message: object) -> bool:
    """Return whether a message is a call in place of a text."""
    return isinstance(message, dict) and (message.get("role") or message.get("from")) in CALLS


READ = (*SPELLINGS, *CUT, "tool_calls", "function_call", "function_calls", "system_prompt")
"""Keys of messages that are read, and speak of conversations (see `is_telling`)."""

UNREAD = (
    "refusal",
    "thought",
    "tool_plan",
    "annotations",
    "citations",
    "prefix",
    "reasoning_details",
    "thinking_blocks",
)
"""Keys of messages that have a meaning elsewhere; in `refusal`, a model explains why it doesn't answer."""

BLOCKS = {"reasoning_details": "text", "thinking_blocks": "thinking"}
"""Keys of messages with reasoning in blocks (OpenRouter's, LiteLLM's), and the key of a block's text."""


def with_blocks(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with the reasoning of its blocks as text, unless a block has none, as encrypted ones, or it has other reasoning."""
    for name, key in BLOCKS.items():
        blocks = message.get(name)
        texts = (
            [each.get(key) if isinstance(each, dict) else None for each in blocks] if isinstance(blocks, list) else []
        )
        said = [text for text in texts if isinstance(text, str)]
        others = {text for spelling in SPELLINGS if isinstance(text := message.get(spelling), str) and not _blank(text)}
        if said and len(said) == len(texts) and others <= {"".join(said)}:
            rest = {each: value for each, value in message.items() if each not in {name, *SPELLINGS}}
            message = {**rest, SPELLINGS[0]: "".join(said)}
    return message


UNREADABLE = ("images", "image", "audio", "audios", "video", "videos", "attachments", "files")
"""Keys of messages with more than text."""


MESSAGE_TOOLS = ("tools", "functions")  # keys of messages that hold the conversation's tools

STEPS = ("source", "class_", "action", "observation", "message_type", "cutoff_date")
"""Keys of the steps of agents' traces."""

CHANNELS = ("channel", "recipient")  # keys of openai-harmony's messages

MASKS = frozenset({"loss", "mask", "masks", "masked", "train", "trained", "trainable", "training", "untrained"})
"""Words in keys that speak of what to train on."""


class Unusual(NamedTuple):
    """The keys of a message with a meaning beyond `read_message`, by their meaning."""

    masks: tuple[str, ...]
    pictures: tuple[str, ...]
    unread: tuple[str, ...]
    channels: tuple[str, ...]
    steps: tuple[str, ...]
    tools: tuple[str, ...]


@lru_cache(maxsize=4096)
def unusual(keys: tuple[str, ...]) -> Unusual | None:
    """Return the meaning of a message's keys that the rest of this module doesn't read; None for no meaning, as usual."""
    # A key such as `loss_weight` or `is_trained` speaks of masks by one of its words.
    masks = tuple(key for key in keys if key not in {*WHOLE, DETAIL} and MASKS & set(re.split(r"[^a-z]+", key.lower())))
    unread = set(UNREAD)
    if not {"role", "from"}.isdisjoint(keys):
        unread |= {key for key in keys if is_telling(key)}.difference(READ, STEPS, MESSAGE_TOOLS, UNREADABLE)
        unread |= {"author", "speaker"}  # the role in other dialects; here perhaps a name
    found = Unusual(
        masks,
        *(tuple(key for key in keys if key in each) for each in (UNREADABLE, unread, CHANNELS, STEPS, MESSAGE_TOOLS)),
    )
    return found if any(found) else None


TEXTS = frozenset({"text", "input_text", "output_text"})
"""The types of content parts that hold text; the latter are of OpenAI's responses."""

PARTS = ("text", "image_url", "input_audio", "file", "refusal")
"""The types of content parts in OpenAI's API; a part's content is under the name of its type."""


def read_message(value: object) -> Message:
    """Parse a message. Raises RejectionError without the number of the message."""
    # Most messages: no other key, and a known role in lower case.
    if type(value) is dict and value.keys() == PLAIN:
        role, content = value["role"], value["content"]
        if isinstance(role, str) and role in SPEAKERS and isinstance(content, str):
            require_utf8(content, "its content")
            return {"role": SPEAKERS[role], "content": content}
    if type(value) is dict and value.keys() == REASONED and value["role"] == "assistant":
        content, reasoning = value["content"], value[SPELLINGS[0]]
        texts = isinstance(content, str) and isinstance(reasoning, str)
        if texts and not _blank(reasoning):
            require_utf8(content, "its content")
            require_utf8(reasoning, "its reasoning")
            return {"role": "assistant", "content": content, "reasoning_content": reasoning}
    return _read_any(value)


def _read_any(value: object) -> Message:
    if not isinstance(value, dict):
        raise RejectionError("bad_message", f"it is {kind(value)}; make it an object with role and content")
    fields: dict[str, Any] = value
    require_single_keys(fields, "bad_message", "it")
    if fields.get("role") is None and fields.get("from") is not None:
        # ShareGPT's names of role and content.
        fields = {**fields, "role": fields["from"], "content": fields.get("value", fields.get("content"))}
    name = fields.get("role")
    if name is None:
        raise RejectionError("unknown_role", f"it has neither role nor from; its keys: {listed(fields)}")
    if not isinstance(name, str):
        raise RejectionError("unknown_role", f"its role is {kind(name)}; make it a string")
    role = role_of(name)
    if role is None:
        raise RejectionError("unknown_role", f"its role is {quoted(name)}; {nearest(name[:40], SPEAKERS)}")
    if fields.get("content") is None and (other := fields.get("value", fields.get("text"))):
        fields = {**fields, "content": other}
    # Anthropic and Mistral have thoughts as the first parts of a content.
    parts: list[Any] = given if isinstance(given := fields.get("content"), list) else []
    thoughts = list(itertools.takewhile(lambda part: isinstance(part, dict) and part.get("type") == "thinking", parts))
    if thoughts and not fields.get(SPELLINGS[0]):
        text = "\n".join(_text(part.get("thinking"), "assistant") or "" for part in thoughts)
        fields = {**fields, "content": parts[len(thoughts) :], SPELLINGS[0]: text}
    return _message(role, _text(fields.get("content"), role), given_reasoning(fields, role), fields)


def require_readable(value: object) -> None:
    """Raises RejectionError for a message with pictures or sound, and for marks of what to train on that aren't known."""
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    odd = unusual(tuple(fields))
    if odd is None:
        return
    for name in odd.pictures:
        if fields[name]:
            raise RejectionError("not_text", f"it has {name}, and only text is read; leave the row out")
    for name in odd.masks:
        if isinstance(fields[name], bool | int | float | list):
            raise _bad(f"has {name}, which isn't known; write train or weight to exclude a message from training")


def _message(role: Role, content: str | None, reasoning: str | None, fields: dict[str, Any]) -> Message:
    message: Message = {"role": role, "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls := read_tool_calls(fields, role):
        message["tool_calls"] = calls
    # Only beside calls may a content be absent.
    elif content is None:
        raise RejectionError("no_content", f"it doesn't have content; its keys: {listed(fields)}")
    if role == "tool" and (identifier := string_at(fields, "tool_call_id", "bad_message", "its")):
        message["tool_call_id"] = identifier
    if name := string_at(fields, "name", "bad_message", "its"):
        message["name"] = name
    if (trained := trained_characters(fields, role, content)) is not None:
        message["trained"] = trained
    if role == "assistant" and is_cut(fields):
        message["cut"] = True
    return message


def _text(value: object, role: Role) -> str | None:
    """Content as text; a tool's result that is not text becomes JSON."""
    if value is None:
        return None
    text = value
    if isinstance(value, list):
        objects = [item for item in value if isinstance(item, dict)]
        has_part = any(item.get("type") == name and item.get(name) is not None for item in objects for name in PARTS)
        if role != "tool" or has_part:  # else it is the result itself
            text = "".join(_part(part, number) for number, part in enumerate(value, 1))
    if not isinstance(text, str):
        if role == "tool":
            return json_text(value, "not_text", "its content")
        raise RejectionError("not_text", f"its content is {kind(value)}; make it a string or an array of text parts")
    require_utf8(text, "its content")
    return text


def _part(part: object, number: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RejectionError("not_text", f"part {number} of its content is {kind(part)}; make it a text part")
    if part.get("type", "text") not in TEXTS:
        found = quoted(part.get("type"))
        raise RejectionError("not_text", f"part {number} of its content has the type {found}; only 'text' can be read")
    text = part.get("text")
    if not isinstance(text, str):
        raise RejectionError("not_text", f"the text of part {number} of its content is {kind(text)}; make it a string")
    return text
