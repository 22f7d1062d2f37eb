"""What a rendering may spend, and how large what it makes may become; and values written as text within that.

A template can make much of little: a list that holds itself twice, forty times over, is a few hundred bytes until it is
written. So whatever is about to be written or repeated is measured first, and measuring stops at the limit.
"""

import time
from collections.abc import Mapping
from typing import Any, cast

from jinja2 import TemplateError
from jinja2.runtime import Undefined

from .conversation import Arguments

MOST_STEPS = 1_000_000
MOST_SECONDS = 20.0
MOST_CHARACTERS = 64 << 20
MOST_BITS = 4096
"""Of a rendering: steps and seconds; of any text or list: characters or elements; of a number: bits. A long agentic
conversation takes some 50,000 steps, 0.1 s and 1 M characters."""

CHARACTERS_PER_STEP = 1024
"""What is multiplied or written anew costs a step per so many characters, so that all of it together is limited too."""

STEPS_PER_LOOK = 256
"""The clock is looked at this seldom."""


class TemplateLimitError(TemplateError):
    """A rendering spent its budget of steps, seconds or characters."""


class Budget:
    """What is left to one rendering."""

    def __init__(self) -> None:
        self.steps = MOST_STEPS
        self.looked_at = self.steps
        self.deadline = time.monotonic() + MOST_SECONDS

    def step(self, count: int = 1) -> None:
        """Spend some steps."""
        self.steps -= count
        if self.steps < 0:
            raise TemplateLimitError(f"the template takes more than {MOST_STEPS:,} steps")
        if self.looked_at - self.steps >= STEPS_PER_LOOK:
            self.looked_at = self.steps
            if time.monotonic() > self.deadline:
                raise TemplateLimitError(f"the template takes more than {MOST_SECONDS:g} seconds")


def require_size(size: int) -> None:
    """Raises TemplateLimitError for a text or list of more than MOST_CHARACTERS."""
    if size > MOST_CHARACTERS:
        raise TemplateLimitError(f"the template makes a text or list of {size:,}; {MOST_CHARACTERS:,} are the most")


def require_plain(value: object) -> None:
    """Raises TypeError for a value that is no data, or holds one, and TemplateLimitError for one that is too large.

    Functions and the like would be written with their place in memory, and so never twice the same.
    """
    size, steps = 0, 0
    waiting = [value]
    while waiting:
        each = waiting.pop()
        steps += 1
        if steps > MOST_STEPS:
            raise TemplateLimitError(f"the template writes a value of more than {MOST_STEPS:,} parts")
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, Mapping):
            pairs = cast("Mapping[object, object]", each)
            waiting += [*pairs, *pairs.values()]
        elif isinstance(each, (list, tuple)):
            waiting += cast("list[object]", each)
        elif each is not None and not isinstance(each, (bool, int, float, Undefined)):
            raise TypeError(f"{type(each).__name__} is not written as text")
        require_size(size)


def text_of(value: Any) -> str:  # noqa: ANN401 - whatever a template writes
    """A value as `{{ … }}` writes it; the arguments of a tool call as their JSON."""
    if isinstance(value, str):
        return value
    if type(value) is Arguments:
        return value.text
    require_plain(value)
    return str(value)
