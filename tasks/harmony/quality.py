"""What a row is worth, judged from its text alone: as the parser reads it, not as the composition meant it.

A row is valid when the strict grammar reads it, no rule of meaning that is on is broken, and the reference, where it is
asked, reads the same messages. Every flag is false and every count zero where the grammar refuses the text. This takes
some microseconds per message; the reference takes 1 ms per row and 0.7 ms per KB, so it is asked of a share of rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .grammar import Fault, ParsedMessage
from .message import ROLES, HarmonyMessage
from .render import cross_check
from .semantics import NONE_OFF, WARNINGS, Schemas, faults

TOOL_CODES = frozenset({"S11", "S12", "S13", "S14", "S15"})
"""The rules about calls and results."""


@dataclass(frozen=True, slots=True)
class Quality:
    """The flags and counts of a text, each under the name of its column.

    `quality_error_code` is that of the first fault that makes the row invalid, `quality_error_offset` its character and
    `error_detail`, which is no column, what was found there.
    """

    quality_valid_harmony: bool = False
    quality_completion_nonempty: bool = False
    quality_completion_ends_with_return: bool = False
    quality_has_tool: bool = False
    quality_valid_tool_schema: bool = False
    quality_error_code: str | None = None
    quality_error_offset: int | None = None
    num_messages: int = 0
    num_tool_calls: int = 0
    num_tool_results: int = 0
    error_detail: str | None = field(default=None, compare=False)


SecondOpinion = Callable[[str, Sequence[ParsedMessage]], Fault | None]
"""What another parser objects to in a text and its messages, or None."""


def no_opinion(_text: str, _messages: Sequence[ParsedMessage]) -> None:
    """Nobody else is asked."""


def judge(
    text: str,
    parsed: Sequence[ParsedMessage] | Fault,
    declared: Schemas | None = None,
    off: frozenset[str] = NONE_OFF,
    least: int = 1,
    second_opinion: SecondOpinion = cross_check,
) -> Quality:
    """The quality of a text that `parse` reads as `parsed`.

    `declared` are the recipients that may be called, with their schemas, None where they are unknown. `off` holds codes
    of rules that are not asked. An answer is a completion from `least` characters on, blanks at its ends not counted.
    `second_opinion` says what another parser objects to; `no_opinion` asks none.
    """
    if isinstance(parsed, Fault):
        return Quality(quality_error_code=parsed.code, quality_error_offset=parsed.offset, error_detail=parsed.detail)
    found = faults(parsed, declared, off, declared)
    errors = [fault for fault in found if fault.code not in WARNINGS]
    error = next(iter(errors), None) or second_opinion(text, parsed)
    last = parsed[-1]
    answer = last.body.strip() if last.author == "assistant" and last.channel == "final" else ""
    calls = sum(map(is_call, parsed))
    results = sum(map(is_result, parsed))
    return Quality(
        quality_valid_harmony=error is None,
        quality_completion_nonempty=bool(answer) and len(answer) >= least,
        quality_completion_ends_with_return=last.terminator == "return",
        quality_has_tool=bool(calls or results),
        quality_valid_tool_schema=all(fault.code not in TOOL_CODES for fault in found),
        quality_error_code=error and error.code,
        quality_error_offset=error and error.offset,
        error_detail=error and error.detail,
        num_messages=len(parsed),
        num_tool_calls=calls,
        num_tool_results=results,
    )


def is_call(message: HarmonyMessage) -> bool:
    """Whether the assistant calls a tool."""
    return message.author == "assistant" and message.recipient is not None


def is_result(message: HarmonyMessage) -> bool:
    """Whether a tool speaks."""
    return message.author not in ROLES
