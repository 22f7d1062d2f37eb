"""Markdown tables: in cards, choice and behavior reports, and Prefect artifacts."""

import re

from .parts import Table, number

MARKUP = re.compile(r"[\\|`<&*\[\]]|(?<![^\W_])_|_(?![^\W_])")
"""Characters that Markdown or HTML could read as markup; an underscore between letters is none."""


def escaped(text: str) -> str:
    """Untrusted text on one line, without markup."""
    return " ".join(MARKUP.sub(lambda found: f"&#{ord(found[0])};", text).split())


def table_lines(table: Table) -> list[str]:
    """The lines of a table without its caption, and an empty line; nothing without rows."""
    if not table.rows:
        return []
    rows = [
        table.columns,
        ["---"] * len(table.columns),
        *([escaped(number(cell)) for cell in row] for row in table.rows),
    ]
    return [*(f"| {' | '.join(row)} |" for row in rows), ""]
