"""Control tokens: written by a template, or spelled in the data.

The added tokens that occur in a template or its renderings are its controls. They become single ids, and the text between them
is encoded by an encoder that does not know them. So are tags of thinking, calls and results that are added tokens, but that the
template doesn't write: in answers they are ids, as anything that a model writes, and text elsewhere. If the data spells one (`<|im_end|>` in a web page), a Unicode noncharacter is
inserted into it before rendering and removed afterwards, so data cannot end a turn or move a boundary.

A search takes about 0.3 ns per character, because most texts have no `<`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from .conversation import Arguments, Conversation, Message

NONCHARACTERS = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4\ufdd5\ufdd6\ufdd7"
"""Code points that Unicode reserves for internal use (section 23.7 of the standard)."""


TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that models write and tokenizers don't flag as special, so that users can spell them."""


@dataclass(frozen=True)
class Controls:
    """The control tokens of a template and their ids. Those `in_answers`, which it doesn't write, are text elsewhere in data."""

    ids: Mapping[str, int]
    in_answers: frozenset[str] = frozenset()

    @cached_property
    def written(self) -> "Controls":
        """Those that the template writes."""
        # Most templates write all tags that the tokenizer has, and are their own `written`.
        kept = {token: number for token, number in self.ids.items() if token not in self.in_answers}
        return Controls(kept) if self.in_answers else self

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return a pattern for control tokens, the longest first; without any, it never matches."""
        # An alternation takes the first that fits, so a token that begins like a longer one is behind it.
        longest_first = sorted(self.ids, key=lambda token: (-len(token), token))
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    @cached_property
    def beginning(self) -> re.Pattern[str]:
        """Matches the first character of every control token, overlapping ones included."""
        return re.compile(f"(?=(?:{'|'.join(map(re.escape, self.ids)) or '(?!)'}))(.)", re.DOTALL)

    @cached_property
    def _beginnings(self) -> list[str]:
        """The first characters of control tokens: searching for these takes a tenth of the pattern's time."""
        return sorted({token[0] for token in self.ids})

    def occur_in(self, text: str) -> bool:
        # Searching for a character is memchr; most texts end here.
        for first in self._beginnings:
            if first in text:
                return self.pattern.search(text) is not None
        return False

    def last(self, text: str, start: int, stop: int) -> tuple[int, int] | None:
        """Beginning and end of the last control token in `[start, stop)`."""
        places = [(text.rfind(token, start, stop), len(token)) for token in self.ids]
        place, length = max(places, default=(-1, 0))
        return (place, place + length) if place >= 0 else None

    def spelled_in(self, conversation: Conversation) -> bool:
        """Return whether the data spells a control token anywhere, except tags in answers."""
        if not any(self.occur_in(text) for text in _texts(conversation)):
            return False
        answers = [message["content"] or "" for message in conversation.messages if message["role"] == "assistant"]
        others: list[Message] = [
            {**message, "content": ""} if message["role"] == "assistant" else message
            for message in conversation.messages
        ]
        written = any(self.written.occur_in(text) for text in answers)
        return written or any(self.occur_in(text) for text in _texts(replace(conversation, messages=others)))


PLAIN = ("role", "content")  # the keys of every message


def _texts(conversation: Conversation) -> Iterable[str]:
    for message in conversation.messages:
        yield message["content"] or ""
        if len(message) == len(PLAIN):
            continue
        yield message.get("reasoning_content", "")
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"]
            yield from _strings(call["function"]["arguments"])
            yield call["function"]["arguments"].text
            yield call.get("id", "")
        yield message.get("name", "")
        yield message.get("tool_call_id", "")
    yield from _strings(conversation.tools)


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            yield from _strings(inner)


def unused_noncharacter(conversation: Conversation) -> str | None:
    """Return a noncharacter that the conversation does not contain, or None."""
    # One of eight is absent from any real text, and the search is for a single character.
    everything = "".join(_texts(conversation))
    return next((each for each in NONCHARACTERS if each not in everything), None)


def escape_controls(conversation: Conversation, controls: Controls, noncharacter: str) -> Conversation:
    """Return the conversation with `noncharacter` after the first character of every control token in its data."""

    def broken(text: str, those: Controls) -> str:
        return those.beginning.sub(rf"\1{noncharacter}", text)

    def escaped(value: Any) -> Any:  # noqa: ANN401 - JSON
        if isinstance(value, str):
            return broken(value, controls)
        if isinstance(value, dict):
            made = {escaped(key): escaped(inner) for key, inner in cast("dict[str, Any]", value).items()}
            return Arguments(made, escaped(value.text)) if isinstance(value, Arguments) else made
        if isinstance(value, list):
            return [escaped(inner) for inner in cast("list[Any]", value)]
        return value

    def escaped_message(message: Message) -> Message:
        made = cast("Message", {name: value if name == "role" else escaped(value) for name, value in message.items()})
        if message["role"] == "assistant" and message["content"]:
            # Tags that the template doesn't write are ids in answers.
            made["content"] = broken(message["content"], controls.written)
        if "trained" in message:
            # The place of each character in the longer text, and of its end: noncharacters were inserted only.
            places, longer = list[int](), made["content"] or ""
            for character in message["content"] or "":
                places.append(longer.index(character, places[-1] + 1 if places else 0))
            places.append(len(longer))
            made["trained"] = tuple((places[start], places[stop]) for start, stop in message["trained"])
        return made

    tools = cast("list[dict[str, Any]]", escaped(conversation.tools))
    return Conversation([escaped_message(message) for message in conversation.messages], tools)


def controls_of(texts: Sequence[str], added: Mapping[str, int]) -> Controls:
    """Return the added tokens that occur in a template's source or renderings, without single characters and blanks, and TAGS."""
    written = {
        token: number
        for token, number in added.items()
        if len(token) > 1 and token.strip() and any(token in text for text in texts)
    }
    # A tag that no rendering has is the model's own, written in its answers only.
    tags = {token: added[token] for token in TAGS if token in added and token not in written}
    return Controls(written | tags, frozenset(tags))
