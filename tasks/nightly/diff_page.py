"""A difference for people: in the terminal, and as a static page in the style of `tokenmill report`."""

from rich.console import Console
from rich.text import Text as RichText
from tokenmill.tasks.kit.parts import Items, Table, Text
from tokenmill.tasks.kit.terminal import print_table
from tokenmill.tasks.kit.visible import visible_line
from tokenmill.tasks.shards.publish import Output, publish_bytes
from tokenmill.tasks.storage import absolute

from .diff import CLASSES, Difference


def sentence(found: Difference) -> str:
    """The totals in one line, with the change in percent."""
    before, after = found.documents
    share = f" ({(after - before) / before:+.1%})" if before else ""
    counts = ", ".join(f"{found.count(what):,} {what}" for what in CLASSES)
    return f"{before:,} -> {after:,} documents{share}: {counts}"


def _table(found: Difference) -> Table:
    rows = [(each.dataset, each.documents, each.what, each.reason, ", ".join(each.examples)) for each in found.findings]
    return Table("Every document", ("dataset", "documents", "class", "reason", "for example"), rows)


def print_difference(found: Difference, console: Console, *, table: bool = True) -> None:
    """Print what changed, then the documents by dataset, class and reason, in a table or a line each."""
    title = f"{visible_line(found.before)} -> {visible_line(found.after)}"
    for line in (RichText(title, "bold"), *(RichText(f"  {visible_line(change)}") for change in found.changes)):
        line.overflow = "fold"
        console.print(line)
    print_table(console, _table(found), tables=table)
    console.print(sentence(found), markup=False, highlight=False)


def publish_difference(found: Difference, place: str) -> Output:
    """Write the page to the file or object `place`; errors as in `publish`."""
    from tokenmill.tasks.kit import html  # noqa: PLC0415 - Jinja2 takes 40 ms, and terminals need none of it

    parts = [
        Text(sentence(found)),
        Items(found.changes or ["nothing changed in settings, datasets or files"]),
        _table(found),
    ]
    return publish_bytes(absolute(place), html.page(f"{found.before} → {found.after}", {"Difference": parts}).encode())
