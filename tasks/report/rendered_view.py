"""A view for the terminal, and as a static HTML page of about twice the bytes of its text.

In the terminal, trained text is between ⟦ and ⟧ and colored: green, or where several documents share a row, each in
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
from tokenmill.tasks.shards.publish import Output, publish_bytes
from tokenmill.tasks.storage import absolute

from .view import Pack, Passage, SubSequence, View

OPENING, CLOSING = "⟦", "⟧"
ESCAPED_MARKS = {ord(mark): f"\\u{ord(mark):04x}" for mark in (OPENING, CLOSING)}
UNTRAINED, LABEL, ASIDE = "default", "bold cyan", "dim"
# The colors of trained text, by the number of the document in its row
TRAINED, *_ = COLOURS = ("green", "yellow", "magenta", "blue", "cyan")


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
            # By its number in the pack, so that a document has the same color where only some are shown
            colour = COLOURS[sequence.number % len(COLOURS)]
            # Roles beside text, each in a column of its own, so that text that wraps can't look like a role
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
    source = f"{sequence.file}, slice {sequence.start:,} to {sequence.stop:,}"
    if sequence.line is not None:
        source = f"{sequence.file}:{sequence.line}" + (f", from {sequence.origin}" if sequence.origin else "")
    return f"{visible_line(source)}: {place}, {sequence.trained:,} trained on"


def describe_padding(passage: Passage) -> str:
    """Return the label of padding."""
    return counted(passage.tokens, "token")


def publish_html(view: View, place: str, about: str = "") -> Output:
    """Write the page to the file or object `place`; errors as in `publish`."""
    return publish_bytes(absolute(place), view_html(view, about).encode())


def view_html(view: View, about: str = "") -> str:
    """Return the page; `about` follows its title."""
    from tokenmill.tasks.kit import html  # noqa: PLC0415 - Jinja2 takes 40 ms, and terminals need none of it

    title = f"{view.path}: {view.type}, decoded with {view.tokenizer}{about}"
    return html.document(
        "view.html.jinja", title=title, view=view, padding=PADDING, describe_pack=describe_pack,
        describe_padding=describe_padding, describe_sequence=describe_sequence,
    )  # fmt: skip
