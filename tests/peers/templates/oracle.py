"""What a mask has to be, told from transformers' renderings and the words of `talks.py` alone.

An answer is what follows the generation prompt. The prompt ends where the template, asked for one behind the messages
before, ends its text; the answer ends with the first control token behind all of its own words. Where a template
rewrites history the text before differs, and the prompt is looked for between the words of the message before and the
first of the answer.
"""

import os
import re
from collections.abc import Mapping, Sequence
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


@dataclass
class Expected:
    """Where an answer begins and ends in a text, None where that cannot be told, and where its words are."""

    start: int | None
    stop: int | None
    words: tuple[int, int] | None


class Judge:
    """Tells what should be trained on in a rendering of `messages`, of which `text` is the whole."""

    def __init__(self, reference: Reference, tokens: re.Pattern[str], *, open_ended: bool) -> None:
        self.reference, self.tokens, self.open_ended = reference, tokens, open_ended
        self.end: str | None = None
        self.prompt, self.learned = "", False

    def expected(self, text: str, messages: Sequence[Record], tools: Any, number: int) -> Expected:
        """What is expected of one answer."""
        places = [text.find(word) for word in words_of(messages[number])]
        found = [
            (place, place + len(word))
            for place, word in zip(places, words_of(messages[number]), strict=True)
            if place >= 0
        ]
        words = (min(found)[0], max(found)[1]) if found else None
        start = self._start(text, messages, tools, number, words)
        if start is None and words is None:
            return Expected(None, None, None)
        return Expected(start, self._stop(text, messages, tools, number, words or (start, start)), words)

    def _start(self, text: str, messages: Sequence[Record], tools: Any, number: int, words: Any) -> int | None:
        asked = [self.reference.render(messages[:number], tools, prompt=True, **each) for each in self.reference.asked]
        plain = self.reference.render(messages[:number], tools)
        if asked[0] == plain and (number == 0 or messages[number - 1]["role"] not in {"user", "tool"}):
            asked = [None for _ in asked]  # no prompt is written there
        if asked[0] is not None and text.startswith(asked[0]):
            return len(asked[0])
        ends = [len(each) for each in asked if each is not None and text.startswith(each)]
        if words is None:
            return max(ends, default=None)
        pattern = f"{FOREIGN.pattern}|{LEARNED.pattern}"
        before = max((match.end() for match in re.finditer(pattern, text[: words[0]])), default=0)
        own, *others = [self._added(messages[:number], tools, each) or "" for each in self.reference.asked]
        own = own or (self.prompt if number == 0 or messages[number - 1]["role"] not in {"user", "tool"} else "")
        if own and own in text[before : words[0]]:
            return text.rfind(own, before, words[0]) + len(own)
        if ends:
            return max(ends)
        for prompt in sorted(filter(None, others), key=len, reverse=True):
            if prompt in text[before : words[0]]:
                return text.rfind(prompt, before, words[0]) + len(prompt)
        return None

    def _added(self, messages: Sequence[Record], tools: Any, asked: Mapping[str, bool]) -> str | None:
        """What asking for a generation prompt adds to a text."""
        plain = self.reference.render(messages, tools, **asked)
        prompted = self.reference.render(messages, tools, prompt=True, **asked)
        return prompted[len(plain) :] if plain is not None and prompted and prompted.startswith(plain) else None

    def learn(self, messages: Sequence[Record]) -> None:
        """Find out from a plain exchange which prompt, and which token at the end, this template has."""
        text = self.reference.render(messages, None) or ""
        self.prompt = self._added(messages[:1], None, {}) or ""
        stop = self.expected(text, messages, None, 1).stop
        self.end = next((match[0] for match in self.tokens.finditer(text) if match.end() == stop), None)
        self.learned = True

    def _stop(
        self, text: str, messages: Sequence[Record], tools: Any, number: int, words: tuple[int, int]
    ) -> int | None:
        """The last token that belongs to the answer whether or not something follows it; or else the first that follows."""
        later = [word for message in messages[number + 1 :] for word in words_of(message)]
        nexts = [place for place in (text.find(word, words[1]) for word in later) if place >= 0]
        tail = text[words[1] : min(nexts, default=len(text))]
        alone = self.reference.render(messages[: number + 1], tools)
        if self.open_ended:
            following = self.tokens.match(text, len(alone or ""))
            return (
                following.end() if following and text.startswith(alone or "?") else len(text) if text == alone else None
            )
        if self.learned and self.end is None:
            return None
        follows = messages[number + 1 : number + 2] or [{"role": "user", "content": "And user0x?"}]
        followed = self.reference.render([*messages[: number + 1], *follows], tools)
        header = text[max(words[0] - 80, 0) : words[0]]
        if (
            alone is not None
            and alone == self.reference.render(messages[: number + 1], tools, prompt=True)
            and not nexts
        ):
            closing = self.tokens.findall(alone, words[1])
            if closing and closing[-1] in header:
                return None  # the next header is always written: where does it begin?
        word = max((each for each in words_of(messages[number]) if each in text), key=text.find, default="")
        others = [
            each[each.find(word) + len(word) :]
            for each in (alone, followed)
            if word and each is not None and word in each
        ]
        if not word or alone is None:
            ends = [match for match in self.tokens.finditer(tail) if match[0] == self.end]
            return words[1] + ends[0].end() if ends else None
        common = os.path.commonprefix([tail, *others])  # noqa: RUF071 - texts, not paths
        again = self.tokens.search((others or [""])[0][len(common) - 2 :]) if not nexts else None
        if again and again[0] in header:
            return None  # the next header is always written: where does it begin?
        own = list(self.tokens.finditer(common))
        if own:
            return words[1] + own[-1].end()
        first = self.tokens.search(tail)
        if first is None:
            return len(text) if not nexts and self.open_ended else None
        return words[1] + first.end() if not tail[: first.start()].strip() or "tool_calls" in messages[number] else None
