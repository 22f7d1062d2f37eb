"""Tables and pictures of a report as HTML, which a notebook shows as well.

Pictures are SVG written here, without a plotting library: matplotlib takes 0.5 s to import, needs an extra, and its text is
drawn for one background. These pictures take 1 ms, have 1 to 5 kB, take the colours of the page, light or dark, and are 360
units wide, so that their text has its natural size on a phone. Every picture has a title and a description for screen readers,
and its numbers are also in a table of the page.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Protocol, TypeVar

from .visible import visible_line

WIDTH = 360
MOST_BARS, MOST_ROWS = 16, 100
"""Bars of a picture, or names on a side of a flow, and rows of a table; the page says how many more there are."""

COLOURS = ("#2563a8", "#b45309", "#2d7a4f", "#9d3d8c", "#5b5f97", "#0f766e")
"""The colours of series on a light page; the page's style has those for a dark one."""

Cell = str | int | float

NUMBER = re.compile(r"[\d.,]+%?|-")


class Part(Protocol):
    """A piece of a section."""

    def html(self) -> str:
        """The piece as HTML."""
        ...


def line(text: object) -> str:
    """Untrusted text on one line of HTML."""
    return escape(visible_line(str(text)))


def number(value: Cell) -> str:
    """A cell as text: integers in full with separators, others with three significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3g}" if isinstance(value, float) else value


def share(part: float, whole: float) -> str:
    """A part as a percentage of a whole."""
    return f"{part / whole:.1%}" if whole else "-"


@dataclass(frozen=True, slots=True)
class Notebook(ABC):
    """What a notebook shows as its HTML."""

    @abstractmethod
    def html(self) -> str:
        """The piece as HTML."""

    def _repr_html_(self) -> str:
        return self.html()


@dataclass(frozen=True, slots=True)
class Text(Notebook):
    """A paragraph."""

    text: str

    def html(self) -> str:
        """The paragraph."""
        return f"<p>{line(self.text)}</p>\n"


@dataclass(frozen=True, slots=True)
class Items(Notebook):
    """A list of sentences."""

    sentences: Sequence[str]

    def html(self) -> str:
        """The list."""
        items = "".join(f"<li>{line(each)}</li>\n" for each in self.sentences)
        return f"<ul>\n{items}</ul>\n"


@dataclass(frozen=True, slots=True)
class Code(Notebook):
    """Text in lines as they are: a command, or JSON, folded under its `title` if it has one."""

    text: str
    title: str = ""

    def html(self) -> str:
        """The text."""
        lines = "\n".join(map(line, self.text.split("\n")))
        code = f'<pre tabindex="0"><code>{lines}</code></pre>\n'
        return f"<details>\n<summary>{line(self.title)}</summary>\n{code}</details>\n" if self.title else code


@dataclass(frozen=True, slots=True)
class Table(Notebook):
    """A table: its caption, the names of its columns, and rows whose first cell names them."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence["Cell | Link"]]

    def html(self) -> str:
        """The table, which scrolls by itself on a narrow page. Columns of numbers are aligned to the right."""
        shown = self.rows[:MOST_ROWS]
        right = [
            ' class="number"' if all(_is_number(row[at]) for row in shown) else "" for at in range(len(self.columns))
        ]
        head = "".join(f'<th scope="col"{of}>{line(name)}</th>' for name, of in zip(self.columns, right, strict=True))
        body = "".join(_row(row, right) for row in shown)
        more = len(self.rows) - MOST_ROWS
        rest = f"<p>{more:,} more rows are in manifest.json.</p>\n" if more > 0 else ""
        return (
            f'<div class="wide" role="region" tabindex="0" aria-label="{line(self.caption)}"><table>\n'
            f"<caption>{line(self.caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n{rest}"
        )


Item = TypeVar("Item")


def listed(caption: str, items: Iterable[Item], columns: Mapping[str, Callable[[Item], Cell]]) -> Table:
    """A table with a row for each item, and a column for each name and what it says of an item."""
    return Table(caption, tuple(columns), [tuple(of(item) for of in columns.values()) for item in items])


@dataclass(frozen=True, slots=True)
class Link:
    """A cell that leads to another page."""

    text: str
    target: str

    def html(self) -> str:
        """The link; a path is broken behind its slashes."""
        return f'<a href="{escape(self.target)}">{line(self.text).replace("/", "/<wbr>")}</a>'


def _is_number(cell: Cell | Link) -> bool:
    return isinstance(cell, int | float) or (isinstance(cell, str) and NUMBER.fullmatch(cell) is not None)


def _row(cells: Sequence[Cell | Link], right: Sequence[str]) -> str:
    first, *others = (cell.html() if isinstance(cell, Link) else line(number(cell)) for cell in cells)
    rest = "".join(f"<td{of}>{text}</td>" for text, of in zip(others, right[1:], strict=True))
    return f'<tr><th scope="row">{first}</th>{rest}</tr>\n'


@dataclass(frozen=True, slots=True)
class Picture(Notebook):
    """A drawing of a height, with a title, a description in words, and the names of its series in their colours."""

    title: str
    description: str
    height: float
    drawing: str
    series: Sequence[str] = ()

    def html(self) -> str:
        """The picture with its title as a caption."""
        legend = "".join(
            f'<span class="key"><svg viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10" {fill(at)}/></svg> '
            f"{line(name)}</span>"
            for at, name in enumerate(self.series)
        )
        return (
            f"<figure>\n<figcaption>{line(self.title)}{legend}</figcaption>\n"
            f'<svg viewBox="0 0 {WIDTH} {self.height:g}" role="img" aria-label="{line(self.description)}" '
            f'font-size="11" fill="currentColor">\n<title>{line(self.description)}</title>\n{self.drawing}</svg>\n</figure>\n'
        )


def fill(at: int) -> str:
    """The colour of a series as an attribute; a page may give it another one for a dark background."""
    at %= len(COLOURS)
    return f'style="fill:var(--c{at},{COLOURS[at]})"'


def bars(
    title: str, values: Mapping[str, Sequence[float]], series: Sequence[str], shown: Callable[[float], str]
) -> Picture:
    """Horizontal bars: for each name one per series, with its value. Names stand above their bars."""
    names = list(values)[:MOST_BARS]
    largest = max((each for name in names for each in values[name]), default=0) or 1
    height = 18 + 15 * len(series)
    drawn: list[str] = []
    for place, name in enumerate(names):
        top = place * height
        drawn.append(f'<text x="0" y="{top + 12}">{line(shortened(name, 56))}</text>\n')
        for at, value in enumerate(values[name]):
            y, wide = top + 16 + 15 * at, 280 * value / largest
            drawn.append(
                f'<rect x="0" y="{y}" width="{max(wide, 1):.1f}" height="12" {fill(at)}/>'
                f'<text x="{max(wide, 1) + 5:.1f}" y="{y + 10}">{shown(value)}</text>\n'
            )
    more = len(values) - len(names)
    described = f"{title}: " + "; ".join(f"{name} {', '.join(map(shown, values[name]))}" for name in names)
    shown_title = f"{title} ({more:,} more in the table)" if more > 0 else title
    return Picture(
        shown_title, described, max(height * len(names), 1), "".join(drawn), series if len(series) > 1 else ()
    )


def columns(title: str, counts: Sequence[float], labels: Sequence[str], unit: str) -> Picture:
    """Upright columns with a label below each, as many as fit: a histogram, or amounts over time."""
    top, base = 16, 136
    wide = WIDTH / max(len(counts), 1)
    largest = max(counts, default=0) or 1
    every = -(-len(labels) * max((len(label) for label in labels), default=1) * 7 // WIDTH)
    drawn = [
        f'<text x="0" y="11">{number(_plain(largest))} {line(unit)}</text>\n<line x1="0" x2="{WIDTH}" y1="{base}" y2="{base}" stroke="currentColor"/>\n'
    ]
    for at, count in enumerate(counts):
        tall = (base - top) * count / largest
        tall = max(tall, 1) if count else 0
        drawn.append(
            f'<rect x="{at * wide + 0.5:.1f}" y="{base - tall:.1f}" width="{max(wide - 1, 0.5):.1f}" height="{tall:.1f}" {fill(0)}>'
            f"<title>{line(labels[at])}: {number(_plain(count))}</title></rect>\n"
        )
        if at % every == 0:
            drawn.append(f'<text x="{at * wide + 0.5:.1f}" y="{base + 13}">{line(labels[at])}</text>\n')
    described = f"{title}: " + "; ".join(
        f"{name}: {number(_plain(count))}" for name, count in zip(labels, counts, strict=True) if count
    )
    return Picture(title, described, base + 18, "".join(drawn))


def _plain(value: float) -> Cell:
    return int(value) if float(value).is_integer() else float(value)


def flow(title: str, links: Mapping[tuple[str, str], int], lost: Iterable[str]) -> Picture:
    """Bands from names on the left to names on the right, as thick as their counts; `lost` ones are in another colour.

    The smallest names on either side become one band, `other`, if there are more than fit.
    """
    links = _few(links)
    lefts, rights = _sums(links, 0), _sums(links, 1)
    total = sum(lefts.values()) or 1
    lost = set(lost)
    gap, tall = 24, min(180, 45 * max(len(lefts), len(rights)))
    left_at, right_at = _starts(lefts, total, tall, gap), _starts(rights, total, tall, gap)
    drawn: list[str] = []
    left_end, right_end = dict(left_at), dict(right_at)
    for (left, right), count in links.items():
        thick = tall * count / total
        drawn.append(_band(left_end[left], right_end[right], max(thick, 0.5), 1 if right in lost else 0))
        left_end[left] += thick
        right_end[right] += thick
    for at, sums in ((left_at, lefts), (right_at, rights)):
        x, anchor = (0, "start") if at is left_at else (WIDTH, "end")
        for name, count in sums.items():
            drawn.append(
                f'<text x="{x}" y="{at[name] - 4:.1f}" text-anchor="{anchor}">{line(shortened(name, 22))} {count:,}'
                f"<title>{line(name)}</title></text>\n"
            )
    height = max(tall + gap * len(lefts), tall + gap * len(rights)) + 4
    described = f"{title}: " + "; ".join(f"{left} to {right}: {count:,}" for (left, right), count in links.items())
    return Picture(title, described, height, "".join(drawn))


def _few(links: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """The links with at most MOST_BARS names on each side."""
    kept = [
        set(sorted(sums, key=lambda name: (-sums[name], name))[: MOST_BARS - 1]) if len(sums) > MOST_BARS else set(sums)
        for sums in (_sums(links, 0), _sums(links, 1))
    ]
    found: dict[tuple[str, str], int] = {}
    for (left, right), count in links.items():
        ends = left if left in kept[0] else "other", right if right in kept[1] else "other"
        found[ends] = found.get(ends, 0) + count
    return found


def _sums(links: Mapping[tuple[str, str], int], side: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for ends, count in links.items():
        found[ends[side]] = found.get(ends[side], 0) + count
    return found


def _starts(sums: Mapping[str, int], total: int, tall: float, gap: float) -> dict[str, float]:
    ends = accumulate((tall * count / total + gap for count in sums.values()), initial=gap - 6.0)
    return dict(zip(sums, ends, strict=False))


def _band(left: float, right: float, thick: float, colour: int) -> str:
    middle = WIDTH / 2
    return (
        f'<path d="M0 {left:.1f} C{middle} {left:.1f} {middle} {right:.1f} {WIDTH} {right:.1f} v{thick:.1f} '
        f'C{middle} {right + thick:.1f} {middle} {left + thick:.1f} 0 {left + thick:.1f} Z" opacity=".75" {fill(colour)}/>\n'
    )


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and its end, which distinguishes files."""
    text = visible_line(text)
    return text if len(text) <= most else f"{text[: most // 3]}…{text[-(most - most // 3 - 1) :]}"
