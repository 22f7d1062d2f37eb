"""What a template does, found out by asking it: before a run, a few synthetic conversations are rendered with it.

Templates do not say what their generation prompt is, which control tokens they write, or whether they strip reasoning
from earlier turns; and a program cannot be read for it. But all of it shows in what they render. The answers decide how
masks are made, and `check.py` then proves, on the same conversations, that the masks come out right. A few milliseconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.chat.controls import Controls, controls_of
from tasks.chat.conversation import Arguments, Conversation, Message, Rejected, ToolCall
from tasks.chat.template import ChatTemplate, Rendering

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
            SYSTEM, _user("Rain?"), _calls("", "weather", reasoning="Ask."), _result("no", 0), _says("No.", "It says no."),
            _user("And snow?"), _calls(None, "weather", reasoning="Again."), _result("yes", 0), _says("Yes.", "It does."),
        ],
        TOOLS,
    ),
    "two answers in a row": Conversation([_user("Go on."), _says("First."), _says("Second.")], []),
    "two questions in a row": Conversation([_user("First?"), _user("Second?"), _says("Both.")], []),
}  # fmt: skip
"""Every shape of conversation that data sets hold; a template may refuse some of them."""

THINKING: Sequence[Mapping[str, Any]] = (
    {}, {"enable_thinking": True}, {"enable_thinking": False}, {"thinking": True}, {"thinking": False},
)  # fmt: skip
"""The names under which templates are asked to think or not; each may change the generation prompt."""


REASONING = {1, 3, 5}
"""The messages of "reasoning in three turns" that reason."""


@dataclass(frozen=True, slots=True)
class Habits:
    """What a template does: the generation prompts it writes, longest first, the control tokens in its renderings, and
    whether reasoning is written in the last turn and in earlier ones.
    """

    prompts: tuple[str, ...]
    controls: Controls
    writes_reasoning: bool
    keeps_reasoning: bool

    @property
    def strips_history(self) -> bool:
        """Whether a turn looks different once another follows."""
        return self.writes_reasoning and not self.keeps_reasoning


def habits(template: ChatTemplate, added_tokens: Mapping[str, int]) -> Habits:
    """Ask a template. `added_tokens` are the control strings and other added tokens of the vocabulary, with ids."""
    renderings = [template.render(probe.messages, probe.tools) for probe in PROBES.values()]
    texts = [each.text for each in renderings if isinstance(each, Rendering)]
    prompts = tuple(sorted(set(_prompts(template)), key=lambda prompt: (-len(prompt), prompt)))
    written = _reasoned(template, "reasoning in three turns")
    return Habits(
        prompts=prompts,
        controls=controls_of([template.source, *texts, *prompts], added_tokens),
        writes_reasoning=bool(written),
        keeps_reasoning=written == REASONING,
    )


def _reasoned(template: ChatTemplate, name: str) -> set[int]:
    """The messages of a probe whose reasoning is written."""
    rendering = template.render(PROBES[name].messages, PROBES[name].tools)
    if isinstance(rendering, Rejected):
        return set()
    return {number for start, stop, (number, kind) in rendering.spans if kind == "reasoning" and start < stop}


def _prompts(template: ChatTemplate) -> Iterator[str]:
    """What a template adds when it is asked for a generation prompt, behind every message that an answer may follow."""
    for probe in PROBES.values():
        for stop in range(1, len(probe.messages) + 1):
            for variables in THINKING:
                yield from _prompt(template, probe.messages[:stop], probe.tools, variables)


def _prompt(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[dict[str, Any]], variables: Mapping[str, Any]
) -> Iterator[str]:
    without = template.render(messages, tools, **variables)
    asked = template.render(messages, tools, **variables, add_generation_prompt=True)
    if isinstance(without, Rendering) and isinstance(asked, Rendering):
        prompt = asked.text[asked.epilogue :]
        yield from filter(None, {prompt, prompt.removeprefix(without.text[without.epilogue :])})
