r"""Which characters of a rendering are trained on: what the model itself would generate, and of that what a policy names.

An assistant message begins, in every template, with the generation prompt: text that the serving side writes and the
model continues (`<|im_start|>assistant\n`). What follows it, up to the token that ends the turn, is the completion, in
this order:

    reasoning │ answer │ tool calls │ end of turn

Where each begins is known from the origin of the text (see `traced.py`): the answer is the message's content, tool
calls begin with the loop over them, the turn ends with the last control token behind all of it. Template text goes with
what it introduces: `<think>\n` and `\n</think>\n` are reasoning, `<tool_call>` is a tool call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tasks.chat.controls import Controls
from tasks.chat.conversation import Message, Range, Rejected
from tasks.chat.template import Rendering

LossOn = Literal["assistant_all", "assistant_bodies", "last_turn", "final_only"]


@dataclass(frozen=True, slots=True)
class LossPolicy:
    """Which tokens are trained on.

    `assistant_all`: all that the assistant generates; `last_turn`: what it generates after the last user message;
    `final_only`: its last answer alone, without reasoning and tool calls, and nothing where it only calls tools.
    `assistant_bodies` is for formats that tell what is said from what introduces it, and leaves that out. The three
    others leave parts out everywhere.
    """

    on: LossOn = "assistant_all"
    reasoning: bool = True
    tool_calls: bool = True
    end_of_turn: bool = True

    def learned(self, messages: Sequence[Message]) -> list[int]:
        """The numbers of the messages that are trained on."""
        chosen = self._chosen(messages)
        return [number for number in chosen if messages[number].get("trained") != ()]

    def _chosen(self, messages: Sequence[Message]) -> list[int]:
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if self.on == "assistant_all":
            return answers
        if self.on == "final_only":
            return [number for number in answers[-1:] if not _calls_alone(messages[number])]
        last_user = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
        return [number for number in answers if number > last_user]

    def ranges(self, completion: "Completion") -> list[Range]:
        """The characters of a completion that are trained on, neighbours in one."""
        if self.reasoning and self.tool_calls and self.end_of_turn and self.on != "final_only":
            return [(completion.start, completion.stop)]
        final = self.on == "final_only"
        wanted = [
            (completion.start, completion.answer, self.reasoning and not final),
            (completion.answer, completion.calls, True),
            (completion.calls, completion.ending, self.tool_calls and not final),
            (completion.ending, completion.stop, self.end_of_turn),
        ]
        ranges: list[Range] = []
        for start, stop, learned in wanted:
            if not learned or start == stop:
                continue
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]  # noqa: PLW2901 - grown to the left
            ranges.append((start, stop))
        return ranges


def _calls_alone(message: Message) -> bool:
    """Whether a message calls tools and answers nothing."""
    return bool(message.get("tool_calls")) and not (message["content"] or "").strip()


class Completion(NamedTuple):
    """What the model generates of one message, as characters of a rendering.

    Reasoning is `[start, answer)`, the answer `[answer, calls)`, tool calls `[calls, ending)`, the end of the turn
    `[ending, stop)`; each may be empty.
    """

    start: int
    answer: int
    calls: int
    ending: int
    stop: int


@dataclass(slots=True)
class _Parts:
    """Where the parts of one message were written: first character and end of each, and of all of them."""

    content: Range | None = None
    reasoning: Range | None = None
    call: Range | None = None
    generated: Range | None = None
    of_others: bool = False

    @property
    def first(self) -> list[int]:
        """Where the text of the message itself begins; calls may have the header in their loop."""
        return [part[0] for part in (self.content, self.reasoning) if part]


def completions(
    rendering: Rendering,
    messages: Sequence[Message],
    learned: Sequence[int],
    prompts: Sequence[str],
    controls: Controls,
) -> dict[int, Completion] | Rejected:
    """The completions of the assistant messages numbered in `learned`, by number.

    `prompts` are the generation prompts that the template may write. Rejected when the template leaves out a message,
    its content or its tool calls, or begins a message with none of the prompts: then no mask would be right.
    """
    found: dict[int, Completion] = {}
    parts = _parts(rendering, learned) if learned else {}
    tagged = any(origin[1] == "generated" for _, _, origin in rendering.spans)
    for number in learned:
        wrong = _left_out(number, messages[number], rendering, parts)
        wrong = wrong or (_not_generated(number, parts[number]) if tagged else None)
        if wrong is not None:
            return Rejected(*wrong)
        start, stop = rendering.extents[number]
        generated = parts[number].generated
        begun = (
            generated[0]
            if generated
            else _generation_start(rendering.text, (start, stop), parts[number], prompts, controls)
        )
        if begun is None:
            return Rejected("no_generation_prompt", f"message {number + 1} begins with no generation prompt")
        completion = _completion(rendering.text, begun, (start, stop), parts[number], controls)
        if "reasoning_content" not in messages[number]:
            completion = _without_reasoning(rendering.text, completion)
        if controls.ids and completion.ending == completion.stop:
            return Rejected("no_end_of_turn", f"message {number + 1} is not ended by a control token of the template")
        found[number] = completion
    return found


def _parts(rendering: Rendering, learned: Sequence[int]) -> dict[int, _Parts]:
    """What is known of the characters of some messages, from the spans that lie in their extents."""
    parts = {number: _Parts() for number in learned}
    current, turn, end = None, -1, 0
    for start, stop, (number, kind) in rendering.spans:
        if kind == "message":
            if number in rendering.extents and start == rendering.extents[number][0]:
                current, turn, end = parts.get(number), number, rendering.extents[number][1]
        elif current is None or kind == "loop":
            continue
        elif kind == "content" and number == turn:
            current.content = _hull(current.content, (start, stop))
        elif kind == "reasoning" and number == turn:
            current.reasoning = _hull(current.reasoning, (start, stop))
        elif kind in {"content", "reasoning"}:
            current.of_others = current.of_others or start < stop
        elif kind == "call" or (kind == "end" and current.call and start < end):
            current.call = _hull(current.call, (start, stop))
        elif kind != "end":
            current.generated = _hull(current.generated, (start, stop))
    return parts


def _hull(known: Range | None, new: Range) -> Range:
    if known is None or (known[0] == known[1] and new[0] < new[1]):
        return new
    return min(known[0], new[0]), max(known[1], new[1])


def _left_out(
    number: int, message: Message, rendering: Rendering, parts: Mapping[int, _Parts]
) -> tuple[str, str] | None:
    """Reason and detail when the template did not write what has to be learned."""
    start, stop = rendering.extents.get(number, (0, 0))
    if start == stop:
        return "message_left_out", f"the chat template does not write message {number + 1}"
    written = parts[number]
    content = message["content"]
    if content and not content.isspace() and (written.content is None or written.content[0] == written.content[1]):
        return "content_left_out", f"the chat template does not write the content of message {number + 1} as it is"
    if message.get("tool_calls") and written.call is None:
        return "tool_calls_left_out", f"the chat template does not write the tool calls of message {number + 1}"
    if written.of_others:
        return "messages_mixed", f"the chat template writes the text of another message into message {number + 1}"
    return None


def _not_generated(number: int, written: _Parts) -> tuple[str, str] | None:
    """Reason and detail when the template's `generation` tags leave out what the model would generate."""
    first, last = written.generated or (0, 0)
    parts = [part for part in (written.content, written.call) if part]
    if written.generated and all(first <= start and stop <= last for start, stop in parts):
        return None
    return "not_generated", f"the generation tags of the chat template are not around what message {number + 1} says"


def _generation_start(
    text: str, extent: Range, parts: _Parts, prompts: Sequence[str], controls: Controls
) -> int | None:
    """Where the generation prompt ends: the longest that the message begins with, as far as it is template text.

    A prompt may go on where the message does not (`<think>` before an answer without reasoning): then what both have in
    common, up to its last control token or line end, but only where no prompt is there as a whole.
    """
    start = extent[0]
    if not prompts:
        return start
    header = text[start : min(parts.first, default=extent[1])]
    longest = max((len(prompt) for prompt in prompts if header.startswith(prompt)), default=0)
    longest = longest or max(_common(header, prompt, controls) for prompt in prompts)
    if longest or any(text.endswith(prompt, 0, start) for prompt in prompts):
        return start + longest
    return None


def _common(one: str, other: str, controls: Controls) -> int:
    """How many characters two texts have in common at their beginning, up to a control token or a line end."""
    pairs = enumerate(zip(one, other, strict=False))
    length = next((number for number, (left, right) in pairs if left != right), min(len(one), len(other)))
    token = controls.last(one, 0, length)
    return max(token[1] if token else 0, one.rfind("\n", 0, length) + 1)


def _completion(text: str, start: int, extent: Range, parts: _Parts, controls: Controls) -> Completion:
    last = max([start, *(part[1] for part in (parts.content, parts.reasoning, parts.call) if part)])
    limit = parts.generated[1] if parts.generated else extent[1]
    ending, stop = controls.last(text, last, limit) or (last, limit)
    if parts.generated:
        stop = limit
    calls = _calls_start(text, start, ending, parts, controls)
    answer = calls
    if parts.content and parts.content[0] <= calls:
        answer = max(start, parts.content[0])
    return Completion(start, answer, calls, max(calls, ending), max(calls, ending, stop))


def _without_reasoning(text: str, completion: Completion) -> Completion:
    """The completion of a message that does not reason: a blank that the template puts before the answer belongs to it."""
    if text[completion.start : completion.answer].isspace():
        return completion._replace(answer=completion.start)
    return completion


def _calls_start(text: str, start: int, ending: int, parts: _Parts, controls: Controls) -> int:
    """Where tool calls begin, with the template's words before them: behind the answer, or, where there is nothing else,
    behind empty tags of reasoning.
    """
    if not parts.call:
        return ending
    if parts.content and parts.content[1] <= parts.call[1]:
        return max(start, parts.content[1])
    if parts.reasoning or parts.content:
        return max(start, parts.call[0])
    return _behind_tags(text, start, parts.call[0], controls)


def _behind_tags(text: str, start: int, stop: int, controls: Controls) -> int:
    """Where the last tag in `[start, stop)` that closes another ends, or `start`: there ends reasoning that is written
    though there is none. A token that closes nothing may be what introduces calls.
    """
    closing = [token for token in controls.ids if "/" in token and token.replace("/", "", 1) in controls.ids]
    places = [(text.rfind(token, start, stop), len(token)) for token in closing]
    return max((place + length for place, length in places if place >= 0), default=start)
