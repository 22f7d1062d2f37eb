"""What conversations have and a template does not write, as probes of the template show, or what they lack: rows are counted by it."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from .conversation import Conversation, asks_nothing
from .probes import PROBES, SYSTEM
from .template import ChatTemplate, Rendering


class Kind(NamedTuple):
    """A part of conversations: a probe that has it, a text that only this part has, and whether a conversation has it."""

    probe: Conversation
    text: str
    occurs: Callable[[Conversation], bool]


def _spoken_by(role: str, first: int = 0) -> Callable[[Conversation], bool]:
    """Whether a message from number `first` on is by `role`."""
    return lambda talk: any(message["role"] == role for message in talk.messages[first:])


LATER = Conversation([*PROBES["several turns"].messages[:2], SYSTEM, *PROBES["several turns"].messages[2:]], [])

KINDS: Mapping[str, Kind] = {
    "system messages": Kind(PROBES["a system message"], "patient", _spoken_by("system")),
    "later system messages": Kind(LATER, "patient", _spoken_by("system", 1)),
    "developer messages": Kind(PROBES["a developer message"], "Be kind.", _spoken_by("developer")),
    "tools": Kind(PROBES["one turn with tools"], "population", lambda talk: bool(talk.tools)),
    "tool results": Kind(PROBES["a tool call"], "rain", _spoken_by("tool")),
    "reasoning": Kind(
        PROBES["reasoning"], "They ask", lambda talk: any("reasoning_content" in each for each in talk.messages)
    ),
}
"""Answers and tool calls are not among them: conversations without these are rejected."""


NO_QUESTION = "questions, which are blank or a placeholder"
"""What rows are counted by that ask nothing."""


def unwritten_by(template: ChatTemplate) -> frozenset[str]:
    """The kinds that a template leaves out; one that it rejects is not left out."""
    renderings = {name: template.render(kind.probe.messages, kind.probe.tools) for name, kind in KINDS.items()}
    return frozenset(
        name
        for name, found in renderings.items()
        if isinstance(found, Rendering) and KINDS[name].text not in found.text
    )


def unwritten_in(conversation: Conversation, kinds: Iterable[str]) -> list[str]:
    """What a conversation has of the kinds that a template leaves out, and the definitions and questions that it lacks."""
    found = [f"{name} that the template doesn't write" for name in sorted(kinds) if KINDS[name].occurs(conversation)]
    called = {call["function"]["name"] for each in conversation.messages for call in each.get("tool_calls", ())}
    functions = [tool.get("function") or tool for tool in conversation.tools] if called else []
    if not called <= {function["name"] for function in functions}:
        found.append("definitions of called tools, which the row lacks")
    questions = [message["content"] or "" for message in conversation.messages if message["role"] == "user"]
    if any(asks_nothing(question, first=number == 0) for number, question in enumerate(questions)):
        found.append(NO_QUESTION)
    return found
