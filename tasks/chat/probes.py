"""Probe a template: render synthetic conversations to find its properties.

Templates don't declare their generation prompt, their control tokens, whether they strip reasoning from earlier turns, or which
parts of a conversation they omit, but renderings reveal all of it. The results decide how masks are built, and `check`
verifies them on the same conversations. Probing takes a few milliseconds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .controls import Controls, controls_of
from .conversation import CLOSE, OPEN, Arguments, Conversation, Inline, Message, ToolCall, asks_nothing
from .loss import Openings, parts_of
from .template import ChatTemplate, Rendering

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up the {name} of a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Where."}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    }
    for name in ("weather", "population")
]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _says(text: str, reasoning: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": text}
    return message if reasoning is None else {**message, "reasoning_content": reasoning}


def _calls(text: str | None, *names: str, reasoning: str | None = None) -> Message:
    arguments = {"place": "Oslo", "days": 2}
    calls: list[ToolCall] = [
        {
            "id": f"call{number:05d}",
            "type": "function",
            "function": {"name": name, "arguments": Arguments(arguments, '{"place": "Oslo", "days": 2}')},
        }
        for number, name in enumerate(names)
    ]
    message: Message = {"role": "assistant", "content": text, "tool_calls": calls}
    return message if reasoning is None else {**message, "reasoning_content": reasoning}


def _result(text: str, number: int) -> Message:
    name = TOOLS[number]["function"]["name"]
    return {"role": "tool", "content": text, "tool_call_id": f"call{number:05d}", "name": name}


SYSTEM: Message = {"role": "system", "content": "You are a patient guide."}

PROBES: dict[str, Conversation] = {
    "one turn": Conversation([_user("Is water wet?"), _says("It is.")], []),
    "several turns": Conversation([_user("One?"), _says("Two."), _user("Three?"), _says("Four.")], []),
    "a system message": Conversation([SYSTEM, _user("Who are you?"), _says("A guide.")], []),
    "reasoning": Conversation([_user("Why?"), _says("Because.", "They ask why.\nI answer.")], []),
    "reasoning in several turns": Conversation(
        [_user("Why?"), _says("Because.", "First thought."), _user("And?"), _says("So.", "Second thought.")], []
    ),
    "reasoning in three turns": Conversation(
        [
            _user("Why?"), _says("Because.", "First thought."), _user("And?"), _says("So.", "Second thought."),
            _user("Then?"), _says("Thus.", "Third thought."),
        ],
        [],
    ),
    "some reasoning": Conversation(
        [_user("Why?"), _says("Because.", "A thought."), _user("And?"), _says("So."), _user("But?"), _says("Yes.", "Hm.")], []
    ),
    "an empty answer": Conversation([_user("Say nothing."), _says(""), _user("Thanks."), _says("Gladly.")], []),
    "a tool call": Conversation(
        [_user("Rain?"), _calls("I look.", "weather"), _result("rain", 0), _says("Rain.")], TOOLS
    ),
    "parallel tool calls": Conversation(
        [SYSTEM, _user("Both?"), _calls(None, "weather", "population"), _result("sun", 0), _result("9", 1), _says("Sun, 9.")],
        TOOLS,
    ),
    "tools and reasoning in several turns": Conversation(
        [
            SYSTEM, _user("Rain?"), _calls("", "weather", reasoning="Ask."), _result("no", 0), _says("No.", "It answers no."),
            _user("And snow?"), _calls(None, "weather", reasoning="Again."), _result("yes", 0), _says("Yes.", "It does."),
        ],
        TOOLS,
    ),
    "two answers in a row": Conversation([_user("Go on."), _says("First."), _says("Second.")], []),
    "one turn with tools": Conversation([_user("Is it late?"), _says("No.")], TOOLS),
    "a developer message": Conversation([{"role": "developer", "content": "Be kind."}, _user("Hello?"), _says("Hi.")], []),
    "an answer first": Conversation([_says("Ask me."), _user("Why?"), _says("So.")], []),
    "two questions in a row": Conversation([_user("First?"), _user("Second?"), _says("Both.")], []),
}  # fmt: skip
"""Every shape of conversation in datasets; a template may reject some."""

THINKING: Sequence[Mapping[str, Any]] = (
    {}, {"enable_thinking": True}, {"enable_thinking": False}, {"thinking": True}, {"thinking": False},
)  # fmt: skip
"""The variables that turn thinking on or off in templates; each may change the generation prompt."""


REASONING = {1, 3, 5}  # the messages with reasoning in "reasoning in three turns"


@dataclass(frozen=True, slots=True)
class TemplateProfile:
    """Properties of a template: how it begins and ends answers, its control tokens, whether it writes reasoning in the last
    turn and in earlier ones, and how it reads thinking inside of contents.
    """

    openings: Openings
    controls: Controls
    writes_reasoning: bool
    keeps_reasoning: bool
    inline: Inline

    @property
    def strips_history(self) -> bool:
        """Whether a turn changes once a second one follows."""
        return self.writes_reasoning and not self.keeps_reasoning


def profile_template(template: ChatTemplate, added_tokens: Mapping[str, int]) -> TemplateProfile:
    """Probe a template. `added_tokens` are the vocabulary's control strings and other added tokens, with ids."""
    renderings = [template.render(probe.messages, probe.tools) for probe in PROBES.values()]
    texts = [each.text for each in renderings if isinstance(each, Rendering)]
    # Prompts of all variables count as written by the template: they may have other control tokens than renderings.
    answers = list(_answers(template))
    prompts = {prompt for answer in answers for prompt in answer.prompts}
    controls = controls_of([template.source, *texts, *prompts], added_tokens)
    reasoned = template.render(PROBES["reasoning in three turns"].messages, [])
    spans = reasoned.spans if isinstance(reasoned, Rendering) else ()
    # Which of three turns have their reasoning in the rendering.
    written = {number for start, stop, (number, kind) in spans if kind == "reasoning" and start < stop}
    inline = _inline(template, writes_reasoning=bool(written))
    return TemplateProfile(
        openings=_openings(template, answers, controls.written, inline),
        controls=controls,
        writes_reasoning=bool(written),
        keeps_reasoning=written == REASONING,
        inline=inline,
    )


def _inline(template: ChatTemplate, *, writes_reasoning: bool) -> Inline:
    """How a template reads thinking inside of a content: by comparison with the same thoughts as `reasoning_content`."""
    thoughts, answer, dropped = "A thought.", "Because.", "\n\nBecause."
    ended = f"{thoughts}\n{CLOSE}{dropped}"
    answers = _says(answer, thoughts), _says(f"{OPEN}\n{ended}"), _says(ended), _says(dropped)
    renderings = [template.render([_user("Why?"), each], []) for each in answers]
    # In order: as reasoning_content, with both tags, with the closing tag, without thoughts.
    texts = [each.text if isinstance(each, Rendering) else "" for each in renderings]
    if len(set(texts[1:])) == 1:
        return "dropped"
    if len(set(texts[:3])) == 1:
        return "split"
    return "opened" if writes_reasoning else "content"


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer of a probe: the generation prompts that the template writes in its place, the prompt its rendering
    begins with, its message number, the role before it, and the rendering. `own`: the template's own variables were used.
    """

    prompts: frozenset[str]
    opening: str | None
    number: int
    role_before: str
    rendering: Rendering | None
    own: bool


def is_reply(messages: Sequence[Message], number: int) -> bool:
    """Return whether a message answers one from a different role, as in requests to a server."""
    return number > 0 and messages[number]["role"] == "assistant" != messages[number - 1]["role"]


def _answers(template: ChatTemplate) -> Iterator[_Answer]:
    """The generation prompt that a template writes in place of every answer."""
    # A variable that the source doesn't name can't change a prompt.
    asked = [variables for variables in THINKING if all(name in template.source for name in variables)]
    for probe in PROBES.values():
        whole = template.render(probe.messages, probe.tools)
        for number in range(len(probe.messages)):
            if not is_reply(probe.messages, number):
                continue
            # An answer may be rendered differently as the last message and within the history.
            cut_short = template.render(probe.messages[: number + 1], probe.tools)
            renderings = [each for each in (cut_short, whole) if isinstance(each, Rendering) and number in each.extents]
            for variables in asked:
                yield from _answers_at(template, probe, number, variables, renderings)


def _answers_at(
    template: ChatTemplate,
    probe: Conversation,
    number: int,
    variables: Mapping[str, Any],
    renderings: Sequence[Rendering],
) -> Iterator[_Answer]:
    before, own = probe.messages[:number], not variables
    role_before = before[-1]["role"]
    asked = template.render(before, probe.tools, **variables, add_generation_prompt=True)
    if not isinstance(asked, Rendering):
        return
    plain = template.render(before, probe.tools, **variables)
    prompts = frozenset[str]()
    if isinstance(plain, Rendering) and asked.text.startswith(plain.text):
        prompts = frozenset([asked.text[len(plain.text) :]])
    elif isinstance(plain, Rendering) and asked.epilogue < len(asked.text):
        # The template also writes something else differently; then the prompt is all that is behind the last message.
        prompts = frozenset([asked.text[asked.epilogue :]])
    yield _Answer(prompts, None, number, role_before, None, own)
    for written in renderings:
        start = written.extents[number][0]
        if written.text.startswith(asked.text) and len(asked.text) >= start:
            yield _Answer(prompts, written.text[start : len(asked.text)], number, role_before, written, own)
        for prompt in {each.lstrip() for each in prompts} | prompts:
            if prompt and written.text.startswith(prompt, start):
                yield _Answer(prompts, prompt, number, role_before, written, own)


def _openings(template: ChatTemplate, answers: Sequence[_Answer], controls: Controls, inline: Inline) -> Openings:
    # False is sorted before True: prompts with the template's own variables are first.
    prompts = {(True, prompt) for answer in answers if not answer.own for prompt in answer.prompts - {""}}
    prompts |= {(False, prompt) for answer in answers if answer.own for prompt in answer.prompts - {""}}
    prompts |= {(not answer.own, answer.opening) for answer in answers if answer.opening}
    unprompted = frozenset(answer.role_before for answer in answers if answer.opening == "")
    ordered = [prompt for _, prompt in sorted(prompts, key=lambda each: (each[0], -len(each[1]), each[1]))]
    outside = _ends_in_next(template, controls)
    leads = {""}
    for answer in answers:
        if answer.opening is None or answer.rendering is None:
            continue
        rendering, number = answer.rendering, answer.number
        start, stop = rendering.extents[number]
        start += len(answer.opening)
        ending = stop if outside else (controls.last(rendering.text, start, stop) or (stop, stop))[0]
        leads.add(rendering.text[start : parts_of(rendering, [number])[number].begin(start, ending)])
    # What ends the last answer of a conversation: the control tokens behind its content.
    stops = frozenset[str]()
    single = template.render(PROBES["one turn"].messages, [])
    if isinstance(single, Rendering) and 1 in single.extents:
        written, stop = parts_of(single, [1])[1].content, single.extents[1][1]
        stops = frozenset(controls.pattern.findall(single.text[written[1] if written else stop : stop]))
    return Openings(tuple(dict.fromkeys(ordered)), unprompted, frozenset(leads), outside, stops, inline)


def _ends_in_next(template: ChatTemplate, controls: Controls) -> tuple[str, ...]:
    """Return the tokens that follow an answer, and calls, if answers don't have an end token; else none."""
    rendering = template.render(PROBES["several turns"].messages, [])
    if not isinstance(rendering, Rendering) or not controls.ids or 1 not in rendering.extents:
        return ()
    content, stop = parts_of(rendering, [1])[1].content, rendering.extents[1][1]
    following = controls.pattern.match(rendering.text, stop)
    if content is None or content[1] != stop or following is None:
        return ()
    calling = template.render(PROBES["a tool call"].messages, PROBES["a tool call"].tools)
    place = calling.extents.get(1, (0, 0))[1] if isinstance(calling, Rendering) else 0
    called = controls.pattern.match(calling.text, place) if isinstance(calling, Rendering) else None
    return following.group(), (called or following).group()


class TemplatePart(NamedTuple):
    """A part of conversations: a probe that has it, a text that only this part has, and whether a conversation has it."""

    probe: Conversation
    text: str
    occurs: Callable[[Conversation], bool]


def _spoken_by(role: str, first: int = 0) -> Callable[[Conversation], bool]:
    """Whether a message from number `first` on is by `role`."""
    return lambda talk: any(message["role"] == role for message in talk.messages[first:])


LATER = Conversation([*PROBES["several turns"].messages[:2], SYSTEM, *PROBES["several turns"].messages[2:]], [])

PARTS: Mapping[str, TemplatePart] = {
    "system messages": TemplatePart(PROBES["a system message"], "patient", _spoken_by("system")),
    "later system messages": TemplatePart(LATER, "patient", _spoken_by("system", 1)),
    "developer messages": TemplatePart(PROBES["a developer message"], "Be kind.", _spoken_by("developer")),
    "tools": TemplatePart(PROBES["one turn with tools"], "population", lambda talk: bool(talk.tools)),
    "tool results": TemplatePart(PROBES["a tool call"], "rain", _spoken_by("tool")),
    "reasoning": TemplatePart(
        PROBES["reasoning"], "They ask", lambda talk: any("reasoning_content" in each for each in talk.messages)
    ),
}
"""Answers and tool calls are not among them: conversations without these are rejected."""


NO_QUESTION = "questions, which are blank or a placeholder"  # what rows are counted by that ask nothing


def unwritten_by(template: ChatTemplate) -> frozenset[str]:
    """Return the kinds that a template omits; one that it rejects is not omitted."""
    renderings = {name: template.render(kind.probe.messages, kind.probe.tools) for name, kind in PARTS.items()}
    return frozenset(
        name
        for name, found in renderings.items()
        if isinstance(found, Rendering) and PARTS[name].text not in found.text
    )


def unwritten_in(conversation: Conversation, kinds: Iterable[str]) -> list[str]:
    """Return the parts of a conversation that a template omits, and the definitions and questions that it lacks."""
    found = [f"{name} that the template doesn't write" for name in sorted(kinds) if PARTS[name].occurs(conversation)]
    # A model that calls tools without their definitions learns to invent them.
    called = {call["function"]["name"] for each in conversation.messages for call in each.get("tool_calls", ())}
    functions = [tool.get("function") or tool for tool in conversation.tools] if called else []
    if not called <= {function["name"] for function in functions}:
        found.append("definitions of called tools, which the row lacks")
    questions = [message["content"] or "" for message in conversation.messages if message["role"] == "user"]
    if any(asks_nothing(question, first=number == 0) for number, question in enumerate(questions)):
        found.append(NO_QUESTION)
    return found
