"""Reports as HTML, and cards, with the templates beside this module. Nothing else writes HTML.

A page doesn't use scripts or make requests, follows the system's light or dark setting, and fits a phone. Everything that a
template prints is escaped, and made visible on one line first, so that control codes and bidi overrides of the data don't take effect.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from .charts import WIDTH
from .parts import Block, escaped, number, table_lines, visible, visible_line

# The colors of series on a light and on a dark page
LIGHT = ("#2563a8", "#b45309", "#2d7a4f", "#9d3d8c", "#5b5f97", "#0f766e")
DARK = ("#7ab0ec", "#f0a45a", "#7fcf9f", "#e08fcf", "#a9acec", "#5fd0c4")

MAX_ROWS = 100  # rows of a table; the page counts the rest


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible_line(str(value)),
    )  # fmt: skip
    # `md`, `table` and `json` write Markdown and front matter without markup, so that nothing is left to be escaped
    filters: dict[str, Callable[..., object]] = {
        "number": number, "lines": lines, "code": code, "anchor": anchor, "kind": lambda part: type(part).__name__,
        "md": lambda text: Markup(escaped(visible_line(text))),  # noqa: S704
        "table": lambda table: Markup("\n".join(table_lines(table))),  # noqa: S704
        "json": lambda value: Markup(json.dumps(value)),  # noqa: S704 - YAML reads JSON, too
    }  # fmt: skip
    found.filters.update(filters)
    return found


def lines(text: str) -> Markup:
    """Untrusted text with its line breaks."""
    return escape(visible(text))


def code(text: str) -> Markup:
    """Untrusted text whose layout made its line breaks, so they aren't marked."""
    return Markup("\n").join(escape(visible_line(line)) for line in text.split("\n"))


def anchor(title: str) -> str:
    """Return the id of a section."""
    return title.lower().replace(" ", "-")


def document(template: str, **values: object) -> str:
    """Return a template with its values."""
    constants = {"light": LIGHT, "dark": DARK, "width": WIDTH, "max_rows": MAX_ROWS}
    return _environment().get_template(template).render(constants, **values)


class Rendered(tuple[Block, ...]):
    """Parts of a report, which a notebook shows."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return section("", self)


def section(title: str, parts: Sequence[Block]) -> str:
    """Parts under a title, which is not repeated above the only chart or table that has it, too."""
    return document("section.html.jinja", title=title, parts=parts)


def page(title: str, sections: Mapping[str, Sequence[Block]], footer: Sequence[Block] = ()) -> str:
    """Return the page with its sections, and links to them if there are several."""
    return document("report.html.jinja", title=title, sections=sections, footer=footer)
