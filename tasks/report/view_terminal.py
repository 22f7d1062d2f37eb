"""A view for the terminal. Trained text is between ⟦ and ⟧ and colored: green, or where several documents share a row, each in
the next of a few colors.

All text passes `visible` and rich's `Text`, which interprets no markup. The two marks are escaped within the text.
"""

from rich.console import Console
from rich.rule import Rule
from rich.table import Table as RichTable
from rich.text import Text
from tokenmill.tasks.dataset.stored import PADDING
from tokenmill.tasks.kit.parts import Table, counted, visible, visible_line
from tokenmill.tasks.kit.terminal import print_table

from .view import Pack, Passage, SubSequence, View

OPENING, CLOSING = "⟦", "⟧"
ESCAPED_MARKS = {ord(mark): f"\\u{ord(mark):04x}" for mark in (OPENING, CLOSING)}

UNTRAINED, LABEL, ASIDE = "default", "bold cyan", "dim"
TRAINED, *_ = COLOURS = ("green", "yellow", "magenta", "blue", "cyan")
"""The colors of trained text, by the number of the document in its row."""


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
            colour = COLOURS[sequence.number % len(COLOURS)]
            grid = RichTable.grid(padding=(0, 1))
            grid.add_column(no_wrap=True)
            grid.add_column(overflow="fold")
            for passage in sequence.passages:
                grid.add_row(Text(passage.role, LABEL), _text(passage, colour))
            console.print(grid)


def print_documents(view: View, console: Console) -> None:
    """Print a table of the documents: their source, and their tokens, all and trained on."""
    rows = [
        (
            each.document, pack.dataset, f"{each.file}:{each.line or f'{each.start}-{each.stop}'}", each.tokens,
            each.trained,
        )
        for pack in view.packs for each in pack.sequences
    ]  # fmt: skip
    print_table(console, Table(view.path, ("document", "dataset", "source", "tokens", "trained on"), rows))


def _text(passage: Passage, colour: str) -> Text:
    if passage.role == PADDING:
        return Text(describe_padding(passage), ASIDE)
    text = visible(passage.text).translate(ESCAPED_MARKS).removesuffix("\n")
    return Text(f"{OPENING}{text}{CLOSING}", colour) if passage.trained else Text(text, UNTRAINED)


def describe_pack(pack: Pack) -> str:
    """One line about a row: its dataset, its location, and how full it is."""
    sample = "" if pack.sample is None else f"sample {pack.sample + 1}, "
    place = visible_line(f"{sample}{pack.dataset}: row {pack.row + 1:,} of {pack.file}")
    if pack.fill is None:
        return f"{place}: {counted(pack.tokens, 'token')}"
    return f"{place}: {pack.tokens:,} of {pack.pack_size:,} tokens ({pack.fill:.1%}), {pack.padding:,} of them padding"


def describe_sequence(sequence: SubSequence) -> str:
    """One line about a sub-sequence: its source and its share of trained tokens."""
    place = counted(sequence.tokens, "token") + (f" from token {sequence.offset + 1:,} on" if sequence.offset else "")
    return f"{visible_line(_source(sequence))}: {place}, {sequence.trained:,} trained on"


def _source(sequence: SubSequence) -> str:
    """The file and line, or the file and slice."""
    if sequence.line is not None:
        origin = f", from {sequence.origin}" if sequence.origin else ""
        return f"{sequence.file}:{sequence.line}{origin}"
    return f"{sequence.file}, slice {sequence.start:,} to {sequence.stop:,}"


def describe_padding(passage: Passage) -> str:
    """Return the label of padding."""
    return counted(passage.tokens, "token")
