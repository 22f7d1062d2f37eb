"""Rows that are Harmony text already, under `text`: kept, if the strict grammar accepts them.

Headers in an order that models write and the canonical form does not, such as a recipient after the channel, are
brought into that form; nothing else changes, whatever the policy. Texts that declare no tool may call any, because
public data sets of this kind leave declarations out.
"""

from collections.abc import Mapping
from typing import Any

from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.harmony.grammar import Fault, parse
from tokenmill.tasks.harmony.metadata import of_record
from tokenmill.tasks.harmony.preamble import declared
from tokenmill.tasks.harmony.turns import Composed


def convert(record: Mapping[str, Any], split: str) -> Composed | Rejected:  # noqa: ARG001 - every converter is asked so
    """The messages of a record's text, or the grammar's first objection."""
    found = parse(record.get("text"))
    if isinstance(found, Fault):
        return Rejected(found.name, f"text, character {found.offset}: {found.detail}")
    return Composed([each.message for each in found], of_record(record), dict.fromkeys(declared(found)) or None)
