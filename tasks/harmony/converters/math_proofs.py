"""nvidia/Nemotron-Math-Proofs-v1: problems, their statements in Lean 4, and for two of three rows verified proofs.

Two things can be learned of a row: to prove the statement, from the messages, and to formalize the problem, from the
statement and its header. They are two conversions, because a row that has one may lack the other.
"""

from collections.abc import Mapping
from typing import Any

from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.json_values import kind
from tokenmill.tasks.harmony.turns import Source

from .chat_source import chat_source, single_turn

INSTRUCTIONS = "State the problem as a theorem in Lean 4. Answer with Lean code alone."


def convert(record: Mapping[str, Any], split: str) -> Source | Rejected:  # noqa: ARG001 - every converter is asked so
    """The proof in a record; most that have none hold an empty list, or the text of one, and are rejected."""
    return chat_source(record)


def formalize(record: Mapping[str, Any], split: str) -> Source | Rejected:  # noqa: ARG001 - same
    """The problem as the question and its formal statement as the answer, or why there is none."""
    names = ("problem", "lean_header", "formal_statement")
    for name in names:
        value = record.get(name)
        if not isinstance(value, str) or not value.strip():
            found = "blank" if isinstance(value, str) else kind(value)
            return Rejected("no_formal_statement", f"{name} is {found}; both the problem and the statement are needed")
    problem, header, statement = (str(record[name]) for name in names)
    return single_turn(problem, f"{header.rstrip()}\n\n{statement.lstrip()}", INSTRUCTIONS, record)
