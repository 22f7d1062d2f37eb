"""A difference for people: in the terminal, and as a static page in the style of `tokenmill view --html`."""

from collections.abc import Iterator
from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenmill.tasks.report.view_html import HEAD
from tokenmill.tasks.report.view_text import visible_line
from tokenmill.tasks.shards.publish import Output, publish_bytes
from tokenmill.tasks.storage import absolute

from .diff import CLASSES, Difference, Finding

COLUMNS = ("data set", "documents", "", "reason", "for example")

PAGE = "diff.html"

TABLE_STYLE = """<style>
table { border-collapse: collapse; width: 100%; margin: 1em 0; }
th, td { text-align: left; vertical-align: top; padding: .2em .6em; border-bottom: 1px solid var(--rule); overflow-wrap: anywhere; }
th { color: var(--aside); font-weight: normal; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
@media (max-width: 45em) { td:nth-child(5), th:nth-child(5) { display: none; } }
</style>
"""


def sentence(found: Difference) -> str:
    """The totals in one line, with the change in percent."""
    before, after = found.documents
    share = f" ({(after - before) / before:+.1%})" if before else ""
    counts = ", ".join(f"{found.count(what):,} {what}" for what in CLASSES)
    return f"{before:,} -> {after:,} documents{share}: {counts}"


def print_difference(found: Difference, console: Console, *, table: bool = True) -> None:
    """Print what changed, then the documents by data set, class and reason, in a table or a line each."""
    console.print(Text(f"{visible_line(found.before)} -> {visible_line(found.after)}", "bold", overflow="fold"))
    for change in found.changes:
        console.print(Text(f"  {visible_line(change)}", overflow="fold"))
    if table:
        rows = Table(*COLUMNS)
        for finding in found.findings:
            rows.add_row(*(Text(cell, overflow="fold") for cell in _cells(finding)))
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
    return publish_bytes(absolute(place), "".join(_page(found)).encode())


def _page(found: Difference) -> Iterator[str]:
    yield HEAD.replace("<title>tokenmill view</title>", "<title>tokenmill diff</title>").replace(
        "</head>", f"{TABLE_STYLE}</head>"
    )
    yield f"<h1>{escape(visible_line(found.before))} → {escape(visible_line(found.after))}</h1>\n"
    yield f"<p>{escape(sentence(found))}</p>\n<h2>What changed</h2>\n<ul>\n"
    yield from (f"<li>{escape(visible_line(change))}</li>\n" for change in found.changes)
    yield "" if found.changes else "<li>nothing in settings, data sets or files</li>\n"
    yield "</ul>\n<h2>Every document</h2>\n<table>\n<tr>"
    yield "".join(f"<th>{column}</th>" for column in COLUMNS) + "</tr>\n"
    for finding in found.findings:
        name, count, *rest = map(escape, _cells(finding))
        cells = "".join(f"<td>{cell}</td>" for cell in rest)
        yield f'<tr><td>{name}</td><td class="number">{count}</td>{cells}</tr>\n'
    yield "</table>\n</body>\n</html>\n"
