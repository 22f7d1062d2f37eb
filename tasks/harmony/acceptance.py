"""Valid Harmony text: accepted by its headers, or else parsed and judged.

A text of messages is read differently only if a body holds a control string, and these begin with `<|`. If no body holds `<|`,
and the grammar reads every header back, the text parses to its messages without a further search. Most rules,
too, are about headers: channels, recipients, order, ends. A corpus has few sequences of headers, so each is parsed and judged
once, with an empty object as every body, and the verdict is cached. Only questions, the arguments of calls and the last
answer are then looked at in each row.

`accepted` only accepts. It returns None for whatever is doubtful (a body with `<|`, half a character, a broken rule, no
answer), and the caller parses the text (`judged`), which finds the fault and its place. Accepting takes 1 µs per message,
parsing and judging 8.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from .grammar import Fault, FaultError, ParsedMessage, is_whole, parse
from .message import Composed, HarmonyMessage, Schemas
from .render import ENDS, opening, render
from .semantics import WARNINGS, Parser, Quality, argument_faults, judge, prompt_faults

STAND_IN = "{}"
"""A body that passes every rule in any position."""


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
    """The text of a conversation that is valid, or None if that is in doubt; `off` and `least` as for `judge`."""
    messages = composed.messages
    if not composed.tagless or not messages:
        return None
    try:
        openings = tuple([opening(message) for message in messages])
    except FaultError:
        return None
    ends = tuple([ENDS[message.terminator] for message in messages])
    outline = _outline(openings, ends, off)
    if outline is None:
        return None
    quality = _with_arguments(outline, messages, composed.declared, off)
    completes = messages[-1].terminator == "call" or len(messages[-1].body.strip()) >= max(1, least)
    if quality is None or not completes or ("S22" not in off and any(prompt_faults(messages))):
        return None
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
    text = "".join([f"{opening}{STAND_IN}{end}" for opening, end in zip(openings, ends, strict=True)])
    messages = parse(text)
    quality = judge(text, messages, None, off, second_parser=None)
    if isinstance(messages, Fault) or not (quality.quality_valid_harmony and quality.quality_completion_nonempty):
        return None
    spoken = tuple(message.author == "assistant" for message in messages)
    calls = tuple(number for number, message in enumerate(messages) if spoken[number] and message.recipient is not None)
    return _Outline(spoken, calls, spoken.index(True), quality)


def _with_arguments(
    outline: _Outline, messages: Sequence[HarmonyMessage], declared: Schemas | None, off: frozenset[str]
) -> Quality | None:
    """The quality with the arguments of its calls; None if they break a rule."""
    found = [
        code
        for number in outline.calls
        for code, _ in argument_faults(str(messages[number].recipient), messages[number].body, declared, declared or {})
        if code not in off
    ]
    if not found:
        return outline.quality
    return replace(outline.quality, quality_valid_tool_schema=False) if WARNINGS.issuperset(found) else None


def judged(
    composed: Composed, off: frozenset[str], least: int, second_parser: Parser | None
) -> tuple[ValidText | None, Quality]:
    """The text of a conversation, parsed and judged, or None if it is invalid; and its quality."""
    text = render(composed.messages)
    messages = parse(text)
    quality = judge(text, messages, composed.declared, off, least, second_parser)
    if isinstance(messages, Fault) or not quality.quality_valid_harmony:
        return None, quality
    return in_parts(text, messages, quality), quality


def in_parts(text: str, messages: Sequence[ParsedMessage], quality: Quality) -> ValidText:
    """A valid text in its parts, given its messages."""
    spoken = [message.author == "assistant" for message in messages]
    return ValidText(
        text,
        [text[message.start : message.body_start] for message in messages],
        [message.body for message in messages],
        spoken,
        next((message.start for message in messages if message.author == "assistant"), len(text)),
        quality,
    )
