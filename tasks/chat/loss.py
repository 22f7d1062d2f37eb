r"""Which characters of a rendering are trained on: those that the model would generate and the policy selects.

In every template an assistant message begins with the generation prompt, which the server writes
(`<|im_start|>assistant\n`). The completion follows, up to the token that ends the turn:

    reasoning │ answer │ tool calls │ end of turn

Boundaries follow from the origin of the text (see `traced`): the answer is the message's content, tool calls begin with
the loop over them, and the last control token ends the turn. Template text belongs to the text that it introduces: `<think>\n`
and `\n</think>\n` to reasoning, `<tool_call>` to a call. Some templates write calls before the answer. Some (GLM) write
no end of turn; then the control token of the next header ends it.

Template text is trained on only if probes showed that it follows a generation prompt (`Openings`).
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal, NamedTuple

from .controls import Controls
from .conversation import CLOSE, Inline, Message, Range, Rejected
from .template import Rendering

LossOn = Literal["assistant_all", "assistant_bodies", "last_turn", "final_only"]


@dataclass(frozen=True, slots=True)
class LossPolicy:
    """Which tokens are trained on.

    `assistant_all`: all generated text of the assistant; `last_turn`: generated text after the last user message; `final_only`:
    its last answer, without reasoning and tool calls, and nothing if it only calls tools; `assistant_bodies` (formats with
    separate headers): message bodies only. The other fields exclude parts. `empty_reasoning` is the template's placeholder for
    missing reasoning, if it follows the generation prompt: a model that does not generate it would start to reason.
    """

    on: LossOn = "assistant_all"
    reasoning: bool = True
    tool_calls: bool = True
    end_of_turn: bool = True
    empty_reasoning: bool = True

    @property
    def name(self) -> str:
        """Name the trained parts in a word, and the masked ones: `assistant_all`, `last_turn -reasoning`."""
        return " -".join(
            [self.on, *(part for part in ("reasoning", "tool_calls", "end_of_turn") if not getattr(self, part))]
        )

    def trained(self, messages: Sequence[Message]) -> list[int]:
        """Return the numbers of the messages trained on."""
        chosen = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if self.on == "final_only":
            last = messages[chosen[-1]] if chosen else None
            only_calls = last and last.get("tool_calls") and not (last["content"] or "").strip()
            chosen = [] if only_calls else chosen[-1:]
        elif self.on != "assistant_all":
            asked = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
            chosen = [number for number in chosen if number > asked]
        return [number for number in chosen if messages[number].get("trained") != ()]

    def ranges(self, completion: "Completion") -> list[Range]:
        """Return the characters of a completion that are trained on, adjacent ranges merged."""
        reasoning = self.reasoning and (self.empty_reasoning or completion.reasons)
        if reasoning and self.tool_calls and self.end_of_turn and self.on != "final_only":
            return [(completion.start, completion.stop)]
        final = self.on == "final_only"
        # Some templates write calls before the answer.
        answer, calls = (completion.answer, True), (completion.calls, self.tool_calls and not final)
        first, second = (answer, calls) if completion.answer <= completion.calls else (calls, answer)
        wanted = [
            (completion.start, first[0], reasoning and not final),
            (first[0], second[0], first[1]),
            (second[0], completion.ending, second[1]),
            (completion.ending, completion.stop, self.end_of_turn),
        ]
        ranges: list[Range] = []
        for start, stop, trained in wanted:
            if not trained or start == stop:
                continue
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]  # noqa: PLW2901 - grown to the left
            ranges.append((start, stop))
        return ranges


class Completion(NamedTuple):
    """The part of one message that the model generates, as characters of a rendering.

    Reasoning is `[start, answer)`, the answer `[answer, calls)`, tool calls `[calls, ending)`, the end of turn
    `[ending, stop)`; each may be empty. If calls precede the answer, `calls < answer`: reasoning is `[start, calls)`, calls
    `[calls, answer)`, the answer `[answer, ending)`. `reasons` is False if the reasoning is the template's placeholder
    for none.
    """

    start: int
    answer: int
    calls: int
    ending: int
    stop: int
    reasons: bool = True


@dataclass(frozen=True, slots=True)
class Openings:
    """How a template begins and ends answers, from its probes.

    `prompts` are the generation prompts, with the template's own variables first, long ones first. `unprompted` are
    roles whose messages are followed by none. `leads` are texts seen between a prompt and the message. `ends_in_next`:
    answers don't have an end token; the first token after them ends them: these tokens, after an answer and after calls. `stops`
    are the tokens that end the last answer of a conversation. `inline`: how thinking inside of contents is read.
    """

    prompts: tuple[str, ...]
    unprompted: frozenset[str] = frozenset()
    leads: frozenset[str] = frozenset({""})
    ends_in_next: tuple[str, ...] = ()
    stops: frozenset[str] = frozenset()
    inline: Inline = "content"

    def prompts_after(self, before: Sequence[Message]) -> tuple[str, ...]:
        """Return the prompts that may follow some messages. Those after tool results differ; all other roles count as users."""
        role = "tool" if before and before[-1]["role"] == "tool" else "user"
        return ("", *self.prompts) if role in self.unprompted else self.prompts


@dataclass(slots=True)
class Parts:
    """Beginning and end of each part of a message. `of_others`: they include text of a different message; `gap`: the generation
    tags leave a gap; `characters`: of the content, as far as they are written.
    """

    content: Range | None = None
    reasoning: Range | None = None
    call: Range | None = None
    generated: Range | None = None
    of_others: bool = False
    gap: bool = False
    characters: int = 0

    @property
    def all(self) -> list[Range]:
        return [part for part in (self.content, self.reasoning, self.call) if part]

    def begin(self, start: int, stop: int) -> int:
        """Return the beginning of the first part after `start`; `stop` if there is none."""
        if self.call and self.call[0] <= start:
            return start
        return min((part[0] for part in self.all if part[0] >= start), default=stop)


def completions(
    rendering: Rendering, messages: Sequence[Message], numbers: Sequence[int], openings: Openings, controls: Controls
) -> dict[int, Completion] | Rejected:
    """Return the completions of the assistant messages with these numbers, by number.

    Rejected if the template omits a message, its content or its tool calls, begins it in an unknown way, or does not end it,
    because no mask would be correct.
    """
    found: dict[int, Completion] = {}
    # One pass over all spans: a rendering of many messages has many.
    parts = parts_of(rendering, numbers) if numbers else {}
    # A template with generation tags says itself what is generated; nothing is guessed then.
    tagged = any(origin[1] == "generated" for _, _, origin in rendering.spans)
    for number in numbers:
        wrong = _left_out(number, messages[number], rendering, parts)
        wrong = wrong or (_not_generated(number, parts[number]) if tagged else None)
        if wrong is not None:
            return Rejected(*wrong)
        written = parts[number]
        end = _end(rendering, number, written, openings, controls)
        if end is None:
            return Rejected("no_end_of_turn", f"message {number + 1} is not ended by a control token of the template")
        if written.generated:
            start = written.generated[0]
        else:
            prompts = openings.prompts_after(messages[:number])
            start = _generation_start(rendering, number, written, end[0], prompts, openings.leads, controls)
        if start is None:
            return Rejected(*_unprompted(number, messages[number], rendering))
        content, call = written.content, written.call
        begun = max(start, call[0]) if call else start  # the loop over calls may have written the header first
        within = content and call and content[0] < content[1] and begun < content[0] < call[1]
        if content and within and rendering.text[begun : content[0]].strip():
            return Rejected("parts_mixed", f"message {number + 1} has its content between its tool calls")
        # Within the history, an answer may end with a token that the model wouldn't write: its last answer never does.
        ending = rendering.text[slice(*end)]
        ends_itself = written.generated or messages[number].get("tool_calls") or openings.ends_in_next
        if number < len(messages) - 1 and openings.stops and not ends_itself:
            end = (end[0], end[0]) if ending in controls.ids and ending not in openings.stops else end
        completion = _completion(rendering.text, start, end, written, controls)
        if "reasoning_content" not in messages[number]:
            is_blank = rendering.text[completion.start : completion.answer].isspace()  # a blank belongs to the answer
            completion = completion._replace(**({"answer": completion.start} if is_blank else {"reasons": False}))
        found[number] = completion
    return found


def ended(rendering: Rendering, messages: Sequence[Message], openings: Openings, controls: Controls) -> Rendering:
    """Return the rendering, with the token that would follow it if nothing else ends its last answer."""
    extents = {**rendering.extents, **_before_results(rendering, messages, controls)}
    rendering = replace(rendering, extents=extents)
    last = len(messages) - 1
    stop = rendering.extents.get(last, (0, 0))[1]
    if not openings.ends_in_next or messages[last]["role"] != "assistant" or stop != len(rendering.text):
        return rendering
    answer, calls = openings.ends_in_next
    return replace(rendering, text=rendering.text + (calls if messages[last].get("tool_calls") else answer))


def _before_results(rendering: Rendering, messages: Sequence[Message], controls: Controls) -> dict[int, Range]:
    """The extents of messages within which the template writes the results of their calls (Gemma 4): up to the control token
    that is after the calls, which ends them, as it does without results.
    """
    found: dict[int, Range] = {}
    spans = rendering.spans
    # Most templates write no result within a turn of the assistant, and are done here.
    results = [span[0] for span in spans if span[2][1] == "result" and span[0] < span[1]]
    for number, message in enumerate(messages if results else ()):
        start, stop = rendering.extents.get(number, (0, 0))
        place = bisect_left(results, start)
        if "tool_calls" not in message or place == len(results) or results[place] >= stop:
            continue
        first = results[place]
        # Spans are in order, so the turn is found without a look at each.
        within = spans[bisect_left(spans, start, key=itemgetter(0)) : bisect_left(spans, stop, key=itemgetter(0))]
        begun = min((span[0] for span in within if span[2] == (number, "call")), default=stop)
        ends = [span[0] for span in within if span[2][1] == "end" and begun < span[0] <= first]
        token = controls.pattern.match(rendering.text, max(ends)) if ends else None
        said = {(number, "content"), (number, "reasoning")}
        goes_on = not rendering.text[stop - 1].isspace()  # or the answer begins with what no prompt writes
        if token and token.end() <= first and goes_on and not any(first < a < b for a, b, of in within if of in said):
            found[number] = (start, token.end())
    return found


def _end(rendering: Rendering, number: int, written: Parts, openings: Openings, controls: Controls) -> Range | None:
    """Beginning and end of the end of turn: a control token, or the text that the vocabulary has for one. None if the
    template writes only blanks after the answer.
    """
    text, (start, stop) = rendering.text, rendering.extents[number]
    # The end of turn is behind the whole text of the message.
    last = max([start, *(part[1] for part in written.all)])
    if written.generated:
        stop = written.generated[1]
        found = controls.last(text, last, stop)
        return (found[0], stop) if found else (last, stop) if text[last:stop].strip() else None
    if openings.ends_in_next:
        following = controls.pattern.match(text, stop)
        return (stop, following.end()) if following else None
    found = controls.last(text, last, stop)
    return found or ((last, stop) if text[last:stop].strip() else None)


def parts_of(rendering: Rendering, numbers: Sequence[int]) -> dict[int, Parts]:
    """Return the known characters of some messages, from the spans in their extents."""
    parts = {number: Parts() for number in numbers}
    current, turn, end = None, -1, 0
    for start, stop, (number, kind) in rendering.spans:
        if kind == "message":
            if number in rendering.extents and start == rendering.extents[number][0]:
                current, turn, end = parts.get(number), number, rendering.extents[number][1]
        elif current is None or kind == "loop" or (start > end and "generated" not in kind):
            continue
        elif kind == "content" and number == turn:
            current.content = _enclosing(current.content, (start, stop))
            current.characters += stop - start
        elif kind == "reasoning" and number == turn:
            current.reasoning = _enclosing(current.reasoning, (start, stop))
        elif kind in {"content", "reasoning", "result"}:
            current.of_others = current.of_others or start < min(stop, end)
        elif (kind == "call" and number == turn) or (kind == "end" and current.call and start < end):
            first, last = current.call or (start, stop)
            current.call = min(first, start), max(last, stop)
        elif kind in {"generated", "end_generated"}:
            current.gap = current.gap or (kind == "generated" and (current.generated or (0, start))[1] < start)
            current.generated = _enclosing(current.generated, (start, stop))
    return parts


def _enclosing(known: Range | None, new: Range) -> Range:
    # A text that a template cut off leaves an empty span, which gives way to a real one.
    if known is None or (known[0] == known[1] and new[0] < new[1]):
        return new
    return min(known[0], new[0]), max(known[1], new[1])


def _left_out(
    number: int, message: Message, rendering: Rendering, parts: Mapping[int, Parts]
) -> tuple[str, str] | None:
    """Reason and detail if the template omits content that must be trained on."""
    start, stop = rendering.extents.get(number, (0, 0))
    if start == stop:
        found = any(of == (number, "content") and first < last for first, last, of in rendering.spans)
        where = " in a loop over the messages" if found else ""
        reason = "message_outside" if found else "message_left_out"
        return reason, f"the chat template does not write message {number + 1}{where}"
    written = parts[number]
    content = (message["content"] or "").strip()
    # A template that cuts a content at `</think>` writes a part of it.
    in_part = CLOSE in content and written.characters < len(content)
    if content and (written.characters == 0 or in_part):
        return "content_left_out", f"the chat template does not write the content of message {number + 1} as it is"
    if message.get("tool_calls") and (written.call is None or _lacks_calls(number, message, rendering)):
        return "tool_calls_left_out", f"the chat template does not write the tool calls of message {number + 1}"
    if not written.of_others or written.generated:
        return None
    if content and written.call and written.content and written.call[0] < written.content[0]:
        what = f"the content of message {number + 1} behind results of its calls"
        return "parts_mixed", f"the chat template writes {what}"
    return "messages_mixed", f"the chat template writes the text of a different message into message {number + 1}"


def _lacks_calls(number: int, message: Message, rendering: Rendering) -> bool:
    """Whether a template wrote fewer calls than a message has. Some write a call's id instead of its name."""
    calls = message.get("tool_calls", ())
    if len(calls) < 2:  # noqa: PLR2004 - a single call is written or is not
        return False
    begin, stop = rendering.extents[number]
    said = [(start, end) for start, end, of in rendering.spans if of in {(number, "content"), (number, "reasoning")}]
    # Texts may mention a function, so its name counts outside of them only.
    starts, ends = [begin, *(end for _, end in said)], [*(start for start, _ in said), stop]
    written = "\0".join(rendering.text[start:end] for start, end in zip(starts, ends, strict=True))
    names = Counter(call["function"]["name"] for call in calls)
    lacks = any(len(re.findall(rf"(?<!\w){re.escape(name)}(?!\w)", written)) < count for name, count in names.items())
    return lacks and not all((name := call.get("id")) and name in written for call in calls)


def _not_generated(number: int, written: Parts) -> tuple[str, str] | None:
    """Return reason and detail if the template's `generation` tags omit generated text."""
    first, last = written.generated or (0, 0)
    parts = [part for part in (written.content, written.call) if part]
    if written.gap:
        return "not_generated", f"the generation tags of the chat template leave a gap in message {number + 1}"
    if written.generated and all(first <= start and stop <= last for start, stop in parts):
        return None
    return "not_generated", f"the generation tags of the chat template are not around the text of message {number + 1}"


def _generation_start(
    rendering: Rendering,
    number: int,
    parts: Parts,
    ending: int,
    prompts: Sequence[str],
    leads: frozenset[str],
    controls: Controls,
) -> int | None:
    """Where the generation prompt ends: at the beginning of the message, or as close to its text as a prompt occurs.

    A prompt may continue where the message does not (`<think>` before an answer without reasoning); then their common prefix
    counts, up to its last control token or line end. The text between prompt and message must have occurred there in the
    probes; otherwise it is unknown whether the model generates it.
    """
    text, extent = rendering.text, rendering.extents[number]
    start, stop = extent[0], min((part[0] for part in (parts.content, parts.reasoning) if part), default=extent[1])
    header = text[start:stop]
    # A prompt is before the calls, not in the text of one.
    near = header[: parts.call[0] - start] if parts.call and parts.call[0] > start else header
    places = [len(prompt) for prompt in prompts if header.startswith(prompt)]
    places += [near.rfind(prompt) + len(prompt) for prompt in prompts if prompt and prompt in near]
    common: set[int] = set()
    for prompt in prompts:
        # Where a prompt goes on differently, it counts up to its last control token or line end: no token crosses that.
        pairs = enumerate(zip(header, prompt, strict=False))
        shared = next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(header), len(prompt)))
        token = controls.last(header, 0, shared)
        common.add(max(token[1] if token else 0, header.rfind("\n", 0, shared) + 1))
    places += sorted(common - {0}, reverse=True)
    for place in places:
        lead = text[start + place : parts.begin(start + place, ending)]
        if lead.isspace() or lead in leads:
            return start + place
    return None


def _unprompted(number: int, message: Message, rendering: Rendering) -> tuple[str, str]:
    """Reason and detail if the beginning of a message is unknown."""
    if (message["content"] or "").strip() not in rendering.text[slice(*rendering.extents[number])]:
        return "content_left_out", f"the chat template does not write the content of message {number + 1} as it is"
    what = "doesn't begin with a generation prompt that the template writes"
    return "no_generation_prompt", f"message {number + 1} {what}"


def _completion(text: str, start: int, end: Range, parts: Parts, controls: Controls) -> Completion:
    ending, stop = max(start, end[0]), max(start, end[1])
    content, call = parts.content, parts.call
    if content and call and call[1] <= content[0]:
        # With calls first, the answer doesn't bound them.
        calls = _calls_start(text, start, ending, replace(parts, content=None), controls)
        return Completion(start, content[0], calls, ending, stop)
    calls = _calls_start(text, start, ending, parts, controls)
    answer = max(start, content[0]) if content and content[0] <= calls else calls
    return Completion(start, answer, calls, max(calls, ending), max(calls, stop))


def _calls_start(text: str, start: int, ending: int, parts: Parts, controls: Controls) -> int:
    """Where tool calls begin, with the template's text before them: after the answer, or, if there is none, after empty
    reasoning tags.
    """
    if not parts.call:
        return ending
    # Text between the answer and the calls, such as a line end, introduces the calls.
    if parts.content and parts.content[1] <= parts.call[1]:
        return max(start, parts.content[1])
    if parts.reasoning or parts.content:
        return max(start, parts.call[0])
    stop = parts.call[0]  # empty reasoning ends with its last closing tag; a token that isn't one may introduce calls
    closing = [token for token in controls.ids if "/" in token and token.replace("/", "", 1) in controls.ids]
    places = [(text.rfind(token, start, stop), len(token)) for token in closing]
    return max((place + length for place, length in places if place >= 0), default=start)
