"""Anybody's chat data: OpenAI's messages, ShareGPT's turns, or a question with its answer.

`reasoning_effort` is OpenAI's parameter of that name. Every tool is a function, one named python as well.
"""

from collections.abc import Mapping
from typing import Any

from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.harmony.turns import Source

from .chat_source import EFFORTS, chat_source


def convert(record: Mapping[str, Any], split: str) -> Source | Rejected:  # noqa: ARG001 - every converter is asked so
    """The conversation in a record, or why there is none."""
    said = record.get("reasoning_effort")
    return chat_source(record, field=None, effort=EFFORTS.get(said) if isinstance(said, str) else None)
