"""A conversation to the sequences it is trained as: mostly one, and one per user turn where templates rewrite history.

Templates of reasoning models strip the reasoning from earlier turns, because at inference it is gone by then. A turn
can then be learned only in a sequence that ends with it. So a conversation of n turns becomes n sequences, each with
the turns before it in their history form and one turn, the only one trained on, in full.

Rendering each of these prefixes would cost the square of the conversation. Instead every message is rendered twice:
once in a conversation that goes on behind it (its history form), once in a conversation that consists of its turn alone
(its current form), and the sequences are put together from these. Whether a template allows that is not assumed: the
check at the start of a run compares it with true prefixes (`check.py`); where it does not hold, and in conversations
with system messages in later turns, prefixes are rendered one by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .controls import Controls, broken, stranger_for
from .conversation import Conversation, Message, Range, Rejected
from .encoding import ROLE_NUMBERS, Passage, Piece, connected, cut
from .loss import Completion, LossPolicy, Openings, completions
from .template import ChatTemplate, Rendering

SplitTurns = Literal["auto", "never"]

NEXT_TURN: Message = {"role": "user", "content": "…"}
"""Stands behind a conversation to make all of it history."""

Pieces = list[Piece]


@dataclass(frozen=True, slots=True)
class Renderer:
    """Conversations to sequences of pieces, with one template and one policy.

    `openings` are the template's ways to begin and end an answer; `literal` says that control tokens spelled in data are
    plain text, `splits_turns` that conversations with reasoning become one sequence per user turn, `composes` that these
    can be put together from parts.
    """

    template: ChatTemplate
    controls: Controls
    openings: Openings
    policy: LossPolicy
    literal: bool
    splits_turns: bool
    composes: bool

    def sequences(self, conversation: Conversation) -> list[Pieces] | Rejected:
        """The sequences of a conversation, none of them without anything to learn. Rejected, with a reason, when there is none."""
        if not self.literal or not self.controls.spelled_in(conversation):
            return self._sequences(conversation)
        stranger = stranger_for(conversation)
        if stranger is None:
            return Rejected("noncharacters", "the text holds all the noncharacters that keep control tokens apart")
        found = self._sequences(broken(conversation, self.controls, stranger))
        return found if isinstance(found, Rejected) else [_mended(sequence, stranger) for sequence in found]

    def _sequences(self, conversation: Conversation) -> list[Pieces] | Rejected:
        found = self._turns(conversation) if self._by_turn(conversation) else self._prefixes(conversation, [(0, None)])
        if isinstance(found, Rejected):
            return found
        learned = [sequence for sequence in found if any(piece.learned for piece in sequence)]
        return learned or Rejected("nothing_trained", "no token of it would be trained on under this loss policy")

    def _by_turn(self, conversation: Conversation) -> bool:
        return (
            self.splits_turns
            and self.policy.on == "assistant_all"
            and any("reasoning_content" in message for message in conversation.messages)
        )

    def _turns(self, conversation: Conversation) -> list[Pieces] | Rejected:
        """One sequence per user turn that the assistant answers."""
        turns = answered_turns(conversation.messages)
        if self.composes and not _unusual(conversation.messages):
            composed = self._composed(conversation, turns)
            if composed is not None:
                return composed
        return self._prefixes(conversation, turns)

    def _prefixes(self, conversation: Conversation, turns: Sequence[tuple[int, int | None]]) -> list[Pieces] | Rejected:
        """For each turn all messages up to its end, rendered as they are; of the turn itself the policy's share is learned."""
        sequences: list[Pieces] = []
        for start, stop in turns:
            groups = self._groups(conversation, conversation.messages[:stop], start)
            if isinstance(groups, Rejected):
                return groups
            sequences.append(connected(groups))
        return sequences

    def _composed(self, conversation: Conversation, turns: Sequence[tuple[int, int]]) -> list[Pieces] | None:
        """The same, put together from messages in their history and in their current form; None where the template
        refuses one of the two.
        """
        messages = conversation.messages
        goes_on = messages if messages[-1]["role"] == "user" else [*messages, NEXT_TURN]
        before = self._groups(conversation, goes_on, len(goes_on))
        if isinstance(before, Rejected):
            return None
        lead = 0 if messages[0]["role"] not in {"system", "developer"} else 1
        alone = Conversation(messages, conversation.tools[:1])
        sequences: list[Pieces] = []
        for start, stop in turns:
            head = messages[:lead] if start >= lead else []
            current = self._groups(alone, [*head, *messages[start:stop]], len(head))
            if isinstance(current, Rejected):
                return None
            sequences.append(connected([*before[: 1 + start], *current[1 + len(head) :]]))
        return sequences

    def _groups(
        self, conversation: Conversation, messages: Sequence[Message], first_learned: int
    ) -> list[Pieces] | Rejected:
        """The pieces of one rendering: those before the messages, those of each message, those behind them."""
        rendering = self.template.render(messages, conversation.tools)
        if isinstance(rendering, Rejected):
            return rendering
        learned = [number for number in self.policy.learned(messages) if number >= first_learned]
        found = completions(rendering, messages, learned, self.openings, self.controls)
        if isinstance(found, Rejected):
            return found
        ranges: dict[int, list[Range]] = {}
        for number, completion in found.items():
            chosen = _ranges(number, messages[number], completion, rendering, self.policy)
            if chosen is None:
                detail = f"the chat template changes the content of message {number + 1}, so which of its characters to train on is not known"
                return Rejected("train_detail_lost", detail)
            ranges[number] = chosen
        return cut(rendering.text, _passages(rendering, messages, found, ranges), self.controls)


def answered_turns(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """First message and end of every user turn that holds an answer; an answer before any user is a turn of its own."""
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    starts = users if users and users[0] == 0 else [0, *users]
    turns = zip(starts, [*starts[1:], len(messages)], strict=True)
    return [
        (start, stop)
        for start, stop in turns
        if any(message["role"] == "assistant" for message in messages[start:stop])
    ]


def _unusual(messages: Sequence[Message]) -> bool:
    """Whether a turn may look different beside others: a template may move a later system message to the front, and not
    count a user message of markup (the result of a tool, say) as the beginning of a turn.
    """
    return any(
        message["role"] in {"system", "developer"}
        or (message["role"] == "user" and (message["content"] or "").lstrip().startswith("<"))
        for message in messages[1:]
    )


def _ranges(
    number: int, message: Message, completion: Completion, rendering: Rendering, policy: LossPolicy
) -> list[Range] | None:
    """The characters of a rendering that are trained on of a message; None where its data names some of its content, and
    the content is not written as it is.
    """
    trained = message.get("trained")
    if trained is None:
        return policy.ranges(completion)
    content = message["content"] or ""
    spans = [span for span in rendering.spans if span[2] == (number, "content") and span[0] < span[1]]
    if not spans:
        return None
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    written = rendering.text[first:last]
    if written not in {content, content.strip()}:
        return None
    start = first - content.index(written)
    ranges = [(max(first, start + begin), min(last, start + end)) for begin, end in trained]
    ending = [(completion.ending, completion.stop)] if policy.end_of_turn else []
    return [(begin, end) for begin, end in [*ranges, *ending] if begin < end]


def _passages(
    rendering: Rendering,
    messages: Sequence[Message],
    learned: Mapping[int, Completion],
    ranges: Mapping[int, Sequence[Range]],
) -> list[Passage]:
    """Prologue, one passage a message (empty for those that are not written by themselves), epilogue."""
    start, stop = rendering.extents.get(0, (0, 0))
    in_header = messages[0]["role"] in {"system", "developer"} and start == stop
    place = rendering.prologue
    passages = [Passage(place, ROLE_NUMBERS[messages[0]["role"]] if in_header else 0)]
    for number, message in enumerate(messages):
        place = max(place, rendering.extents.get(number, (place, place))[1])
        completion = learned.get(number)
        place = max(place, completion.stop if completion else place)
        if completion is None:
            passages.append(Passage(place, ROLE_NUMBERS[message["role"]]))
        else:
            passages.append(Passage(place, ROLE_NUMBERS[message["role"]], ranges[number], completion.start))
    return [*passages, Passage(len(rendering.text), 0)]


def _mended(pieces: Pieces, stranger: str) -> Pieces:
    return [
        piece if piece.text is None or stranger not in piece.text else _without(piece, stranger) for piece in pieces
    ]


def _without(piece: Piece, stranger: str) -> Piece:
    """The piece without the stranger; the lengths of its parts shrink with it."""
    text = piece.text or ""
    learned = piece.learned
    if isinstance(learned, tuple):
        ends = [sum(learned[: number + 1]) for number in range(len(learned))]
        kept = [end - text.count(stranger, 0, end) for end in ends]
        learned = tuple(end - before for before, end in zip([0, *kept], kept, strict=False))
    return piece._replace(text=text.replace(stranger, ""), learned=learned)
