"""Rows on a console: a table where it fits, otherwise a line each with the name of every value."""

from collections.abc import Collection, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

WIDEST = 10_000
"""Columns of a console that no table fills."""


def print_columns(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: Collection[str],
    *,
    tables: bool,
) -> None:
    """Print rows as a table, or one line each with the name of each value; the columns `words` hold no figures.

    A table that would break figures or names apart on this console is lines, too.
    """
    shown = [
        Column(name)
        if name in words
        else Column(name, justify="right", no_wrap=True, min_width=max(map(len, cells), default=0))
        for name, *cells in zip(columns, *rows, strict=True)
    ]  # rich measures figures as if they could be broken at a blank
    table = Table(*shown, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for row in rows:
        table.add_row(*map(Text, row))
    if tables and Measurement.get(console, console.options.update(max_width=WIDEST), table).minimum <= console.width:
        console.print(table)
        return
    for row in rows:
        listed = ", ".join(f"{name} {value}" for name, value in zip(columns, row, strict=True) if value)
        console.print(listed, markup=False, highlight=False, soft_wrap=True)
