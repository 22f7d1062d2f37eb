"""The strict grammar of Harmony text.

    conversation = message { message }
    message      = "<|start|>" author [" to=" recipient] ["<|channel|>" channel] [" " type] "<|message|>" body terminator
    type         = word | "<|constrain|>" word
    terminator   = "<|end|>" | "<|call|>" | "<|return|>"

No text is allowed before, between or after messages, and none of the 1,092 special strings in a body. A recipient may also
follow its channel, and the blank before `<|constrain|>` may be missing, because models write both; rendering writes the
canonical form. Everything else is a fault; the first one is reported with code and offset. The reference reads every accepted
text as the same messages. It also accepts missing terminators, nested starts and stray tags, which are faults here.

One scan with one regular expression finds the tags: 0.4 µs per KB, 1 µs outside ASCII, 3 µs per message. Headers are from a
small set, so each is parsed once and cached.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .message import ROLES, HarmonyMessage, Terminator

TAG = re.compile(
    r"<\|(?:start|end|message|channel|return|call|constrain|startoftext|endoftext|endofprompt"
    r"|reserved_(?!20000[235678]|200012)20(?:0[0-9]{3}|10[0-7][0-9]|108[0-8]))\|>"
)
"""Any special string; the excluded numbers have names."""

START, MESSAGE, CHANNEL, CONSTRAIN = "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"

TERMINATORS: dict[str, Terminator] = {"<|end|>": "end", "<|call|>": "call", "<|return|>": "return"}

TO = "to="

WORD = re.compile(r"[^\s<]+")
"""A name in a header. The reference ends a channel at `<`, so words must not contain it."""

ALL_RECIPIENTS = "all"  # a recipient that the reference omits when rendering, so that it cannot reproduce such a text

CODES = {
    "E01": "empty_text",
    "E02": "text_outside_message",
    "E03": "missing_message_tag",
    "E04": "missing_terminator",
    "E05": "nested_start",
    "E06": "special_in_body",
    "E07": "empty_author",
    "E08": "unknown_author",
    "E09": "empty_channel",
    "E10": "duplicate_channel_tag",
    "E11": "bad_header_token",
    "E12": "bad_constrain",
    "E13": "not_str",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and its offset in characters."""

    code: str
    name: str
    offset: int
    detail: str


@dataclass(slots=True, kw_only=True)
class ParsedMessage(HarmonyMessage):
    """A message and its offsets in characters: [start, end) with tags, [body_start, body_end) without."""

    start: int
    end: int
    body_start: int
    body_end: int

    @property
    def message(self) -> HarmonyMessage:
        return HarmonyMessage(
            self.author, self.body, self.recipient, self.channel, self.content_type, self.constrained, self.terminator
        )


class Header(NamedTuple):
    """The text between `<|start|>` and `<|message|>`."""

    author: str
    recipient: str | None
    channel: str | None
    content_type: str | None
    constrained: bool


class FaultError(ValueError):
    """Raised for a fault and caught by `parse`."""

    def __init__(self, code: str, offset: int, detail: str) -> None:
        super().__init__(detail)
        self.fault = Fault(code, CODES[code], offset, detail)


def parse(text: object) -> list[ParsedMessage] | Fault:
    """Return the messages of a Harmony text, at least one, or the first fault; in a header, tags are checked before words."""
    try:
        return list(_messages(text))
    except FaultError as error:
        return error.fault


def bodies(text: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the author and the body of each message of a text that `parse` accepts, in half of the time, all in UTF-8.

    Raises ValueError for a text that is obviously none.
    """
    before, *messages = text.split(START.encode())
    if before or not messages:
        raise ValueError(f"{text[:40]!r} does not begin with {START}")
    for message in messages:
        # The text was accepted, so a body ends at its last `<|`.
        header, _, rest = message.partition(MESSAGE.encode())
        yield read_header(header.decode()).author, rest[: rest.rindex(b"<|")]


def check_characters(text: str) -> None:
    """Raises FaultError, E13, for a lone surrogate, which cannot be encoded."""
    if text.isascii():
        return
    try:
        text.encode("utf-16-le")  # the fastest codec that rejects surrogates
    except UnicodeEncodeError as error:
        raise FaultError("E13", error.start, "a lone surrogate is half a character and no text") from error


def is_whole(text: str) -> bool:
    """Return whether a text is without lone surrogates."""
    try:
        check_characters(text)
    except FaultError:
        return False
    return True


def _messages(text: object) -> Iterator[ParsedMessage]:
    if not isinstance(text, str):
        raise FaultError("E13", 0, f"Harmony text is a string, not {type(text).__name__}")
    if not text:
        raise FaultError("E01", 0, "a message is missing")
    check_characters(text)
    tags = TAG.finditer(text)  # one scan: each of the three steps of a message takes its tags from it
    end = 0
    for tag in tags:
        if tag.start() != end or tag[0] != START:
            raise FaultError("E02", end, f"{text[end : end + 40]!r} is where {START} must")
        start = end
        body_start = _body_start(text, tags)
        try:
            header = read_header(text[start + len(START) : body_start - len(MESSAGE)])
        except FaultError as error:  # whose offset is within the header
            fault = error.fault
            raise FaultError(fault.code, start + len(START) + fault.offset, fault.detail) from error
        closing = next(tags, None)
        if closing is None:
            why = "the text ends within a body; end it with <|end|>, <|call|> or <|return|>"
            raise FaultError("E04", len(text), why)
        if closing[0] not in TERMINATORS:
            code = "E05" if closing[0] == START else "E06"
            raise FaultError(code, closing.start(), f"{closing[0]} is in a body")
        body_end, end = closing.span()
        yield ParsedMessage(
            header.author, text[body_start:body_end], *header[1:], TERMINATORS[closing[0]],
            start=start, end=end, body_start=body_start, body_end=body_end,
        )  # fmt: skip
    if end != len(text):
        raise FaultError("E02", end, f"{text[end : end + 40]!r} is outside of any message")


def _body_start(text: str, tags: Iterator[re.Match[str]]) -> int:
    """The offset after the header's `<|message|>`; takes the header's tags from `tags`, which must be in order."""
    passed = ""
    for tag in tags:
        kind = tag[0]
        if kind == MESSAGE:
            return tag.end()
        if kind == START or kind in TERMINATORS:
            raise FaultError("E03", tag.start(), f"{kind} is where {MESSAGE} must")
        # A channel precedes a content type, and each occurs once.
        if kind == CHANNEL:
            if passed:
                raise FaultError("E10", tag.start(), f"{kind} is after {passed}")
        elif kind != CONSTRAIN:
            raise FaultError("E11", tag.start(), f"{kind} is in a header")
        elif passed == CONSTRAIN:
            raise FaultError("E12", tag.start(), f"{kind} appears twice")
        passed = kind
    raise FaultError("E03", len(text), f"the text ends where {MESSAGE} must be")


@lru_cache(maxsize=4096)
def read_header(header: str) -> Header:
    """Return the parts of a header whose tags are in order. Raises FaultError with an offset within the header."""
    # Tags are in order already, so each part of the header is behind its tag.
    named, tag, constraint = header.partition(CONSTRAIN)
    if tag:
        named = named.removesuffix(" ")  # this blank may be missing
    speaking, channel_tag, channelled = named.partition(CHANNEL)
    author, *words = speaking.split(" ")
    _check_word(author, "E07", 0, "author")
    # A content type is the last word of a header, so it is here only if no tag follows.
    recipient, plain = _words(words, len(author) + 1, None, types=not (tag or channel_tag))
    if recipient is None and author not in ROLES:
        raise FaultError("E08", 0, f"{author!r} isn't a role, and a tool's name needs a recipient after it")
    channel = None
    if channel_tag:
        start = len(speaking) + len(CHANNEL)
        channel, *words = channelled.split(" ")
        _check_word(channel, "E09", start, "channel")
        recipient, plain = _words(words, start + len(channel) + 1, recipient, types=not tag)
    if not tag:
        return Header(author, recipient, channel, plain, constrained=plain is None)
    if recipient is None:
        why = f"{CONSTRAIN} is in a header without a recipient, and would be read as one"
        raise FaultError("E12", header.index(CONSTRAIN), why)
    if not WORD.fullmatch(constraint):
        why = f"{constraint!r} isn't a content type: one word must follow {CONSTRAIN} at once"
        raise FaultError("E12", len(header) - len(constraint), why)
    return Header(author, recipient, channel, constraint, constrained=True)


def _check_word(word: str, code: str, offset: int, what: str) -> None:
    if not word or word.startswith(TO):
        raise FaultError(code, offset, f"there is no {what}")
    if not WORD.fullmatch(word):
        raise FaultError("E11", offset, f"{word!r} is no {what}: it holds white space or '<'")


def _words(words: list[str], offset: int, recipient: str | None, *, types: bool) -> tuple[str | None, str | None]:
    """The recipient and the plain content type among words at `offset`, each at most once and in this order; `types` allows
    a content type, if there is a recipient.
    """
    plain = None
    for word in words:
        if plain is not None or not WORD.fullmatch(word):
            raise FaultError("E11", offset, f"{word!r} does not belong in a header; one blank parts its words")
        if not word.startswith(TO):
            if not types or recipient is None:
                raise FaultError("E11", offset, f"{word!r} is neither a recipient nor a content type after one")
            plain = word
        elif recipient is not None or word in {TO, TO + ALL_RECIPIENTS}:
            raise FaultError("E11", offset, f"{word!r} is not the one recipient")
        else:
            recipient = word.removeprefix(TO)
        offset += len(word) + 1
    return recipient, plain
