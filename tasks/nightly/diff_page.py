"""A difference for people: in the terminal, and as a static page in the style of `tokenmill report`."""

import rich.table
import rich.text
from rich.console import Console
from tokenmill.tasks.report.figures import Items, Table, Text, line
from tokenmill.tasks.report.style import document
from tokenmill.tasks.report.view_text import visible_line
from tokenmill.tasks.shards.publish import Output, publish_bytes
from tokenmill.tasks.storage import absolute

from .diff import CLASSES, Difference, Finding

COLUMNS = ("dataset", "documents", "class", "reason", "for example")

PAGE = "diff.html"


def sentence(found: Difference) -> str:
    """The totals in one line, with the change in percent."""
    before, after = found.documents
    share = f" ({(after - before) / before:+.1%})" if before else ""
    counts = ", ".join(f"{found.count(what):,} {what}" for what in CLASSES)
    return f"{before:,} -> {after:,} documents{share}: {counts}"


def print_difference(found: Difference, console: Console, *, table: bool = True) -> None:
    """Print what changed, then the documents by dataset, class and reason, in a table or a line each."""
    console.print(
        rich.text.Text(f"{visible_line(found.before)} -> {visible_line(found.after)}", "bold", overflow="fold")
    )
    for change in found.changes:
        console.print(rich.text.Text(f"  {visible_line(change)}", overflow="fold"))
    if table:
        rows = rich.table.Table(*COLUMNS)
        for finding in found.findings:
            rows.add_row(*(rich.text.Text(cell, overflow="fold") for cell in _cells(finding)))
        console.print(rows)
    for finding in () if table else found.findings:
        name, count, what, reason, examples = _cells(finding)
        shown = f" ({examples})" if examples else ""
        console.print(f"{name}: {count} {what}: {reason}{shown}", markup=False, highlight=False, soft_wrap=True)
    console.print(sentence(found), markup=False, highlight=False)


def _cells(finding: Finding) -> tuple[str, str, str, str, str]:
    examples = ", ".join(map(visible_line, finding.examples))
    return finding.dataset, f"{finding.documents:,}", finding.what, visible_line(finding.reason), examples


def publish_difference(found: Difference, place: str) -> Output:
    """Write the page to the file or object `place`; errors as in `publish`."""
    title = f"{found.before} → {found.after}"
    counted = [
        (finding.dataset, finding.documents, finding.what, finding.reason, ", ".join(finding.examples))
        for finding in found.findings
    ]
    parts = [
        Text(sentence(found)),
        Items(found.changes or ["nothing changed in settings, datasets or files"]),
        Table("Every document", COLUMNS, counted),
    ]
    body = "".join(part.html() for part in parts)
    return publish_bytes(absolute(place), document("tokenmill diff", f"<h1>{line(title)}</h1>\n{body}").encode())
