"""Text that keeps its origin while a template trims, splits and joins it.

A `Traced` is a string with spans, which map its characters to the content of a message. The operations that templates use
(strip, split, slice, replace, join, `+`) keep the spans; any other operation returns a plain string, whose origin is unknown
but never wrong. Marks are empty spans: "message 3 begins here". An operation takes a microsecond, and only assistant and tool
contents are traced.

Templates get messages and tool calls as dicts that carry their number. An assistant that only calls tools has an empty content
instead of None, because templates that print contents would print `None`.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, Self, SupportsIndex, cast

from .conversation import Arguments, Message

Kind = Literal["content", "reasoning", "call", "result", "message", "loop", "end", "generated", "end_generated"]

Origin = tuple[int, Kind]  # the number of a message (of a loop, for `loop` and `end`), and which part of it this is
Span = tuple[int, int, Origin]  # first character, end, and origin


class Traced(str):
    """A string and the spans of known origin in it, in order of their beginning."""

    __slots__ = ("spans",)
    spans: tuple[Span, ...]

    def __new__(cls, text: str, spans: tuple[Span, ...] = ()) -> Self:
        traced = str.__new__(cls, text)
        traced.spans = spans
        return traced

    def __str__(self) -> str:
        return self

    def _cut(self, start: int, stop: int) -> "Traced":
        """Return the characters `[start, stop)` with their spans; a span that is cut off completely remains as an empty one."""
        # Stripping a text without blanks is the usual case.
        if start == 0 and stop == len(self):
            return self
        kept = [
            (max(first, start) - start, min(last, stop) - start, origin)
            for first, last, origin in self.spans
            if (first < stop and last > start) or ((first == last or start == stop) and first <= stop and last >= start)
        ]
        return Traced(str.__getitem__(self, slice(start, stop)), tuple(kept))

    def lstrip(self, chars: str | None = None, /) -> "Traced":
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> "Traced":
        return self._cut(0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> "Traced":
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> "Traced":
        return self._cut(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> "Traced":
        return self._cut(0, len(str.removesuffix(self, suffix)))

    def __getitem__(self, key: SupportsIndex | slice, /) -> str:
        if not isinstance(key, slice) or key.step not in {None, 1}:
            return str.__getitem__(self, key)
        start, stop, _ = key.indices(len(self))
        return self._cut(start, max(start, stop))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """See str; without a separator the parts are plain."""
        parts = str.split(self, sep, maxsplit)
        return parts if sep is None else list(self._consecutive(parts, len(sep)))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """See str; without a separator the parts are plain."""
        parts = str.rsplit(self, sep, maxsplit)
        return parts if sep is None else list(self._consecutive(parts, len(sep)))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._consecutive(str.partition(self, sep), 0)
        return head, middle, tail

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._consecutive(str.rpartition(self, sep), 0)
        return head, middle, tail

    def _consecutive(self, parts: Iterable[str], between: int) -> Iterator["Traced"]:
        start = 0
        for part in parts:
            yield self._cut(start, start + len(part))
            start += len(part) + between

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """See str; the origin of the replacement isn't known."""
        return joined(self.split(old, count), new) if old else str.replace(self, old, new, count)


def joined(parts: Iterable[str], between: str = "") -> str:
    """Return the joined parts with all their spans; plain if no part has any."""
    texts = list(parts)
    # Most pieces of a rendering are plain.
    if Traced not in map(type, texts):
        return between.join(texts)
    spans: list[Span] = []
    place = 0
    for text in texts:
        if type(text) is Traced:
            for first, last, origin in text.spans:
                spans.append((place + first, place + last, origin))
        place += len(text) + len(between)
    return Traced(between.join(texts), tuple(spans))


@lru_cache(maxsize=4096)
def mark(*origins: Origin) -> Traced:
    """Return an empty text whose spans mark what begins or ends here."""
    return Traced("", tuple((0, 0, origin) for origin in origins))


class ToolCallRecord(dict[str, Any]):
    """A tool call; `message` is the number of its message."""

    __slots__ = ("message",)
    message: int


class MessageRecord(dict[str, Any]):
    """A message; `number` is its position in the conversation."""

    __slots__ = ("number",)
    number: int


def records(messages: Sequence[Message]) -> list[MessageRecord]:
    """Return the messages for a template: numbered, with traced contents."""
    return [_record(number, message) for number, message in enumerate(messages)]


def _record(number: int, message: Message) -> MessageRecord:
    content, reasoning = message["content"] or "", message.get("reasoning_content")
    record = MessageRecord(message if reasoning is None else {"thinking": "", **message})
    record.number = number
    for name in ("trained", "cut"):
        record.pop(name, None)
    if message["role"] == "tool":  # some templates write it into the turn of the assistant
        record["content"] = Traced(content, ((0, len(content), (number, "result")),))
    if message["role"] != "assistant":
        return record
    record["content"] = Traced(content, ((0, len(content), (number, "content")),))
    if reasoning is not None:
        traced = Traced(reasoning, ((0, len(reasoning), (number, "reasoning")),))
        record["thinking"] = record["reasoning_content"] = traced  # newer templates of OpenAI's read `thinking`
    if "tool_calls" in message:
        calls: list[ToolCallRecord] = []
        for call in message["tool_calls"]:
            made, function = ToolCallRecord(call), call["function"]
            made.message = number
            # The name and the arguments keep their origin even if a template reads them indirectly.
            name, arguments = _called(function["name"], number), function["arguments"]
            traced = Arguments(arguments, _called(arguments.text, number), number)
            made["function"] = {**function, "name": name, "arguments": traced}
            calls.append(made)
        record["tool_calls"] = calls
    return record


def _called(text: str, number: int) -> Traced:
    return Traced(text, ((0, len(text), (number, "call")),))


def caller(value: object) -> Origin | None:
    """Return the origin of the JSON of a value: of calls, or of a name or the arguments of one."""
    # Of a list of calls, all are of one message.
    first = cast("list[object]", value)[0] if isinstance(value, list) and value else value
    if isinstance(first, (ToolCallRecord, Arguments)):
        return (first.message, "call") if first.message >= 0 else None
    origin = first.spans[0][2] if isinstance(first, Traced) and first.spans else None
    return origin if origin is not None and origin[1] == "call" else None
