"""A conversation to its training sequences: usually one, or one per user turn if the template rewrites history.

Templates of reasoning models strip the reasoning from earlier turns, so a turn can be trained on only in a sequence
that ends with it. A conversation of n turns becomes n sequences, each with the earlier turns in their history form and one full
turn; only that one is trained on.

Rendering all prefixes would be quadratic. Instead every message is rendered twice, in its history form and in a conversation of
its turn separately, and sequences are composed of both. The self-check compares this with real prefixes. If they differ, and for
system messages in later turns, prefixes are rendered one by one.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from .controls import Controls, escape_controls, unused_noncharacter
from .conversation import (
    CLOSE,
    OPEN,
    Conversation,
    Inline,
    Message,
    Range,
    RejectionError,
    has_tag,
    rejecting,
    required,
    without,
)
from .encoding import ROLE_NUMBERS, Passage, Segments, connected, cut
from .loss import Completion, LossPolicy, Openings, completions, ended
from .template import ChatTemplate, Rendering

SplitTurns = Literal["auto", "never"]

NEXT_TURN: Message = {"role": "user", "content": "…"}  # appended to a conversation to make all of it history


@dataclass(frozen=True, slots=True)
class Renderer:
    """Conversations to sequences of segments, with one template and policy.

    `openings` describe how the template begins and ends an answer; `literal`: control tokens in data are plain text;
    `splits_turns`: conversations with reasoning become one sequence per user turn; `composes`: these can be composed of
    parts; `unwritten`: parts that the template omits (see `probes`).
    """

    template: ChatTemplate
    controls: Controls
    openings: Openings
    policy: LossPolicy
    literal: bool
    splits_turns: bool
    composes: bool
    unwritten: frozenset[str]

    @property
    def inline(self) -> Inline:
        return self.openings.inline

    @rejecting
    def sequences(self, conversation: Conversation) -> list[Segments]:
        """Return the sequences of a conversation, each with something to train on; Rejected with a reason if there are none."""
        if not self.literal or not self.controls.spelled_in(conversation):
            return self._sequences(conversation)
        noncharacter = unused_noncharacter(conversation)
        if noncharacter is None:
            detail = "the text contains all noncharacters that could escape its control tokens"
            raise RejectionError("noncharacters", detail)
        # Noncharacters keep tokens of the data apart from the template's until the rendering is cut.
        escaped = escape_controls(conversation, self.controls, noncharacter)
        if (number := self._taken_for_thinking(conversation, escaped, noncharacter)) is not None:
            detail = (
                f"message {number + 1} has {OPEN} or {CLOSE} in its answer, and the chat template takes it for its own"
            )
            raise RejectionError("thinking_in_answer", f"{detail}; write thinking as reasoning_content")
        return [
            [each._replace(text=each.text.replace(noncharacter, "")) if each.text else each for each in sequence]
            for sequence in self._sequences(escaped)
        ]

    def _sequences(self, conversation: Conversation) -> list[Segments]:
        messages = conversation.messages
        if (
            self.splits_turns
            and self.policy.on == "assistant_all"
            and any("reasoning_content" in message for message in messages)
        ):
            # Only reasoning is stripped, so turns without any are learned in one sequence.
            turns = answered_turns(messages)
            # A turn may be rendered differently beside others: a template may move a later system message to the front, or not
            # count a user message of markup (a tool result, say) as a turn.
            usual = not any(message["role"] in {"system", "developer"} for message in messages[1:])
            found = None
            if self.composes and usual and not begins_with_markup(messages):
                with suppress(RejectionError):  # a template may reject a turn alone that it takes after the others
                    found = self._composed(conversation, turns)
            found = self._prefixes(conversation, turns) if found is None else found
        else:
            found = self._prefixes(conversation, [(0, None)])
        if trained := [sequence for sequence in found if any(segment.trained for segment in sequence)]:
            return trained
        raise RejectionError("nothing_trained", "no token of it would be trained on under this loss policy")

    def _taken_for_thinking(self, given: Conversation, escaped: Conversation, noncharacter: str) -> int | None:
        """Return the number of an answer with a thinking tag that changes the template's output; None if there isn't one."""
        if not {OPEN, CLOSE} & self.controls.written.ids.keys():
            return None
        # Rendered with and without the escape of one answer, a template that reads the tags differs.
        tagged = [number for number, message in enumerate(given.messages) if has_tag(message)]
        for number in tagged:
            messages = list(escaped.messages)
            messages[number] = {**messages[number], "content": given.messages[number]["content"]}
            pair = [self.template.render(each, escaped.tools) for each in (messages, escaped.messages)]
            texts = [each.text.replace(noncharacter, "") for each in pair if isinstance(each, Rendering)]
            if len(set(texts)) > 1:
                return number
        return None

    def _prefixes(self, conversation: Conversation, turns: Sequence[tuple[int, int | None]]) -> list[Segments]:
        """For each turn, all messages up to its end; only the turn itself is trained on, by the policy."""
        return [connected(self._groups(conversation, conversation.messages[:stop], start)) for start, stop in turns]

    def _composed(self, conversation: Conversation, turns: Sequence[tuple[int, int]]) -> list[Segments]:
        """The same, composed of messages in history form and in full form."""
        messages = conversation.messages
        # With a further question, every turn is in its history form.
        goes_on = messages if messages[-1]["role"] == "user" else [*messages, NEXT_TURN]
        before = self._groups(conversation, goes_on, len(goes_on))
        lead = 0 if messages[0]["role"] not in {"system", "developer"} else 1
        # One tool is enough for the form of a turn; the definitions of all are in the header, which isn't taken from here.
        alone = Conversation(messages, conversation.tools[:1])
        sequences: list[Segments] = []
        for start, stop in turns:
            head = messages[:lead] if start >= lead else []
            current = self._groups(alone, [*head, *messages[start:stop]], len(head))
            # Group 0 is the header before the messages.
            sequences.append(connected([*before[: 1 + start], *current[1 + len(head) :]]))
        return sequences

    def _groups(self, conversation: Conversation, messages: Sequence[Message], first_trained: int) -> list[Segments]:
        """The segments of one rendering: before the messages, of each message, after them."""
        rendering = required(self.template.render(messages, conversation.tools))
        rendering = ended(rendering, messages, self.openings, self.controls.written)
        trained = [number for number in self.policy.trained(messages) if number >= first_trained]
        found = required(completions(rendering, messages, trained, self.openings, self.controls.written))
        ranges: dict[int, list[Range]] = {}
        for number, completion in found.items():
            chosen = _ranges(number, messages[number], completion, rendering, self.policy)
            if chosen is None:
                detail = f"the chat template changes the content of message {number + 1}, so which of its characters to train on is not known"
                raise RejectionError("train_detail_lost", detail)
            ranges[number] = chosen
        return cut(rendering.text, _passages(rendering, messages, found, ranges), self.controls)


def answered_turns(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Beginning and end of every user turn with an answer; an answer before any user message is also a turn."""
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    starts = users if users and users[0] == 0 else [0, *users]
    turns = zip(starts, [*starts[1:], len(messages)], strict=True)
    return [
        (start, stop)
        for start, stop in turns
        if any(message["role"] == "assistant" for message in messages[start:stop])
    ]


def begins_with_markup(messages: Sequence[Message]) -> bool:
    """Return whether a user message after the first message begins with `<`."""
    return any(
        message["role"] == "user" and (message["content"] or "").lstrip().startswith("<") for message in messages[1:]
    )


def _ranges(
    number: int, message: Message, completion: Completion, rendering: Rendering, policy: LossPolicy
) -> list[Range] | None:
    """The characters of a message that are trained on in a rendering; None if its data names some, and the template
    changes the content.
    """
    trained = message.get("trained")
    if trained is None:
        reasoned = [span[1] for span in rendering.spans if span[2] == (number, "reasoning")]
        ranges = policy.ranges(completion)
        if not message.get("cut") or not reasoned:
            return ranges
        # A budget ended the reasoning: the text up to the answer is the budget's.
        return without(ranges, max(reasoned), min(completion.answer, completion.calls))
    content = message["content"] or ""
    spans = [span for span in rendering.spans if span[2] == (number, "content") and span[0] < span[1]]
    if not spans:
        return None
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    written = rendering.text[first:last]
    # Templates often strip contents; any other change moves characters.
    if written not in {content, content.strip()}:
        return None
    start = first - content.index(written)
    ranges = [(max(first, start + begin), min(last, start + end)) for begin, end in trained]
    ending = [(completion.ending, completion.stop)] if policy.end_of_turn else []
    return [(begin, end) for begin, end in [*ranges, *ending] if begin < end]


def _passages(
    rendering: Rendering,
    messages: Sequence[Message],
    completions: Mapping[int, Completion],
    ranges: Mapping[int, Sequence[Range]],
) -> list[Passage]:
    """Prologue, one passage per message (empty if it is not written separately), epilogue."""
    start, stop = rendering.extents.get(0, (0, 0))
    # A system message that the loop skips is written in the header.
    in_header = messages[0]["role"] in {"system", "developer"} and start == stop
    place = rendering.prologue
    passages = [Passage(place, ROLE_NUMBERS[messages[0]["role"]] if in_header else 0)]
    for number, message in enumerate(messages):
        place = max(place, rendering.extents.get(number, (place, place))[1])
        completion = completions.get(number)
        # The end of turn may be behind the loop's iteration, in the next header.
        place = max(place, completion.stop if completion else place)
        if completion is None:
            passages.append(Passage(place, ROLE_NUMBERS[message["role"]]))
        else:
            passages.append(Passage(place, ROLE_NUMBERS[message["role"]], ranges[number], completion.start))
    return [*passages, Passage(len(rendering.text), 0)]
