"""Parse a record into a conversation, or into a reason for rejecting it.

The shapes that rows have are a table (`shapes`): lists of messages or turns, questions with their answers, agents' traces. All
become one strict form. A record that is ambiguous, or readable only in part, is rejected with a reason and the first fault;
nothing is repaired, and bad data never raises an exception. Fields that mean something elsewhere and aren't read here are named
in the conversation, so that they can be counted.

A null counts as an absent key, because in Parquet every row has all keys of a struct. Records are not modified; tools and
arguments share their values with the record.

Cost: 0.7 µs per plain message and 1.5 µs per record, 1.5 to 2 µs per message with reasoning or nulls, 5 µs per tool call,
14 µs per KB of tool definitions.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, cast

from tokenmill.tasks.shards.receipt import IN_NO_ROW

from .conversation import Conversation, Message, Rejected, RejectionError
from .dialects import read_trace, trace_name, unfolded, with_role, without_channels
from .json_values import kind, listed, parsed, quoted
from .messages import (
    BLOCKS,
    CALLS,
    MESSAGE_TOOLS,
    PLAIN,
    Unusual,
    is_call,
    is_cut,
    read_message,
    read_template_kwargs,
    read_tools,
    require_readable,
    role_of,
    unusual,
    with_blocks,
)
from .shapes import ANSWERS, KWARGS, SWITCHES, TOKENIZED, XLAM, Given, Layout, Shape, layout_of, value_at

Record = Mapping[str, Any]


def conversation(
    record: Record, messages_field: str | None, tools_field: str, given: Given = ()
) -> Conversation | Rejected:
    """Return the conversation in `record`, or the reason for rejecting it.

    `messages_field` names the field of the messages, and `given` fields of other parts, as in a blend; without them, the
    record has one of the known shapes. All may be dotted paths. Details number messages from 1, including a separate system
    prompt.
    """
    reading = _Reading()
    try:
        layout = layout_of(record, messages_field, tools_field, given)
        turns = _messages(record, layout, reading)
        tools = _tools(record, layout, reading) if layout.tools or reading.tools else []
        if layout.others or layout.optional:
            _beside(record, layout, reading)
        variables, cut = read_template_kwargs(record.get(KWARGS)), is_cut(record)
    except RejectionError as error:
        return Rejected(error.reason, error.detail)
    messages: list[Message] = []
    for number, each in enumerate(turns, 1):
        try:
            # Whether any message is unusual is known from `_turns`, so usual lists skip this.
            if reading.odd:
                require_readable(each)
            messages.append(read_message(each))
        except RejectionError as error:
            name = (each.get("role") or each.get("from")) if isinstance(each, dict) else None
            speaker = f" ({quoted(name)})" if isinstance(name, str) else ""
            return Rejected(error.reason, f"message {number} of {len(turns)}{speaker}: {error.detail}")
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        found = f"none of its {len(messages)} messages is by the assistant, so there is no text to train on"
        apart = next((name for name in ANSWERS if isinstance(record.get(name), str)), None)
        remedy = f'; if {apart} is the answer, set it in the blend ("fields": {{"prompt": "…", "response": "{apart}"}})'
        return Rejected("no_assistant", f"{found}{remedy if apart else ''}")
    # The flag of a row is about its last answer.
    if cut:
        answers[-1]["cut"] = True
    return Conversation(messages, tools, tuple(sorted(reading.unread)) if reading.unread else (), variables)


class _Reading:
    """Findings on the way: the fields that aren't read, tools in messages, and whether a message has unusual keys."""

    __slots__ = ("odd", "tools", "unread")

    def __init__(self) -> None:
        self.unread: set[str] = set()
        self.tools: list[object] = []
        self.odd = False


def unread_beside(record: Record, layout: Layout) -> tuple[str, ...]:
    """Return the fields beside the messages of a record that aren't read. Raises RejectionError, with the field, where they matter."""
    reading = _Reading()
    _beside(record, layout, reading)
    return tuple(sorted(reading.unread))


def _messages(record: Record, layout: Layout, reading: _Reading) -> list[Any]:
    """The messages of a record, after its system prompt."""
    shape = layout.shape
    if shape.name == TOKENIZED:
        raise RejectionError("already_tokenized", "it holds ids, not messages; only tokenmill sft prepares such rows")
    if shape.messages is None:
        messages = _pair(record, layout, reading)
    else:
        messages = _turns(_list(value_at(record, shape.messages, "no_messages"), shape.messages, record), reading)
    return _with_system(record, layout.systems, messages) if layout.systems else messages


def _with_system(record: Record, fields: Sequence[str], messages: list[Any]) -> list[Any]:
    """The messages after the system prompt in `fields`, unless they begin with the same."""
    prompts = [value for name in fields if (value := value_at(record, name, "no_messages"))]
    first = messages[0] if messages else None
    own: object = None
    # Data often repeats the system prompt in its first message.
    if isinstance(first, dict) and _role_of(first) in {"system", "developer"}:
        own = first.get("content") or first.get("value")
    if not prompts or all(prompt == own for prompt in prompts):
        return messages
    if own or any(prompt != prompts[0] for prompt in prompts):
        raise RejectionError("two_systems", f"it has two system prompts ({', '.join(fields)}); keep one")
    return [{"role": "system", "content": prompts[0]}, *messages]


def _role_of(message: object) -> str | None:
    """The role of a message in any form; None if it has none that is known."""
    name = (message.get("role") or message.get("from")) if isinstance(message, dict) else None
    return role_of(name) if isinstance(name, str) else None


def _pair(record: Record, layout: Layout, reading: _Reading) -> list[Any]:
    """The messages of a question (or of the messages so far) and its answer."""
    shape = layout.shape
    asked = value_at(record, cast("str", shape.prompt), "no_messages")
    answer = value_at(record, cast("str", shape.response), "no_messages")
    for name, value in ((shape.prompt, asked), (shape.response, answer)):
        if value is None:
            raise RejectionError("no_messages", f"there is no {name}; {_there(record)}")
    more = [name for name in shape.more if record[name]]
    if isinstance(asked, list):
        before = _turns(asked, reading)
        if more:
            why = f"{shape.prompt} is a list of messages, so {more[0]} beside it is ambiguous"
            raise RejectionError("no_messages", why)
    else:
        if isinstance(asked, str) and more:
            if strange := [name for name in more if not isinstance(record[name], str)]:
                raise RejectionError("not_text", f"{strange[0]} is {kind(record[strange[0]])}; make it a string")
            # The shape's additions follow the question on further lines.
            asked = "\n".join([*filter(None, [asked]), *(record[name] for name in more)])
        before = [{"role": "user", "content": asked}]
    # As in TRL, of a prompt and a completion only the completion is learned.
    if not shape.prompt_trained:
        before = [{**each, "train": False} if _role_of(each) == "assistant" else each for each in before]
    after = _answer(answer, shape, reading)
    if layout.reasoning:
        after = _with_reasoning(record, layout.reasoning, after, reading)
    return [*_history(record, layout.history, before, reading), *before, *after]


def _answer(answer: Any, shape: Shape, reading: _Reading) -> list[Any]:  # noqa: ANN401 - as in the row
    """The messages of an answer: a text, messages, or calls."""
    if shape.name == XLAM:
        calls = parsed(answer, "bad_tool_calls", "answers (a string)") if isinstance(answer, str) else answer
        return [{"role": "assistant", "content": None, "tool_calls": calls}]
    if isinstance(answer, dict) and _role_of(answer):
        return [answer]
    if isinstance(answer, list) and answer and all(_role_of(each) for each in answer):
        return _turns(answer, reading)
    # Several answers to choose from: which one is meant isn't known.
    if isinstance(answer, list) and all(isinstance(each, str) for each in answer):
        raise RejectionError("not_text", f"{shape.response} is a list of {len(answer)} texts; make it one answer")
    return [{"role": "assistant", "content": answer}]


def _with_reasoning(record: Record, fields: Sequence[str], after: list[Any], reading: _Reading) -> list[Any]:
    """The answer with the reasoning beside it, unless that is part of it already."""
    # Some rows have the reasoning beside an answer that already includes it.
    texts = {name: value for name in fields if isinstance(value := record[name], str) and value not in SWITCHES}
    unread = [name for name in fields if record[name] and not isinstance(record[name], str | bool)]
    reading.unread.update(unread)
    content = after[-1].get("content")
    new = {text for text in texts.values() if text.strip()}
    if not isinstance(content, str) or not new or any(text.strip() in content for text in new):
        reading.unread.update(name for name, text in texts.items() if text)
        return after
    if len(new) > 1:
        raise RejectionError("reasoning_twice", f"it has different reasoning under {' and '.join(texts)}; keep one")
    return [*after[:-1], {**after[-1], "reasoning_content": new.pop()}]


def _history(record: Record, field: str | None, before: Sequence[Any], reading: _Reading) -> list[Any]:
    """The turns before the question: messages, or pairs of a question and its answer."""
    value = value_at(record, field, "no_messages") if field else None
    if not value or field is None:
        return []
    turns = _list(value, field, record)
    if len(before) > 1:
        raise RejectionError("no_messages", f"a {field} beside a list of messages is ambiguous; write it as messages")
    if all(isinstance(turn, list | tuple) for turn in turns):
        # Alpaca's `history`: pairs of a question and its answer.
        said = [text for turn in turns for text in turn]
        return [_said(text, role) for text, role in zip(said, cycle(("user", "assistant"))) if text is not None]
    return _turns(turns, reading)


def _said(text: object, role: str) -> dict[str, object]:
    return {"role": role, "content": text}


def _turns(messages: list[Any], reading: _Reading) -> list[Any]:
    """Messages in a form that `read_message` reads."""
    # The first message shows the dialect of all.
    if messages and type(messages[0]) is dict and messages[0].keys().isdisjoint(("role", "from")):
        messages = [with_role(each) for each in messages]
    if any(type(each) is dict and type(each.get("content")) is list for each in messages):
        messages = [one for each in messages for one in unfolded(each)]
    # A list of plain messages, the usual case, ends here without a copy.
    others = [each for each in messages if type(each) is not dict or each.keys() != PLAIN]
    if others and all(isinstance(each, list) for each in messages):
        return _turns([event for events in messages for event in events], reading)  # OpenHands' pairs of events
    if not others:
        return _with_calls(messages) if [each for each in messages if each["role"] in CALLS] else messages
    # UltraChat: texts alternate between user and assistant.
    if all(isinstance(each, str) for each in messages) and len(messages) > 1:
        return [_said(text, role) for text, role in zip(messages, cycle(("user", "assistant")))]
    odd = [(each, odd) for each in others if type(each) is dict and (odd := unusual(tuple(each)))]
    if odd:
        messages = _from_traces(messages, odd, reading)
    if isinstance(messages[0], dict) and "role" not in messages[0] and "from" not in messages[0]:
        messages = [turn for each in messages for turn in _turn(each, reading)]
    return _with_calls(messages) if any(map(is_call, messages)) else messages


def _from_traces(messages: list[Any], odd: Sequence[tuple[Record, Unusual]], reading: _Reading) -> list[Any]:
    """The messages of a list in which the `odd` ones have unusual keys: of an agent's trace, with channels, or as they are."""
    if any(key in BLOCKS for _, found in odd for key in found.unread):
        messages = [with_blocks(each) if type(each) is dict else each for each in messages]
        # Blocks are read now, so they are no longer among the unread keys.
        odd = [(each, found) for each in messages if type(each) is dict and (found := unusual(tuple(each)))]
    if any(found.steps for _, found in odd) and (name := trace_name(messages[0])):
        messages = read_trace(name, messages, reading.unread)
    elif any(each[name] for each, found in odd for name in found.channels):
        messages = without_channels(messages, reading.unread)
    else:
        reading.unread.update(f"messages.{name}" for each, found in odd for name in found.unread if each[name])
    reading.odd = True
    reading.tools += [each[name] for each in messages if type(each) is dict for name in MESSAGE_TOOLS if each.get(name)]
    return messages


def _turn(pair: Any, reading: _Reading) -> list[Any]:  # noqa: ANN401 - as in the row
    """The messages of an element of a list of pairs, such as `{"input", "output"}`."""
    if not isinstance(pair, dict):
        return [pair]
    try:
        layout = layout_of(pair, None, "tools", ())
    except RejectionError:
        return [pair]
    if layout.shape.messages is not None:
        return [pair]
    found = _messages(pair, layout, reading)
    _beside(pair, layout, reading)
    return found


def _with_calls(messages: Sequence[Any]) -> list[Any]:
    """The messages with those that are calls, each with its call under `tool_calls`: of one turn together, after its text."""
    made: list[Any] = []
    for each in messages:
        if not is_call(each):
            made.append(each)
            continue
        value = each.get("content") if each.get("content") is not None else each.get("value")
        calls = parsed(value, "bad_tool_calls", "its content (a tool call)") if isinstance(value, str) else value
        calls = calls if isinstance(calls, list) else [calls]
        # A call with other keys (an id, a mask) remains a message, because they are about this call.
        rest = {key: each[key] for key in each if key not in {"role", "from", "content", "value"}}
        before = made[-1] if made and not rest and _role_of(made[-1]) == "assistant" else None
        if before is not None and before.keys() <= {"role", "from", "content", "value", "tool_calls"}:
            content = before.get("content") if "content" in before else before.get("value")
            made[-1] = {
                "role": "assistant",
                "content": content,
                "tool_calls": [*(before.get("tool_calls") or ()), *calls],
            }
        else:
            made.append({**rest, "role": "assistant", "content": None, "tool_calls": calls})
    return made


def _tools(record: Record, layout: Layout, reading: _Reading) -> list[dict[str, Any]]:
    """The tools of a record: under the name that it uses, or in a message. Raises RejectionError if two places differ."""
    found: list[dict[str, Any]] = []
    for value in [*(value_at(record, name, "bad_tools") for name in layout.tools), *reading.tools]:
        tools = read_tools(value)
        if tools and found and tools != found:
            raise RejectionError("bad_tools", "it has different tools in two places; keep one")
        # An empty list doesn't contradict a full one.
        found = tools or found
    return found


def _beside(record: Record, layout: Layout, reading: _Reading) -> None:
    """Add the fields with a value that aren't read to `unread`. Raises RejectionError, with the field, where they matter."""
    shape = layout.shape
    for name, meaning in layout.others:
        value = record[name]
        if value in ("", [], {}) or (isinstance(value, str) and value in SWITCHES):
            continue
        # A number can't be a part of a conversation.
        if meaning == "telling" and not isinstance(value, str | list | dict):
            continue
        if meaning == "ambiguous" and not (isinstance(value, str) and _repeats(value, record, shape)):
            pair = f"{shape.prompt} and {shape.response}"
            remedy = 'name the parts in the blend ("fields": {"prompt": "…", "response": "…"})'
            raise RejectionError("no_messages", f"{name} beside {pair} is ambiguous; {remedy}")
        if meaning == "media":
            raise RejectionError("not_text", f"it has {name}, and only text is read; leave the row out")
        if meaning == "verdict" and value is False:
            raise RejectionError("bad_loss_flag", f"{name} is false: its answer is a bad one; filter such rows out")
        reading.unread.add(name)
    for name, path in layout.optional:
        if value_at(record, path, "no_messages") is None:
            reading.unread.add(f"{name} {quoted(path)} {IN_NO_ROW}")


LONG = 24  # characters of a text that isn't found in others by chance


def _repeats(value: str, record: Record, shape: Shape) -> bool:
    """Whether a text beside a pair is its question or answer again, such as a prompt that was made of the question."""
    read = [text for name in (shape.prompt, shape.response) if name and isinstance(text := record.get(name), str)]
    return any(
        text == value or (min(len(text), len(value)) >= LONG and (text in value or value in text)) for text in read
    )


def _list(value: object, field: str, record: Record) -> list[Any]:
    if isinstance(value, str):
        value = parsed(value, "no_messages", f"{field} (a string)")
    # Some fields hold a whole request to an API.
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        value = value["messages"]
    if value is None:
        raise RejectionError("no_messages", f"there is no {field}; {_there(record)}")
    if not isinstance(value, list):
        raise RejectionError("no_messages", f"{field} is {kind(value)}; make it an array of messages")
    if not value:
        raise RejectionError("no_messages", f"{field} is empty")
    return value


def _there(record: Record) -> str:
    return f"the fields with a value: {listed(key for key in record if record[key] is not None)}"
