"""The parts of a report as plain data: paragraphs, lists, code, tables, charts and samples."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Cell = str | int | float

NUMBER = re.compile(r"~?[+-]?[\d.,]+( ?%|x| ([kMGTPE]B|bytes?))?|-")


def number(value: Cell) -> str:
    """A cell as text: integers in full with separators, others with three significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3g}" if isinstance(value, float) else value


def share(part: float, whole: float) -> str:
    """A part as a percentage of a whole."""
    return f"{part / whole:.1%}" if whole else "-"


def shortened(text: str, limit: int) -> str:
    """The text, or its beginning and its end, which distinguishes files."""
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


Block = Text | Items | Code | Table | Chart | Excerpt
"""A part of a report."""
