"""nvidia/Nemotron-Agentic-v1: conversations with tools, up to 372 of them, most with several turns.

The arguments of calls are objects in one split and text in the other, results are text, objects, arrays or booleans,
and only one in twenty says which call it answers. Tools say of parameters what properties they have and not that they
are objects.
"""

from collections.abc import Mapping
from typing import Any

from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.harmony.turns import Source

from .chat_source import chat_source


def convert(record: Mapping[str, Any], split: str) -> Source | Rejected:  # noqa: ARG001 - every converter is asked so
    """The conversation in a record, or why there is none."""
    return chat_source(record)
