"""Harmony messages to sequences for training and scoring: segments of text, and which of them are trained on.

Each message is encoded separately: tags are their ids, and the text between them is encoded as a whole. Tokens don't cross a
tag, so masks that name whole parts of messages are exact.

    <|start|>assistant │  to=functions.f<|channel|>commentary <|constrain|>json<|message|> │ {"id":1} │ <|call|>
         author        │                              header                               │   body   │    end

Training covers the model's own text. It is prompted with `<|start|>assistant` and continues with recipient and channel,
which decide whether it thinks, calls or answers, so headers are trained on with their bodies. After the `<|end|>` of reasoning
or commentary it continues, so it also writes the `<|start|>assistant` of its next message. It ends an answer with `<|return|>`.
If other messages follow, `<|end|>` replaces it; the model never writes that token there, so it is not trained on.

Harmony text is used unchanged. A conversation composed from other messages loses the reasoning before its last question, as in
a chat with the model. If that reasoning is to be trained on, the conversation becomes one sequence per turn; a turn that ends
in an answer ends in `<|return|>`. Cost: 3 µs per message, plus encoding.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from tokenmill.tasks.chat.check import text_encoder
from tokenmill.tasks.chat.controls import Controls
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.encoding import ROLE_NUMBERS, Batch, Segment, Segments
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.tokenize.encoders import Encoder
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource

from .compose import without_thoughts
from .grammar import Fault, Header, parse
from .message import ROLES, HarmonyMessage
from .render import ENDS, TAGS, render
from .vocabulary import IDS, VOCABULARY

CONTROLS = Controls({tag: IDS[tag] for tag in sorted(TAGS)})  # the control tokens of Harmony text

NONE, ANALYSIS, CALL, ANSWER = range(4)
"""Part of the assistant's output that a token belongs to: none (a different author), reasoning, a tool call, or text for the
user (the answer and remarks before calls)."""


class Learned(NamedTuple):
    """Which parts of a message are trained on."""

    author: bool = False
    header: bool = False
    body: bool = False
    end: bool = False


NOTHING = Learned()


@dataclass(frozen=True, slots=True)
class HarmonyConversation:
    """At least one message; `forgets` if reasoning of earlier turns is not part of the history; `unread` names what of the row
    isn't read.
    """

    messages: Sequence[HarmonyMessage]
    forgets: bool = False
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HarmonyRenderer:
    """Renders conversations as sequences of segments; `splits_turns` allows a sequence per turn."""

    policy: LossPolicy
    splits_turns: bool

    def sequences(self, conversation: HarmonyConversation) -> list[Segments] | Rejected:
        """Return the sequences of a conversation that have something to train on. Rejected if there are none, and for a `<|return|>`
        before the last message.
        """
        early = [number for number, each in enumerate(conversation.messages[:-1], 1) if each.terminator == "return"]
        if early:
            count = len(conversation.messages)
            return Rejected(
                "return_not_last", f"message {early[0]} of {count} ends with <|return|>; end it with <|end|>"
            )
        found: list[Segments] = []
        for messages, first in self._targets(conversation):
            learned = [*itertools.repeat(NOTHING, first), *learned_of(messages, self.policy)[first:]]
            found.append([part for each in zip(messages, learned, strict=True) for part in segments_of(*each)])
        found = [sequence for sequence in found if any(segment.trained for segment in sequence)]
        return found or Rejected("nothing_trained", "no token of it would be trained on under this loss policy")

    def _targets(self, conversation: HarmonyConversation) -> Iterator[tuple[Sequence[HarmonyMessage], int]]:
        """The messages of each sequence, and the number of the first that may be trained on."""
        messages = conversation.messages
        questions = [number for number, message in enumerate(messages) if message.author == "user"]
        asked = max(questions, default=0)
        # Nothing was forgotten, so the conversation is one sequence.
        if not conversation.forgets or not any(part_of(message) == ANALYSIS for message in messages[:asked]):
            yield messages, 0
        elif self.splits_turns and self.policy.on in {"assistant_all", "assistant_bodies"}:
            borders = [0, *(number for number in questions if number), len(messages)]
            for start, end in itertools.pairwise(borders):
                spoken = [number for number in range(start, end) if messages[number].author == "assistant"]
                if not spoken:
                    continue
                *turn, last = messages[start : spoken[-1] + 1]
                # Without the messages after it, the turn ends as the model ended it.
                last = replace(last, terminator="return") if _returned(last) else last
                history = without_thoughts(messages[:start])
                yield [*history, *turn, last], len(history)
        else:
            yield [*without_thoughts(messages[:asked]), *messages[asked:]], 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """Conversations as tokens, back to back; conversation i is `[offsets[i], offsets[i + 1])`.

    `ids` int32 [tokens]; `loss` int8 [tokens], 1 if the token itself is predicted (not shifted); `parts` int8 [tokens], NONE,
    ANALYSIS, CALL or ANSWER, headers and ends included; `offsets` int64 [conversations + 1].
    """

    ids: np.ndarray
    loss: np.ndarray
    parts: np.ndarray
    offsets: np.ndarray


def encode(conversations: Sequence[str | Sequence[HarmonyMessage]], policy: LossPolicy) -> Encoded:
    """Encode conversations, given as texts or messages, with their loss masks.

    Raises InputError, with the offset, for a text that is not Harmony.
    """
    batch, parts, counts = Batch(), list[int](), list[int]()
    for number, given in enumerate(conversations):
        messages = parse(given) if isinstance(given, str) else given
        if isinstance(messages, Fault):
            where = f"text {number}, character {messages.offset}"
            raise InputError(f"{where}: {messages.detail} ({messages.code}); fix it or remove it")
        for message, learned in zip(messages, learned_of(messages, policy), strict=True):
            batch.add(segments_of(message, learned))
            parts.append(part_of(message))
        counts.append(len(messages))
    # One call of the encoder for all.
    found = batch.encode(literal_encoder())
    ends = np.cumsum([0, *counts], dtype=np.int64)
    return Encoded(found.ids, found.trained, np.repeat(np.asarray(parts, np.int8), found.lengths), found.offsets[ends])


@cache
def literal_encoder() -> Encoder:
    """Return the encoder of text between control tokens, where control strings are plain text."""
    vocabulary = find_vocabulary(TokenizerSource(model=VOCABULARY))
    return text_encoder(vocabulary, CONTROLS, "gigatoken", "literal")


def part_of(message: HarmonyMessage) -> int:
    """Return the part that all tokens of a message belong to."""
    if message.author != "assistant":
        return NONE
    if message.recipient is not None:
        return CALL
    return ANALYSIS if message.channel == "analysis" else ANSWER


def learned_of(messages: Sequence[HarmonyMessage], policy: LossPolicy) -> list[Learned]:
    """What to train on in each message of a conversation.

    `assistant_bodies` omits headers, `end_of_turn` applies to every terminator, and `final_only` takes the last
    message by the assistant, if that is an answer.
    """
    first, header = 0, policy.on != "assistant_bodies"
    # `last_turn` begins at the last question, `final_only` at the assistant's last message.
    if policy.on in {"last_turn", "final_only"}:
        author = "user" if policy.on == "last_turn" else "assistant"
        first = max((number for number, message in enumerate(messages) if message.author == author), default=0)
    found = [NOTHING] * first
    for before, message in zip([None, *messages][first:], messages[first:], strict=False):
        if not _wanted(message, policy):
            found.append(NOTHING)
            continue
        # After `<|end|>` the model goes on; after anything else, it is prompted with `<|start|>assistant`.
        goes_on = before is not None and before.author == "assistant" and before.terminator == "end"
        begins = header and goes_on and not _returned(before)
        found.append(Learned(begins, header, body=True, end=policy.end_of_turn and not _returned(message)))
    return found


def _wanted(message: HarmonyMessage, policy: LossPolicy) -> bool:
    part = part_of(message)
    if not message.trained:
        return False
    if policy.on == "final_only":
        return part == ANSWER and message.channel == "final"
    return part == ANSWER or (part == ANALYSIS and policy.reasoning) or (part == CALL and policy.tool_calls)


def _returned(message: HarmonyMessage | None) -> bool:
    """Whether the model ended the message with `<|return|>` but the text has `<|end|>`."""
    return message is not None and message.channel == "final" and message.terminator == "end"


def segments_of(message: HarmonyMessage, learned: Learned) -> Segments:
    """Return the segments of one message."""
    role = ROLE_NUMBERS[message.author if message.author in ROLES else "tool"]
    header = Header(message.author, message.recipient, message.channel, message.content_type, message.constrained)
    body = [Segment(message.body, -1, role, learned.body)] if message.body else []
    return [
        *_opening(header, role, learned.author, learned.header),
        *body,
        _end(ENDS[message.terminator], role, learned.end),
    ]


@lru_cache(maxsize=4096)
def _opening(header: Header, role: int, author: bool, rest: bool) -> Segments:
    """The segments of a header. No token crosses the end of the author, because the blank after it begins a new one."""
    empty = HarmonyMessage(header.author, "", *header[1:])
    # The renderer writes the header, so training and text can't differ.
    _, start, named, *others = re.split(CONTROLS.pattern, render([empty]).removesuffix(ENDS[empty.terminator]))
    behind = named.removeprefix(header.author)
    before = [_segment(start, role, author), _segment(header.author, role, author)]
    after = [Segment(behind, -1, role, rest, breaks=True)] if behind else []
    return [*before, *after, *(_segment(text, role, rest) for text in others if text)]


def _segment(text: str, role: int, trained: bool) -> Segment:
    return Segment(None, IDS[text], role, trained) if text in TAGS else Segment(text, -1, role, trained)


_end = lru_cache(maxsize=64)(_segment)
