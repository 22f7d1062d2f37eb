r"""The parts of a report as plain data: paragraphs, lists, code, tables, charts and samples. Cards, choice and behavior reports,
and Prefect artifacts show them as Markdown.

Untrusted text is made safe to print: it cannot control a terminal or reorder a line. Control
codes become their symbols (␛). Other invisible code points (bidi overrides, zero-width characters, line separators, unassigned
code points) become escapes (\u202e). A line break becomes ↵ and a line break. Each code point is looked up once; text then
passes at about 15 MB/s.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Cell = str | int | float

NUMBER = re.compile(r"~?[+-]?[\d.,]+( ?%|x| ([kMGTPE]B|bytes?))?|-")


def number(value: Cell) -> str:
    """Return a cell as text: integers in full with separators, others with three significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3g}" if isinstance(value, float) else value


def counted(count: int, noun: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def share(part: float, whole: float) -> str:
    """Return a part as a percentage of a whole."""
    return f"{part / whole:.1%}" if whole else "-"


def shortened(text: str, limit: int) -> str:
    """Return the text, or its beginning and its end, which distinguishes files."""
    return text if len(text) <= limit else f"{text[: limit // 3]}…{text[-(limit - limit // 3 - 1) :]}"


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list of sentences."""

    sentences: Sequence[str]


@dataclass(frozen=True, slots=True)
class Code:
    """Text in lines as they are: a command, or JSON, folded under its `title` if it has one."""

    text: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its caption, the names of its columns, and rows whose first cell names them."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def numeric(self) -> list[bool]:
        """Whether each column has only figures, which are aligned to the right."""
        return [all(NUMBER.fullmatch(number(row[at])) for row in self.rows) for at in range(len(self.columns))]


@dataclass(frozen=True, slots=True)
class Mark:
    """A shape or a text of a chart, as an element of SVG with its attributes; `series` colors it, `title` explains it."""

    tag: str
    attributes: Mapping[str, Cell]
    text: str = ""
    title: str = ""
    series: int | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing, 360 units wide: its title, its numbers in words for screen readers, and the names of its series."""

    title: str
    description: str
    height: float
    marks: Sequence[Mark]
    series: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The beginning of a document: passages of a role, each trained on or not, with its text."""

    title: str
    passages: Sequence[tuple[str, bool, str]]
    laid_out: bool = False
    """Whether a layout, such as JSON's, made the line breaks; in a text they are marked."""


Block = Text | Items | Code | Table | Chart | Excerpt  # a part of a report


# Characters that Markdown or HTML could read as markup; an underscore between letters is none
MARKUP = re.compile(r"[\\|`<&*\[\]]|(?<![^\W_])_|_(?![^\W_])")


def escaped(text: str) -> str:
    """Untrusted text on one line, without markup."""
    return " ".join(MARKUP.sub(lambda found: f"&#{ord(found[0])};", text).split())


def table_lines(table: Table) -> list[str]:
    """Return the lines of a table without its caption, and an empty line; nothing without rows."""
    if not table.rows:
        return []
    rows = [
        table.columns,
        ["---"] * len(table.columns),
        *([escaped(number(cell)) for cell in row] for row in table.rows),
    ]
    return [*(f"| {' | '.join(row)} |" for row in rows), ""]


# Unicode categories of code points that are invisible, control the display, or are unassigned
UNSAFE = {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"}

PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {ord("\x7f"): "␡", ord("\n"): "↵\n"}


class _Shown(dict[int, str]):
    """The replacement of each code point, filled on first use."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        unsafe = unicodedata.category(character) in UNSAFE
        self[code] = character.encode("unicode_escape").decode() if unsafe else character
        return self[code]


_SHOWN = _Shown(PICTURES)


def visible(text: str) -> str:
    """Return the text with everything unsafe escaped. Its only control codes are line breaks, each after a ↵."""
    return text.translate(_SHOWN)


def visible_line(text: str) -> str:
    """Return the same on one line, for names and paths."""
    return visible(text).replace("\n", "")
