"""nvidia/Nemotron-Science-v1: a question of science, multiple choice (MCQ) or open (RQA), and its reasoned answer."""

from collections.abc import Mapping
from typing import Any

from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.harmony.turns import Source

from .chat_source import chat_source


def convert(record: Mapping[str, Any], split: str) -> Source | Rejected:  # noqa: ARG001 - every converter is asked so
    """The conversation in a record, or why there is none."""
    return chat_source(record)
