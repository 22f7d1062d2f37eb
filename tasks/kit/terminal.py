"""Console tables if they fit, and otherwise a line for each row with each value's name."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from .parts import Table, number, visible_line

WIDEST = 10_000  # columns of a console that no table fills


def print_table(console: Console, table: Table, *, tables: bool = True) -> None:
    """Print a table; as lines if it isn't wanted, or if the console would break its figures or names apart."""
    rows = [[visible_line(number(cell)) for cell in row] for row in table.rows]
    columns = [
        Column(name, justify="right", no_wrap=True, min_width=max(map(len, [name, *cells])))
        if numeric
        else Column(name)
        for numeric, name, *cells in zip(table.numeric, table.columns, *rows, strict=True)
    ]  # rich measures figures as if they could be broken at a blank
    shown = RichTable(
        *columns, title=table.caption, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for row in rows:
        shown.add_row(*map(Text, row))
    if tables and Measurement.get(console, console.options.update(max_width=WIDEST), shown).minimum <= console.width:
        console.print(shown)
        return
    for row in rows:
        listed = ", ".join(f"{name} {value}" for name, value in zip(table.columns, row, strict=True) if value)
        console.print(listed, markup=False, highlight=False, soft_wrap=True)
