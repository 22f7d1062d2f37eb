"""nvidia/Nemotron-Instruction-Following-Chat-v1: chats of many turns, and answers in a given structure.

`reasoning` says on or off in one split and is absent in the other. Off means low effort and no reasoning.
"""

from collections.abc import Mapping
from typing import Any

from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.harmony.turns import Source

from .chat_source import chat_source


def convert(record: Mapping[str, Any], split: str) -> Source | Rejected:  # noqa: ARG001 - every converter is asked so
    """The conversation in a record, or why there is none."""
    return chat_source(record)
