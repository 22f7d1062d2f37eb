"""What a mask has to be, told from transformers' renderings and the words of `talks.py` alone.

An answer is what follows the generation prompt. The prompt ends where the template, asked for one behind the messages
before, ends its text; the answer ends with the first control token behind all of its own words. Where a template
rewrites history the text before differs, and the prompt is looked for between the words of the message before and the
first of the answer.
"""

import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from unittest import mock

from transformers.utils import chat_template_utils

from tests.peers.templates.talks import FOREIGN, LEARNED, Record

TODAY = datetime(2026, 3, 1, 12)  # noqa: DTZ001 - transformers' own has no zone
ASKED = ({}, {"enable_thinking": True}, {"enable_thinking": False}, {"thinking": True}, {"thinking": False})
"""What the serving side may ask for; the first is what it asks for by default."""

TOKEN = re.compile(
    r"<\|[^<>|\s{}'\"]{1,40}\|?>|<[a-z_]{1,20}\|>|<\uff5c[^<>{}'\"]{1,40}\uff5c>|</?s>|</?(?:think|tool_call|tool_response|tool_calls|ifm\|\w+)>"
    r"|<(?:start|end)_of_(?:turn|utterance|text)>|<(?:bos|eos|sep|row_sep|extra_id_\d+|unused\d+|SPECIAL_\d+|reserved_\d+)>"
    r"|\[\|[^\[\]|\s]{1,30}\|\]|<seed:[\w/]+>|</seed:\w+>|\]~[!b]?b?\[?\]?|\[e~\["
    r"|\[/?(?:INST|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CONTENT|ARGS|CALL_ID|SYSTEM_PROMPT|THINK|MODEL_SETTINGS)\]"
    r"|<(?:end_of_sentence|beginning_of_sentence|begin_of_document|_[a-z]+|reserved_token_\d+|end_of_role|start_of_role|end_of_text|start_of_text|message|role_sep|message_sep)>"
)
"""What looks like a control token of some family."""


class _Today(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return TODAY


def with_text_arguments(message: Mapping[str, Any], text: Any) -> Record:
    """The message with the arguments of its calls as JSON text."""
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        {**call, "function": {**call["function"], "arguments": text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


@dataclass
class Reference:
    """A template as transformers renders it."""

    source: str
    variables: dict[str, Any] = field(default_factory=dict)
    _known: dict[str, str | None] = field(default_factory=dict)

    @property
    def asked(self) -> list[dict[str, bool]]:
        """What the serving side may ask of this template; the first is nothing."""
        return [each for each in ASKED if all(name in self.source for name in each)]

    def render(self, messages: Sequence[Record], tools: Any, prompt: bool = False, **asked: Any) -> str | None:
        """The text, None where the template refuses."""
        question = repr((messages, tools, prompt, asked))
        if question not in self._known:
            self._known[question] = self._rendered(messages, tools, prompt, **asked)
        return self._known[question]

    def _rendered(self, messages: Sequence[Record], tools: Any, prompt: bool, **asked: Any) -> str | None:
        with mock.patch.object(chat_template_utils, "datetime", _Today):
            try:
                (text,), _ = chat_template_utils.render_jinja_template(
                    [list(messages)], tools or None, None, self.source, add_generation_prompt=prompt,
                    **self.variables, **asked,
                )  # fmt: skip
            except Exception:  # noqa: BLE001 - whatever a template dies of, it renders nothing
                return None
        return text

    def tagged(self, messages: Sequence[Record], tools: Any) -> list[tuple[int, int]]:
        """The characters inside the template's own generation tags."""
        with mock.patch.object(chat_template_utils, "datetime", _Today):
            _, ((*ranges,),) = chat_template_utils.render_jinja_template(
                [list(messages)], tools or None, None, self.source, return_assistant_tokens_mask=True,
                **self.variables,
            )  # fmt: skip
        return ranges


def words_of(message: Mapping[str, Any]) -> list[str]:
    """The words that only this message has."""
    pattern = LEARNED if message["role"] == "assistant" else FOREIGN
    return pattern.findall(str(dict(message)))


Words = tuple[int, int]


@dataclass
class Expected:
    """Where an answer begins and ends in a text, None where that cannot be told, and where its words are."""

    start: int | None
    stop: int | None
    words: tuple[int, int] | None


Words = tuple[int, int]


class Judge:
    """Tells what should be trained on in a rendering of `messages`, of which `text` is the whole.

    `tokens` finds the control tokens. `open_ended` says that no answer has an end of its own, so that the first token of
    what follows ends it. `prompts` are the generation prompts behind a plain question, the default first.
    """

    def __init__(self, reference: Reference, tokens: re.Pattern[str], *, open_ended: bool) -> None:
        self.reference, self.tokens, self.open_ended = reference, tokens, open_ended
        question = [{"role": "user", "content": "What about user0x?"}]
        self.prompts = [self._added(question, None, each) for each in reference.asked]

    def expected(self, text: str, messages: Sequence[Record], tools: Any, number: int) -> Expected:
        """What is expected of one answer."""
        places = [(text.find(word), word) for word in words_of(messages[number])]
        found = [(place, place + len(word)) for place, word in places if place >= 0]
        words = (min(found)[0], max(found)[1]) if found else None
        start = self._start(text, messages, tools, number, words)
        if words is None and start is None:
            return Expected(None, None, None)
        stop = self._stop(text, messages, tools, number, words or (start or 0, start or 0))
        return Expected(start, stop, words)

    def _start(self, text: str, messages: Sequence[Record], tools: Any, number: int, words: Words | None) -> int | None:
        """Where the text goes on from a generation prompt; or else behind the last prompt between the words of others and
        the answer's own; or else behind what the text there has in common with one. The default prompt comes first.
        """
        before, asked = messages[:number], self.reference.asked
        answers = number > 0 and messages[number - 1]["role"] in {"user", "tool"}
        plain = self.reference.render(before, tools)
        whole = [self.reference.render(before, tools, prompt=True, **each) for each in asked]
        default, *others = [each if answers or each != plain else None for each in whole]
        added = [self._added(before, tools, each) for each in asked] if answers else self.prompts
        gap = self._gap(text, words)
        for prompted, shown in [(default, added[:1]), *((each, []) for each in _long_first(others)), (None, added)]:
            if prompted is not None and text.startswith(prompted):
                return len(prompted)
            places = [gap[0] + gap[1].rfind(each) + len(each) for each in _long_first(shown) if each in gap[1]]
            if places:
                return places[0]
        parts = [part for each in added for part in self._parts(each) if part in gap[1] and self.tokens.search(part)]
        return max((gap[0] + gap[1].rfind(each) + len(each) for each in parts), default=None)

    def _gap(self, text: str, words: Words | None) -> tuple[int, str]:
        """Where the words of others end, and the text from there to the answer's own."""
        if words is None:
            return len(text), ""
        before = list(re.finditer(f"{FOREIGN.pattern}|{LEARNED.pattern}", text[: words[0]]))
        start = before[-1].end() if before else 0
        return start, text[start : words[0]]

    def _parts(self, prompt: str) -> list[str]:
        """The beginnings of a prompt that end with a token or a line."""
        return [prompt[: match.end()] for match in re.finditer(f"{self.tokens.pattern}|\n", prompt)]

    def _added(self, messages: Sequence[Record], tools: Any, asked: Mapping[str, bool]) -> str:
        """What asking for a generation prompt adds to a text."""
        plain = self.reference.render(messages, tools, **asked)
        prompted = self.reference.render(messages, tools, prompt=True, **asked)
        return prompted[len(plain) :] if plain is not None and prompted and prompted.startswith(plain) else ""

    def _stop(self, text: str, messages: Sequence[Record], tools: Any, number: int, words: Words) -> int | None:
        """Behind the last token that is written whether the answer is the last message or not; where there is none, behind
        the first, if the text of the answer alone has one as well. None where a header may be what follows.
        """
        alone = self.reference.render(messages[: number + 1], tools)
        if self.open_ended:
            return self._stop_in_next(text, alone)
        follows = messages[number + 1 : number + 2] or [{"role": "user", "content": "And user0x?"}]
        followed = self.reference.render([*messages[: number + 1], *follows], tools)
        head = max((each for each in words_of(messages[number]) if each in text), key=text.find, default="")
        head = head or text[: words[1]]
        tails = [each[each.find(head) + len(head) :] for each in (alone, followed) if each and head in each]
        if alone is None or head not in alone or self._ends_with_header(text, words, tails[0]):
            return None
        tail, speaks = text[words[1] :], words[0] < words[1]
        first = self.tokens.search(tail)
        if first is None or min(len(_common([tail, each])) for each in tails) < first.start():
            return None  # the template writes the answer in another way where it is the last message, or is not
        common = _common([tail, *tails])
        own = max((match.end() for match in self.tokens.finditer(common)), default=0)
        ending = self.tokens.search(tails[0], own)
        if own:
            return words[1] + own if speaks or ending is None else None
        return words[1] + first.end() if speaks and ending else None

    def _stop_in_next(self, text: str, alone: str | None) -> int | None:
        if alone is None or not text.startswith(alone):
            return None
        following = self.tokens.match(text, len(alone))
        return following.end() if following else len(text) if text == alone else None

    def _ends_with_header(self, text: str, words: Words, tail: str) -> bool:
        """Whether a header is written behind the answer: its last token, or two in a row, stand before the answer as well."""
        before, behind = self.tokens.findall(self._gap(text, words)[1]), self.tokens.findall(tail)
        pairs = set(itertools.pairwise(before)) & set(itertools.pairwise(behind))
        return before[-1:] == behind[-1:] != [] or bool(pairs)


def _common(texts: Sequence[str]) -> str:
    return os.path.commonprefix(texts)  # noqa: RUF071 - texts, not paths


def _long_first(texts: Iterable[str | None]) -> list[str]:
    return sorted(filter(None, texts), key=len, reverse=True)
