"""Semantic rules for grammatical conversations, and the quality of a row.

The grammar decides whether messages can be parsed. 22 rules, each of which can be switched off, decide whether they make sense
together: channels, calls and results, order, ends, questions. Two rules only warn, because the reference's own data calls built-in tools
on commentary, and models violate schemas. A row is valid if the strict grammar accepts its text, no rule is broken, and the
reference, if used, reads the same messages. The rules take 1.5 µs per message plus parsing the JSON of calls. The reference
takes 1 ms per row and 0.7 ms per KB, so it checks only a share of the rows.

Valid text is accepted by its headers, or else parsed and judged. A text of messages is read differently only if a body holds a control string, and these begin with `<|`. If no body holds `<|`,
and the grammar reads every header back, the text parses to its messages without a further search. Most rules,
too, are about headers: channels, recipients, order, ends. A corpus has few sequences of headers, so each is parsed and judged
once, with an empty object as every body, and the verdict is cached. Only questions, the arguments of calls and the last
answer are then looked at in each row.

`accepted` only accepts. It returns None for anything doubtful (a body with `<|`, half a character, a broken rule, no
answer), and the caller parses the text (`judged`), which finds the fault and its place. Accepting takes 1 µs per message,
parsing and judging 8.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, cast

from tokenmill.tasks.chat.conversation import asks_nothing
from tokenmill.tasks.sources.exact_json import loads

from .grammar import Fault, FaultError, ParsedMessage, is_whole, parse
from .message import CHANNELS, FUNCTIONS, ROLES, Composed, HarmonyMessage, Schemas
from .render import ENDS, cross_check, opening, render

CODES = {
    "S01": "unknown_channel",
    "S02": "assistant_without_channel",
    "S03": "channel_on_non_assistant_non_tool",
    "S04": "call_without_recipient",
    "S05": "recipient_without_call",
    "S06": "return_not_last",
    "S07": "return_on_non_final",
    "S08": "recipient_on_final",
    "S09": "function_call_not_on_commentary",
    "S10": "builtin_call_not_on_analysis",
    "S11": "tool_result_without_matching_open_call",
    "S12": "tool_result_wrong_name",
    "S13": "call_args_not_json_object",
    "S14": "call_to_undeclared_tool",
    "S15": "args_violate_schema",
    "S16": "system_not_first",
    "S17": "developer_after_user",
    "S18": "no_user",
    "S19": "no_assistant",
    "S20": "last_message_not_assistant",
    "S21": "unanswered_call_before_next_turn",
    "S22": "empty_prompt",
}

WARNINGS = frozenset({"S10", "S15"})  # rules that only warn

NONE_OFF: frozenset[str] = frozenset()

Finding = tuple[int, str, str]  # the number of a message, the rule it breaks, and how

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def faults(
    messages: Sequence[HarmonyMessage],
    declared: Collection[str] | None = None,
    off: frozenset[str] = NONE_OFF,
    schemas: Schemas | None = None,
) -> list[Fault]:
    """Return the rules that a conversation breaks, in the order of its messages, except those that are `off`.

    `declared` are the recipients that may be called (None: any), `schemas` are for checking arguments. The offset belongs to
    the faulty message, or 0.
    """
    findings = [
        *_headers(messages),
        *_order(messages),
        *_calls(messages, declared, schemas or {}),
        *prompt_faults(messages),
    ]
    # Only parsed messages have offsets; a conversation without messages breaks rules too, as its message 0.
    starts = [each.start if isinstance(each, ParsedMessage) else 0 for each in messages] or [0]
    return [
        Fault(code, CODES[code], starts[number], detail) for number, code, detail in sorted(findings) if code not in off
    ]


def _headers(messages: Sequence[HarmonyMessage]) -> Iterator[Finding]:
    """S01 to S10: rules for single messages."""
    last = len(messages) - 1
    for number, message in enumerate(messages):
        for code, detail in _of_channel(message):
            yield number, code, detail
        for code, detail in _of_end(message, is_last=number == last):
            yield number, code, detail
        if message.author == "assistant" and message.recipient is not None:
            for code, detail in _of_call(message.recipient, message.channel):
                yield number, code, detail


def _of_channel(message: HarmonyMessage) -> Iterator[tuple[str, str]]:
    author, channel = message.author, message.channel
    if channel is None:
        if author == "assistant":
            yield "S02", f"the assistant speaks on no channel; use {', '.join(CHANNELS)}"
        return
    if channel not in CHANNELS:
        yield "S01", f"channel {channel!r} is none of {', '.join(CHANNELS)}"
    if author in ROLES and author != "assistant":
        yield "S03", f"a {author} message has channel {channel!r}; only the assistant and tools have channels"


def _of_end(message: HarmonyMessage, *, is_last: bool) -> Iterator[tuple[str, str]]:
    author, recipient, terminator = message.author, message.recipient, message.terminator
    if terminator == "call" and (author != "assistant" or recipient is None):
        yield "S04", f"a message by {author} to {recipient or 'nobody'} ends with <|call|>"
    if terminator != "call" and recipient is not None and author in ROLES:
        yield "S05", f"a message by {author} to {recipient} ends with <|{terminator}|>"
    if terminator == "return":
        if not is_last:
            yield "S06", "<|return|> ends a message that is not the last; write <|end|>"
        if author != "assistant" or message.channel != "final":
            yield "S07", f"<|return|> ends a message by {author} on {message.channel or 'no channel'}"


def _of_call(recipient: str, channel: str | None) -> Iterator[tuple[str, str]]:
    if channel == "final":
        yield "S08", f"an answer on final is addressed to {recipient}"
    if recipient.startswith(FUNCTIONS):
        if channel != "commentary":
            yield "S09", f"{recipient} is called on {channel or 'no channel'} instead of commentary"
    elif channel != "analysis":
        yield "S10", f"{recipient} is called on {channel or 'no channel'} instead of analysis"


def _order(messages: Sequence[HarmonyMessage]) -> Iterator[Finding]:
    """S16 to S20: order of authors."""
    authors = [message.author for message in messages]
    first_user = authors.index("user") if "user" in authors else len(authors)
    for number, author in enumerate(authors):
        if author == "system" and number:
            yield number, "S16", f"message {number} is a system message, which only the first may be"
        if author == "developer" and number > first_user:
            yield number, "S17", f"message {number} is a developer message after a user has spoken"
    if first_user == len(authors):
        yield 0, "S18", "no message is by a user"
    if "assistant" not in authors:
        yield 0, "S19", "no message is by the assistant"
    if not authors or authors[-1] != "assistant":
        yield max(0, len(authors) - 1), "S20", f"the last message is by {authors[-1] if authors else 'nobody'}"


def _calls(messages: Sequence[HarmonyMessage], declared: Collection[str] | None, schemas: Schemas) -> Iterator[Finding]:
    """S11 to S15 and S21: calls and their results."""
    waiting: list[int] = []
    for number, message in enumerate(messages):
        if message.author == "assistant" and message.recipient is not None:
            waiting.append(number)
            for code, detail in argument_faults(message.recipient, message.body, declared, schemas):
                yield number, code, detail
        elif message.author not in ROLES:
            for code, detail in _of_result(message, messages, waiting):
                yield number, code, detail
        elif message.author == "user" or message.channel == "final":
            for call in waiting:
                why = f"the call of {messages[call].recipient} doesn't have a result before message {number}"
                yield call, "S21", why
            waiting.clear()


def _of_result(
    result: HarmonyMessage, messages: Sequence[HarmonyMessage], waiting: list[int]
) -> Iterator[tuple[str, str]]:
    """Judge a result and remove its call from `waiting`."""
    author = result.author
    # Of several open calls of a tool, the first is answered. A result that fits none still ends the wait of the first call.
    answered = next((call for call in waiting if messages[call].recipient == author), None)
    if result.recipient != "assistant":
        yield "S11", f"a result of {author} is addressed to {result.recipient or 'nobody'} instead of the assistant"
    elif not waiting:
        yield "S11", f"a result of {author} follows no open call"
    elif answered is None:
        called = messages[waiting[0]].recipient
        yield "S12", f"a result of {author} follows a call of {called}"
    if waiting:
        waiting.remove(waiting[0] if answered is None else answered)


def argument_faults(
    recipient: str, body: str, declared: Collection[str] | None, schemas: Schemas
) -> Iterator[tuple[str, str]]:
    """S13 to S15: the rules that the arguments of a call break, and how."""
    if declared is not None and recipient not in declared:
        yield "S14", f"{recipient} is called and not declared"
    # Built-in tools take text, such as code, and have no schema.
    if not recipient.startswith(FUNCTIONS):
        return
    try:
        arguments = loads(body)
    except ValueError as error:
        yield "S13", f"the arguments of {recipient} are not JSON: {error}"
        return
    if not isinstance(arguments, dict):
        yield "S13", f"the arguments of {recipient} are JSON but no object"
        return
    schema = schemas.get(recipient)
    problem = None if schema is None else violation(cast("object", arguments), schema, "arguments")
    if problem is not None:
        yield "S15", f"{recipient}: {problem}"


def violation(value: object, schema: Mapping[str, Any], place: str) -> str | None:
    """Return how a JSON value breaks a schema's type, enum, required, properties, additionalProperties or items, or None.

    Other keywords and malformed ones are ignored: schemas in data are loose.
    """
    kinds = schema.get("type")
    named = [
        kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str) and kind in TYPES
    ]
    # In JSON, 2.0 is an integer; in Python, a boolean is one.
    is_whole_number = isinstance(value, float) and value.is_integer() and "integer" in named
    types = tuple(each for kind in named for each in TYPES[kind])
    fits = isinstance(value, types) and (not isinstance(value, bool) or "boolean" in named)
    if named and not (fits or is_whole_number or (value is None and schema.get("nullable"))):
        return f"{place} is not of type {' or '.join(named)}"
    choices = schema.get("enum")
    if isinstance(choices, list) and value not in choices:
        return f"{place} is none of its values"
    if isinstance(value, dict):
        return _object_violation(cast("dict[str, Any]", value), schema, place)
    items = schema.get("items")
    if isinstance(value, list) and isinstance(items, Mapping):
        found = (violation(each, items, f"{place}[{number}]") for number, each in enumerate(value))
        return next((problem for problem in found if problem), None)
    return None


def _object_violation(value: dict[str, Any], schema: Mapping[str, Any], place: str) -> str | None:
    required, properties = schema.get("required"), schema.get("properties")
    # Schemas in data are loose: entries of a wrong type are skipped.
    for name in required if isinstance(required, list) else []:
        if isinstance(name, str) and name not in value:
            return f"{place}.{name} is missing"
    known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    for name, each in value.items():
        if name not in known and schema.get("additionalProperties") is False:
            return f"{place}.{name} is not declared"
        problem = violation(each, known[name], f"{place}.{name}") if isinstance(known.get(name), Mapping) else None
        if problem:
            return problem
    return None


def prompt_faults(messages: Sequence[HarmonyMessage]) -> Iterator[Finding]:
    """S22: a question that is blank, or, as the first one, a placeholder."""
    first = True
    for number, message in enumerate(messages):
        if message.author != "user":
            continue
        if asks_nothing(message.body, first=first):
            yield number, "S22", f"the user's text is {message.body[:20]!r}, which isn't a question"
        first = False


TOOL_CODES = frozenset({"S11", "S12", "S13", "S14", "S15"})  # the rules about calls and results


@dataclass(frozen=True, slots=True)
class Quality:
    """Flags and counts of a text under the names of their columns; false and 0 if the grammar rejects it.

    `quality_error_code` and `quality_error_offset` (characters) describe the first fault that makes the row invalid;
    `error_detail`, which is not a column, describes it.
    """

    quality_valid_harmony: bool = False
    quality_completion_nonempty: bool = False
    quality_completion_ends_with_return: bool = False
    quality_has_tool: bool = False
    quality_valid_tool_schema: bool = False
    quality_error_code: str | None = None
    quality_error_offset: int | None = None
    num_messages: int = 0
    num_tool_calls: int = 0
    num_tool_results: int = 0
    error_detail: str | None = field(default=None, compare=False)


JUDGED = [each.name for each in fields(Quality) if each.name != "error_detail"]  # the columns of a quality

Parser = Callable[[str, Sequence[ParsedMessage]], Fault | None]
"""The fault that a second parser finds in a text and its messages, or None."""


def judge(
    text: str,
    parsed: Sequence[ParsedMessage] | Fault,
    declared: Schemas | None = None,
    off: frozenset[str] = NONE_OFF,
    least: int = 1,
    second_parser: Parser | None = cross_check,
) -> Quality:
    """Return the quality of a text that `parse` reads as `parsed`.

    `declared` are the recipients that may be called, with their schemas, or None if they are unknown. `off` holds codes of
    rules that are switched off. A completion is an answer of at least `least` characters, not counting blanks at its ends, or a
    call.
    """
    if isinstance(parsed, Fault):
        return Quality(quality_error_code=parsed.code, quality_error_offset=parsed.offset, error_detail=parsed.detail)
    found = faults(parsed, declared, off, declared)
    errors = [fault for fault in found if fault.code not in WARNINGS]
    error = next(iter(errors), None) or (second_parser and second_parser(text, parsed))
    last = parsed[-1]
    answers = last.author == "assistant" and last.channel == "final"
    is_long = bool(last.body.strip()) and len(last.body.strip()) >= least
    calls = sum(message.author == "assistant" and message.recipient is not None for message in parsed)
    results = sum(message.author not in ROLES for message in parsed)
    return Quality(
        quality_valid_harmony=error is None,
        quality_completion_nonempty=is_long if answers else last.author == "assistant" and last.terminator == "call",
        quality_completion_ends_with_return=last.terminator == "return",
        quality_has_tool=bool(calls or results),
        quality_valid_tool_schema=all(fault.code not in TOOL_CODES for fault in found),
        quality_error_code=error and error.code,
        quality_error_offset=error and error.offset,
        error_detail=error and error.detail,
        num_messages=len(parsed),
        num_tool_calls=calls,
        num_tool_results=results,
    )


STAND_IN = "{}"  # a body that passes every rule in any position


@dataclass(slots=True)
class ValidText:
    """A text that the grammar and the rules accept, in its parts.

    Message i is `openings[i]`, `bodies[i]` and an end; `spoken[i]` is whether it is by the assistant. `prompt` is the number
    of characters before the assistant's first message.
    """

    text: str
    openings: Sequence[str]
    bodies: Sequence[str]
    spoken: Sequence[bool]
    prompt: int
    quality: Quality


@dataclass(frozen=True, slots=True)
class _Outline:
    """The headers of a valid conversation. `calls` are the numbers of the assistant's messages with a recipient, `first` is the
    number of the assistant's first message; `quality` belongs to a text with an answer and arguments that fit.
    """

    spoken: tuple[bool, ...]
    calls: tuple[int, ...]
    first: int
    quality: Quality


def accepted(composed: Composed, off: frozenset[str], least: int) -> ValidText | None:
    """Return the text of a conversation that is valid, or None if that is in doubt; `off` and `least` as for `judge`."""
    messages = composed.messages
    # A body with `<|` may be read differently, so it is parsed.
    if not composed.tagless or not messages:
        return None
    try:
        # Cached, too; a header that wouldn't be read back raises.
        openings = tuple([opening(message) for message in messages])
    except FaultError:
        return None
    ends = tuple([ENDS[message.terminator] for message in messages])
    outline = _outline(openings, ends, off)
    if outline is None:
        return None
    known = composed.declared
    broken = {
        code
        for number in outline.calls
        for code, _ in argument_faults(str(messages[number].recipient), messages[number].body, known, known or {})
    } - off
    completes = messages[-1].terminator == "call" or len(messages[-1].body.strip()) >= max(1, least)
    if broken - WARNINGS or not completes or ("S22" not in off and any(prompt_faults(messages))):
        return None
    # The outline is shared by all conversations with these headers, so its quality isn't changed in place.
    quality = replace(outline.quality, quality_valid_tool_schema=False) if broken else outline.quality
    bodies = [message.body for message in messages]
    pieces = [piece for message in zip(openings, bodies, ends, strict=True) for piece in message]
    text = "".join(pieces)
    if not is_whole(text):
        return None
    prompt = sum(map(len, pieces[: 3 * outline.first]))
    return ValidText(text, openings, bodies, outline.spoken, prompt, quality)


@lru_cache(maxsize=4096)
def _outline(openings: tuple[str, ...], ends: tuple[str, ...], off: frozenset[str]) -> _Outline | None:
    """The outline of these headers; None if they break the grammar or a rule, or do not end in an answer or a call."""
    # The body passes every rule, so the verdict is about headers and ends only.
    text = "".join([f"{opening}{STAND_IN}{end}" for opening, end in zip(openings, ends, strict=True)])
    messages = parse(text)
    quality = judge(text, messages, None, off, second_parser=None)
    if isinstance(messages, Fault) or not (quality.quality_valid_harmony and quality.quality_completion_nonempty):
        return None
    spoken = tuple(message.author == "assistant" for message in messages)
    calls = tuple(number for number, message in enumerate(messages) if spoken[number] and message.recipient is not None)
    return _Outline(spoken, calls, spoken.index(True), quality)


def judged(
    composed: Composed, off: frozenset[str], least: int, second_parser: Parser | None
) -> tuple[ValidText | None, Quality]:
    """Return the text of a conversation, parsed and judged, or None if it is invalid; and its quality."""
    text = render(composed.messages)
    messages = parse(text)
    quality = judge(text, messages, composed.declared, off, least, second_parser)
    if isinstance(messages, Fault) or not quality.quality_valid_harmony:
        return None, quality
    return in_parts(text, messages, quality), quality


def in_parts(text: str, messages: Sequence[ParsedMessage], quality: Quality) -> ValidText:
    """Return a valid text in its parts, given its messages."""
    spoken = [message.author == "assistant" for message in messages]
    return ValidText(
        text,
        [text[message.start : message.body_start] for message in messages],
        [message.body for message in messages],
        spoken,
        next((message.start for message in messages if message.author == "assistant"), len(text)),
        quality,
    )
