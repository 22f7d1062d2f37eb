"""nvidia/Nemotron-Math-v2: solutions of competition problems, with and without Python, at three reasoning efforts.

The effort is the split's (high_part00, medium, low). The Python tool is a function of the source and built in for
Harmony. `metadata` holds pass rates of the problem at each effort, and not of this solution, which is a correct one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.harmony.compose import PYTHON_TOOLS, function_of
from tokenmill.tasks.harmony.metadata import effort_of, of_evaluation
from tokenmill.tasks.harmony.turns import Source

from .chat_source import chat_source

INSTRUCTIONS = "Solve the problem and put the final answer within \\boxed{}. Do not guess."


def convert(record: Mapping[str, Any], split: str) -> Source | Rejected:
    """The conversation in a record, or why there is none."""
    source = chat_source(record, effort=effort_of(split))
    if isinstance(source, Rejected):
        return source
    offered = {function_of(tool)["name"] for tool in source.tools}
    called = {call["name"] for message in source.messages for call in message.get("tool_calls", ())}
    return replace(
        source,
        instructions=INSTRUCTIONS,
        python=not PYTHON_TOOLS.isdisjoint(offered | called),
        metadata={**source.metadata, **of_evaluation(record, source.effort, tools=bool(source.tools))},
    )
