"""Filters and limits of chat templates.

Filters whose result isn't larger than their input are Jinja's. Filters that write text are replaced here, to limit sizes and keep
origins.

A template can build huge values cheaply: a list that contains the previous list twice, nested forty levels deep, takes a few
hundred bytes until it is written. So values are measured, up to the limit, before they are written or repeated.
"""

import json
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sized, ValuesView
from functools import wraps
from typing import Any, cast

import markupsafe
from jinja2 import Environment, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, do_indent, do_round, do_sum
from jinja2.runtime import Undefined
from jinja2.utils import pass_environment

from .conversation import Arguments
from .traced import Traced, caller, joined

MAX_STEPS = 1_000_000
MAX_SECONDS = 20.0
MAX_CHARACTERS = 64 << 20
MAX_BITS = 4096
"""Limits of a rendering: steps and seconds; of any text: characters (a list has at most as many elements as there are steps);
of a number: bits. A long agentic
conversation takes about 50,000 steps, 0.1 s and 1 M characters."""

CHARACTERS_PER_STEP, JOINED_PER_STEP, ELEMENTS_PER_STEP = 1024, 4096, 128
"""Repeating or rewriting so many characters, joining so many (templates that gather their text do so for every message), and
copying so many elements of a list costs one step, so the steps limit the memory of a rendering to a few GB."""

NESTING = (list, tuple, KeysView, ValuesView, ItemsView)  # types beside mappings of values that contain values

PARTS_PER_STEP = 8

STEPS_PER_CLOCK_CHECK = 256


class TemplateLimitError(TemplateError):
    """A rendering exceeded its budget of steps, seconds or characters."""


class Budget:
    """The remaining budget of one rendering."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.checked_at = self.steps
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        self.steps -= count
        if self.steps < 0:
            raise TemplateLimitError(f"the template takes more than {MAX_STEPS:,} steps")
        # Asking for the time costs as much as several steps.
        if self.checked_at - self.steps >= STEPS_PER_CLOCK_CHECK:
            self.checked_at = self.steps
            if time.monotonic() > self.deadline:
                raise TemplateLimitError(f"the template takes more than {MAX_SECONDS:g} seconds")


def require_size(size: int) -> None:
    """Raises TemplateLimitError for a text of more than MAX_CHARACTERS."""
    if size > MAX_CHARACTERS:
        raise TemplateLimitError(f"the template makes a text of {size:,} characters; {MAX_CHARACTERS:,} are the most")


def require_length(length: int) -> None:
    """Raises TemplateLimitError for a list of more than MAX_STEPS elements."""
    if length > MAX_STEPS:
        raise TemplateLimitError(f"the template makes a list of {length:,} elements; {MAX_STEPS:,} are the most")


def require_plain(value: object) -> None:
    """Raises TypeError for a value that contains anything but data (a function would be written with its address, which
    varies), and TemplateLimitError for one that is too large.
    """
    for each in parts_of(value):
        if each is not None and not isinstance(each, (str, bool, int, float, Mapping, list, tuple, Undefined)):
            raise TypeError(f"{type(each).__name__} is not written as text")


def parts_of(value: object) -> Iterator[object]:
    """Yield a value and all values in it, as often as they are there. Raises TemplateLimitError for one that is too large."""
    size, steps = 0, 0
    # A stack in place of recursion: values may be nested deeper than Python's own limit.
    waiting = [value]
    while waiting:
        each = waiting.pop()
        yield each
        steps += 1
        if steps > MAX_STEPS:
            raise TemplateLimitError(f"the template writes or compares a value of more than {MAX_STEPS:,} parts")
        if isinstance(each, str):
            size += len(each)
            require_size(size)
        elif isinstance(each, Mapping):
            pairs = cast("Mapping[object, object]", each)
            waiting += [*pairs, *pairs.values()]
        elif isinstance(each, NESTING):
            waiting += cast("list[object]", each)


def weight(value: object) -> int:
    """Steps in C that comparing or hashing a value takes: its parts, and its characters by the thousand. Raises as `parts_of`."""
    if isinstance(value, str):
        return 1 + len(value) // CHARACTERS_PER_STEP
    if not isinstance(value, (Mapping, *NESTING)):
        return 1
    return sum(1 + len(each) // CHARACTERS_PER_STEP if isinstance(each, str) else 1 for each in parts_of(value))


def text_of(value: Any) -> str:  # noqa: ANN401 - any value of a template
    """Return a value as `{{ … }}` writes it; arguments of a tool call as their JSON."""
    if isinstance(value, str):
        return value
    if type(value) is Arguments:
        return value.text
    require_plain(value)
    return str(value)


Filter = Callable[..., Any]

SIMPLE = ("abs", "bool", "count", "d", "default", "first", "float", "int", "last", "length")
"""Jinja's filters of a single value."""

COUNTED = ("items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
"""Jinja's filters of elements; each element costs a step."""

COMPARING = ("dictsort", "max", "min", "sort", "unique")
"""Jinja's filters that compare elements a few times each; 8 parts of elements cost a step."""

WRITING = ("capitalize", "lower", "title", "trim", "upper")  # Jinja's filters of text


MAX_PLACES = 20


def filters(step: Callable[[int], None]) -> dict[str, Filter]:
    """All filters of a sandbox; `step` spends its budget."""
    simple = {name: FILTERS[name] for name in SIMPLE if name in FILTERS}
    counted = {name: _counted(FILTERS[name], step) for name in COUNTED}
    comparing = {name: _counted(FILTERS[name], step, comparing=True) for name in COMPARING}
    writing = {name: _writing(FILTERS[name], step) for name in WRITING}
    made = {
        name: _made(function, step)
        for name, function in {
            "e": escape, "escape": escape, "tojson": tojson, "join": join, "replace": replace, "indent": indent,
            "string": text_of, "safe": safe, "format": format_text,
        }.items()
    }  # fmt: skip
    ours: dict[str, Filter] = {"round": round_number, "sum": _counted(sum_of_numbers, step), **made}
    return {**simple, **counted, **comparing, **writing, **ours}


def _counted(function: Filter, step: Callable[[int], None], *, comparing: bool = False) -> Filter:
    # Jinja passes its environment or context first to filters that ask for it.
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a filter's own
        value = args[place]
        step(len(value) // (PARTS_PER_STEP if isinstance(value, str) else 1) if isinstance(value, Sized) else 1)
        if comparing and not isinstance(value, Undefined):
            # A generator can be weighed only once it is a list, which then is what is sorted.
            value = value if isinstance(value, Sized) else list(value)
            step(weight(value) // PARTS_PER_STEP)
        return function(*args[:place], value, *args[place + 1 :], **kwargs)

    return counted


def _writing(function: Filter, step: Callable[[int], None]) -> Filter:
    @wraps(function)
    def writing(value: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - same
        written = text_of(value)
        step(1 + len(written) // CHARACTERS_PER_STEP)
        return function(written, *args, **kwargs)

    return writing


def _made(function: Filter, step: Callable[[int], None]) -> Filter:
    @wraps(function)
    def made(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401 - same
        text = function(*args, **kwargs)
        step(len(text) // CHARACTERS_PER_STEP)
        return text

    return made


def tojson(
    value: Any,  # noqa: ANN401 - any value of a template
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for templates; tool calls keep their origin."""
    if type(value) is not Arguments:
        require_plain(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        text = encoder.encode(value)
    else:  # on several lines it may grow, so it is measured while it is written
        require_size(indent)
        chunks, size = list[str](), 0
        for chunk in encoder.iterencode(value):
            size += len(chunk)
            require_size(size)
            chunks.append(chunk)
        text = "".join(chunks)
    # A template may write the calls of a message as JSON, and their characters are still its calls.
    origin = caller(value)
    return text if origin is None else Traced(text, ((0, len(text), origin),))


@pass_environment
def join(environment: Environment, values: Any, d: str = "", attribute: str | None = None) -> str:  # noqa: ANN401 - same
    """Return the joined texts; of objects, the field at a dotted path."""
    parts = list(values)
    for name in (attribute or "").split(".") if attribute else ():
        parts = [environment.getitem(part, name) for part in parts]
    return together([text_of(part) for part in parts], d)


def together(parts: list[str], between: str = "") -> str:
    """Return the joined texts, within the size limit."""
    # Before joining: the text may be larger than memory.
    require_size(sum(map(len, parts)) + len(between) * len(parts))
    return joined(parts, between)


def replace(text: Any, old: str, new: str, count: int | None = None) -> str:  # noqa: ANN401 - same
    """`text` with `new` for `old`."""
    written = text_of(text)
    require_size(replaced_size(written, old, new))
    return written.replace(old, new, -1 if count is None else count)


def format_text(text: Any, *values: Any) -> str:  # noqa: ANN401 - same
    """`text` with values for every `%s`. Raises SecurityError for other directives, because a width can be of any size."""
    written = text_of(text)
    if not values or "%" in written.replace("%%", "").replace("%s", ""):
        raise SecurityError(f"{written[:40]!r}: only %s can be formatted in a chat template")
    texts = [text_of(value) for value in values]
    require_size(len(written) + sum(map(len, texts)))
    return str.__str__(written) % tuple(texts)


def replaced_size(text: str, old: str, new: str) -> int:
    """Return the largest size that replacing can produce."""
    return len(text) + (str.count(text, old) + 1) * len(new)


def escape(value: Any) -> str:  # noqa: ANN401 - same
    """Text with the five special characters of HTML escaped."""
    written = text_of(value)
    # The longest escape, for every character.
    require_size(len(written) * len("&quot;"))
    return str(markupsafe.escape(str.__str__(written)))


def safe(value: Any) -> str:  # noqa: ANN401 - same
    """Return the unchanged text; as in Jinja, text added to it with `+` is escaped."""
    return markupsafe.Markup(str.__str__(text_of(value)))  # noqa: S704 - nothing here is shown as HTML


def round_number(value: float, precision: int = 0, method: Any = "common") -> float:  # noqa: ANN401 - same
    """Return a number rounded to a few places."""
    if abs(precision) > MAX_PLACES:
        raise ValueError(f"a number is rounded to at most {MAX_PLACES} places, not {precision}")
    return do_round(value, precision, method)


@pass_environment
def sum_of_numbers(environment: Environment, values: Any, attribute: str | None = None, start: Any = 0) -> Any:  # noqa: ANN401 - same
    """Return the sum of numbers only; lists would grow."""
    if not isinstance(start, (int, float)):
        raise TypeError(f"numbers are summed, not {type(start).__name__}")
    return do_sum(environment, values, attribute, start)


def indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:  # noqa: ANN401 - same
    """Every line but the first indented."""
    written = text_of(text)
    # The first line and the one behind the last line end.
    lines = written.count("\n") + 2
    require_size(len(written) + lines * (width if isinstance(width, int) else len(width)))
    return do_indent(str.__str__(written), width, first, blank)
