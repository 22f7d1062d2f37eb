"""Reasoning, wherever a source keeps it: under a key of its own, or inline between `<think>` and `</think>`.

Templates treat reasoning and answers differently (they leave old reasoning out, say), which they can only do when they
are told which is which. Guessing would put thoughts into answers, so inline thinking counts only where generation puts
it, at the very beginning; what is left of it elsewhere is text, and what could be read in two ways is rejected.
"""

from collections.abc import Mapping
from typing import Any

from .conversation import RejectionError, Role
from .json_values import kind, require_utf8

OPEN, CLOSE = "<think>", "</think>"

SPELLINGS = ("reasoning_content", "reasoning", "thinking")
"""The keys that reasoning goes by. Only the first is always text; `thinking: true` is a setting and says no thoughts."""


def given_reasoning(message: Mapping[str, Any], role: Role) -> str | None:
    """The reasoning that stands under a key of its own, None where it is absent or blank."""
    value = message.get(SPELLINGS[0])
    if value is not None and not isinstance(value, str):
        raise RejectionError("bad_reasoning", f"its {SPELLINGS[0]} is {kind(value)}; make it a string, or leave it out")
    found = {text for key in SPELLINGS if isinstance(text := message.get(key), str) and not _blank(text)}
    if not found:
        return None
    if role != "assistant":
        raise RejectionError("reasoning_not_by_assistant", "it has reasoning, which only the assistant can have")
    if len(found) > 1:
        raise RejectionError("reasoning_twice", f"it has different reasoning under more than one of {SPELLINGS}")
    reasoning = found.pop()
    require_utf8(reasoning, "its reasoning")
    return reasoning


def split_thinking(content: str) -> tuple[str | None, str]:
    """Inline thinking, None where there is none or it is blank, and the answer that follows it.

    Raises RejectionError for thinking that never ends, and for an answer that begins with thinking again.
    """
    opened = content.lstrip().startswith(OPEN)
    thoughts, closed, answer = content.partition(CLOSE)
    if not closed and opened:
        raise RejectionError("unclosed_think", f"its content opens {OPEN} and never closes it; was it cut short?")
    if not _thinks(content):
        return None, content
    answer = answer.lstrip("\n")
    if _thinks(answer):
        raise RejectionError("reasoning_twice", f"what follows its first {CLOSE} is thinking again")
    thoughts = (thoughts.lstrip().removeprefix(OPEN) if opened else thoughts).strip("\n")
    return (None if _blank(thoughts) else thoughts), answer


def _thinks(content: str) -> bool:
    """Whether content begins with thinking: it opens it, or it closes what nothing opened."""
    before, closed, _ = content.partition(CLOSE)
    return content.lstrip().startswith(OPEN) or (bool(closed) and OPEN not in before)


def _blank(text: str) -> bool:
    return not text or text.isspace()
