"""A view for the terminal. Trained text is between ⟦ and ⟧ and coloured: green, or where several documents share a row, each in
the next of a few colours.

All text passes `visible` and rich's `Text`, which interprets no markup. The two marks are escaped within the text.
"""

from collections.abc import Iterable

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from .view import Passage, View
from .view_rows import PADDING
from .view_text import describe_pack, describe_padding, describe_sequence
from .visible import visible, visible_line

OPENING, CLOSING = "⟦", "⟧"
ESCAPED_MARKS = {ord(mark): f"\\u{ord(mark):04x}" for mark in (OPENING, CLOSING)}

UNTRAINED, LABEL, ASIDE = "default", "bold cyan", "dim"
TRAINED, *_ = COLOURS = ("green", "yellow", "magenta", "blue", "cyan")
"""The colours of trained text, by the number of the document in its row."""


def print_view(view: View, console: Console) -> None:
    """Print every pack: a rule above each sub-sequence, and each passage beside its role."""
    console.print(
        Text.assemble((f"{OPENING}trained on{CLOSING}", TRAINED), "  not trained on  ", ("↵ line break", ASIDE))
    )
    for pack in view.packs:
        console.print(Text(f"\n{describe_pack(pack)}", "bold", overflow="fold"))
        for sequence in pack.sequences:
            title = f"{visible_line(sequence.document)} ({sequence.number + 1} of {pack.count})"
            console.print(Rule(Text(title), align="left", style=ASIDE))
            console.print(Text(describe_sequence(sequence), ASIDE, overflow="fold"))
            console.print(_passages(sequence.passages, COLOURS[sequence.number % len(COLOURS)]))


def print_table(view: View, console: Console) -> None:
    """Print a table of the documents: where each comes from, and its tokens, all and trained on."""
    table = Table("document", "dataset", "source", "tokens", "trained on", title=view.path, title_justify="left")
    for pack in view.packs:
        for sequence in pack.sequences:
            place = f"{sequence.file}:{sequence.line or f'{sequence.start}-{sequence.stop}'}"
            names = [Text(visible_line(each), overflow="fold") for each in (sequence.document, pack.dataset, place)]
            table.add_row(*names, f"{sequence.tokens:,}", f"{sequence.trained:,}")
    console.print(table)


def _passages(passages: Iterable[Passage], colour: str) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for passage in passages:
        grid.add_row(Text(passage.role, LABEL), _text(passage, colour))
    return grid


def _text(passage: Passage, colour: str) -> Text:
    if passage.role == PADDING:
        return Text(describe_padding(passage), ASIDE)
    text = visible(passage.text).translate(ESCAPED_MARKS).removesuffix("\n")
    return Text(f"{OPENING}{text}{CLOSING}", colour) if passage.trained else Text(text, UNTRAINED)
