"""The filters of chat templates: Jinja's, as far as their result is no larger than what they are given, and our own for
those that write text, so that sizes stay within limits and origins are kept.
"""

import json
from collections.abc import Callable, Sized
from functools import wraps
from typing import Any

import markupsafe
from jinja2 import Environment
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, do_indent, do_round, do_sum
from jinja2.utils import pass_environment
from tokenmill.tasks.sources.exact_json import with_placeholders

from .conversation import Arguments
from .limits import CHARACTERS_PER_STEP, require_plain, require_size, text_of
from .records import ToolCallRecord
from .traced import Traced, joined

Filter = Callable[..., Any]

SIMPLE = ("abs", "bool", "count", "d", "default", "first", "float", "int", "last", "length")
"""Of Jinja's own, those that look at one value."""

COUNTED = (
    "dictsort", "items", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort",
    "unique",
)  # fmt: skip
"""Of Jinja's own, those that look at every element; each takes a step per element."""

WRITING = ("capitalize", "lower", "title", "trim", "upper")
"""Of Jinja's own, those that take text."""


MOST_PLACES = 20


def filters(step: Callable[[int], None]) -> dict[str, Filter]:
    """All filters of a sandbox; `step` spends its budget."""
    simple = {name: FILTERS[name] for name in SIMPLE if name in FILTERS}
    counted = {name: _counted(FILTERS[name], step) for name in COUNTED}
    writing = {name: _writing(FILTERS[name], step) for name in WRITING}
    ours: dict[str, Filter] = {
        "e": escape, "escape": escape, "round": round_number, "sum": _counted(sum_of_numbers, step),
        "tojson": tojson, "join": join, "replace": replace, "indent": indent, "string": text_of, "safe": safe,
        "format": format_text,
    }  # fmt: skip
    return {**simple, **counted, **writing, **ours}


def _counted(function: Filter, step: Callable[[int], None]) -> Filter:
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a filter's own
        value = args[place]
        step(len(value) if isinstance(value, Sized) and not isinstance(value, str) else 1)
        return function(*args, **kwargs)

    return counted


def _writing(function: Filter, step: Callable[[int], None]) -> Filter:
    @wraps(function)
    def writing(value: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - same
        written = text_of(value)
        step(1 + len(written) // CHARACTERS_PER_STEP)
        return function(written, *args, **kwargs)

    return writing


def tojson(
    value: Any,  # noqa: ANN401 - whatever a template has
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for templates, but with numbers as the source spells them; of tool calls, with
    their origin.
    """
    if type(value) is not Arguments:
        require_plain(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    plain, restored = with_placeholders(value)
    text = restored(encoder.encode(plain) if indent is None else _indented(encoder, plain, indent))
    calls = value if isinstance(value, list) else [value]
    if calls and isinstance(calls[0], ToolCallRecord):
        return Traced(text, ((0, len(text), (calls[0].message, "call")),))
    return text


def _indented(encoder: json.JSONEncoder, value: Any, indent: int) -> str:  # noqa: ANN401 - same
    """JSON on many lines, as far as it may go: what is deep is moved far to the right."""
    require_size(indent)
    chunks: list[str] = []
    size = 0
    for chunk in encoder.iterencode(value):
        size += len(chunk)
        require_size(size)
        chunks.append(chunk)
    return "".join(chunks)


@pass_environment
def join(environment: Environment, values: Any, d: str = "", attribute: str | None = None) -> str:  # noqa: ANN401 - same
    """Texts in one; of objects, the field at a dotted path."""
    parts = list(values)
    for name in (attribute or "").split(".") if attribute else ():
        parts = [environment.getitem(part, name) for part in parts]
    return together([text_of(part) for part in parts], d)


def together(parts: list[str], between: str = "") -> str:
    """Texts in one, if that is not too long."""
    require_size(sum(map(len, parts)) + len(between) * len(parts))
    return joined(parts, between)


def replace(text: Any, old: str, new: str, count: int | None = None) -> str:  # noqa: ANN401 - same
    """`text` with `new` for `old`."""
    written = text_of(text)
    require_size(replaced_size(written, old, new))
    return written.replace(old, new, -1 if count is None else count)


def format_text(text: Any, *values: Any) -> str:  # noqa: ANN401 - same
    """`text` with the values in the place of every `%s`. Raises SecurityError for anything else: a width is any size."""
    written = text_of(text)
    if not values or "%" in written.replace("%%", "").replace("%s", ""):
        raise SecurityError(f"{written[:40]!r}: only %s can be formatted in a chat template")
    texts = [text_of(value) for value in values]
    require_size(len(written) + sum(map(len, texts)))
    return str.__str__(written) % tuple(texts)


def replaced_size(text: str, old: str, new: str) -> int:
    """The most characters that replacing leaves."""
    return len(text) + (str.count(text, old) + 1) * len(new)


def escape(value: Any) -> str:  # noqa: ANN401 - same
    """Text with the five characters that HTML minds written as entities."""
    written = text_of(value)
    require_size(len(written) * len("&quot;"))
    return str(markupsafe.escape(str.__str__(written)))


def safe(value: Any) -> str:  # noqa: ANN401 - same
    """Text as it is; what is added to it with `+` is escaped, as everywhere in Jinja."""
    return markupsafe.Markup(str.__str__(text_of(value)))  # noqa: S704 - nothing here is shown as HTML


def round_number(value: float, precision: int = 0, method: Any = "common") -> float:  # noqa: ANN401 - same
    """A number rounded to a few places."""
    if abs(precision) > MOST_PLACES:
        raise ValueError(f"a number is rounded to at most {MOST_PLACES} places, not {precision}")
    return do_round(value, precision, method)


@pass_environment
def sum_of_numbers(environment: Environment, values: Any, attribute: str | None = None, start: Any = 0) -> Any:  # noqa: ANN401 - same
    """The sum of numbers, and of nothing else: lists would grow."""
    if not isinstance(start, (int, float)):
        raise TypeError(f"numbers are summed, not {type(start).__name__}")
    return do_sum(environment, values, attribute, start)


def indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:  # noqa: ANN401 - same
    """Every line but the first moved to the right."""
    written = text_of(text)
    lines = written.count("\n") + 2
    require_size(len(written) + lines * (width if isinstance(width, int) else len(width)))
    return do_indent(str.__str__(written), width, first, blank)
