"""Render conversations with a chat template, and record the origin of the text.

Rendering a message takes 20 to 40 microseconds, most of it in Jinja. Nothing is rendered twice to find a boundary: the
template's loop over the messages marks where each begins, and assistant contents carry their origin through the template
(`traced`, `sandbox`).

A process ends when a rendering spends too long in one call of C. Python checks limits, and handles Ctrl-C and other signals,
between operations only, and one operation on a nested value can take years. `filters` bounds every such operation that is known;
a timer of the kernel covers all other cases. It counts the thread's CPU time, so a busy or suspended machine does no harm; when
it expires, the C library starts a thread, which doesn't need an interpreter, to show the sentence and to end the process. A Dask worker
that ends takes its shard with it: the run tries others, then fails. Setting the timer and clearing it takes about 3 µs.
"""

import ctypes
import hashlib
import os
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson
from jinja2 import Template, TemplateError, TemplateSyntaxError, UndefinedError, nodes
from tokenmill.tasks.errors import InputError

from .conversation import Message, Rejected
from .filters import Budget, together
from .sandbox import Sandbox, clock, instrumented
from .traced import Span, Traced, records

FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""Errors that a template can raise for an unexpected conversation."""

CLOCK = "strftime_now"  # the function that templates call for the date

Variables = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rendering:
    """A rendered conversation and the origin of its characters.

    `extents` maps a message's number to the characters `[start, stop)` its loop iteration wrote; messages written
    elsewhere (a system text in a header) have none. `spans` are contents and marks.
    """

    text: str
    spans: tuple[Span, ...]
    extents: dict[int, tuple[int, int]]

    @property
    def prologue(self) -> int:
        """Where the first message begins; the length of the text if there is none."""
        return min((start for start, _ in self.extents.values()), default=len(self.text))

    @property
    def epilogue(self) -> int:
        return max((stop for _, stop in self.extents.values()), default=len(self.text))


class ChatTemplate:
    """A compiled template. `digest` is the hash of its source; `variables` are passed to every rendering."""

    sandbox = Sandbox

    def __init__(self, source: str, variables: Variables) -> None:
        """Raises InputError, with line and remedy, for an invalid template or `date`."""
        self._sandbox = self.sandbox()
        # Without a date, the function isn't defined, and a template that needs it fails with a remedy.
        if CLOCK in source and "date" in variables:
            self._sandbox.globals = {**self._sandbox.globals, CLOCK: clock(variables["date"])}
        try:
            tree = instrumented(self._parsed(source))
            code = self._sandbox.compile(tree)
        except TemplateSyntaxError as error:
            raise InputError(f"chat_template:{error.lineno}: {error.message}; fix the template") from error
        except (TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:  # Python's limits
            # Python's messages end in advice on its own settings.
            why = str(error).partition("; use ")[0] or "it has too many branches, or brackets in brackets"
            raise InputError(f"chat_template: {why}; fix the template") from error
        self._template = Template.from_code(self._sandbox, code, self._sandbox.globals)
        self.source = source
        self.digest = f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"
        self.variables = dict(variables)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], **variables: object
    ) -> Rendering | Rejected:
        """Render a conversation; Rejected if the template rejects it, fails, or exceeds its budget."""
        # A budget per rendering; the sandbox looks it up at every step.
        self._sandbox.budget = Budget()
        given = {
            "messages": self._records(messages), "tools": list(tools) or None, "documents": None,
            "add_generation_prompt": False, **self.variables, **variables,
        }  # fmt: skip
        try:
            with watched():
                rendered = self._written(given)
            spans = rendered.spans if isinstance(rendered, Traced) else ()
            return Rendering(str.__str__(rendered), spans, extents(spans, len(rendered)))
        except FAULTS as error:
            if isinstance(error, UndefinedError) and CLOCK in str(error):
                return Rejected(
                    "template_error", "the chat template needs a date; set template_variables.date=2026-03-01"
                )
            # Any fault of a template is about the row, because others of its rows may render.
            return Rejected("template_error", f"the chat template fails: {type(error).__name__}: {error}")

    def reads(self, name: str) -> bool:
        """Return whether a variable with this name can change the output."""
        return name in self.source or (name == "date" and CLOCK in self.source)

    def _parsed(self, source: str) -> nodes.Template:
        return self._sandbox.parse(source)

    def _records(self, messages: Sequence[Message]) -> list[Any]:
        return records(messages)

    def _written(self, given: Variables) -> str:
        pieces = list(self._template.root_render_func(self._template.new_context(dict(given))))
        return together(pieces)


def compiled(source: str, variables: Variables) -> ChatTemplate:
    """Return the template of a source and JSON variables, one for all who ask in a process. Raises as ChatTemplate."""
    return _compiled(source, orjson.dumps(variables, option=orjson.OPT_SORT_KEYS))


@lru_cache(maxsize=8)
def _compiled(source: str, variables: bytes) -> ChatTemplate:
    return ChatTemplate(source, orjson.loads(variables))


def extents(spans: Sequence[Span], size: int) -> dict[int, tuple[int, int]]:
    """Return the characters that each message's loop iteration wrote, in a rendering of `size` characters. Raises ValueError
    for a message written in two places.
    """
    found: dict[int, tuple[int, int]] = {}
    for number, start, stop in _turns(spans, size):
        known = found.get(number, (start, start))
        # An empty iteration beside a full one, such as in a loop that counts, is no second place.
        if start < stop and known[0] < known[1]:
            raise ValueError(f"message {number + 1} is written in two places")
        if start < stop or number not in found:
            found[number] = (start, stop)
    return found


def _turns(spans: Sequence[Span], size: int) -> Iterator[tuple[int, int, int]]:
    """Every iteration of every loop over messages: the number of the message, start and stop. A loop over messages
    inside an iteration is part of it.
    """
    running = current = begun = -1  # the loop, the message of its turn, and where that begins
    for place, _, (number, kind) in spans:
        if kind == "loop" and running in {-1, number}:
            if running >= 0:
                yield current, begun, place
            running, current, begun = number, -1, place
        elif kind == "message" and current < 0:
            current = number
        elif kind == "end" and number == running:
            yield current, begun, place
            running = -1
    if running >= 0:
        yield current, begun, size


SECONDS = 30

CPU_TIME_OF_THREAD = 3  # CLOCK_THREAD_CPUTIME_ID
CALL_IN_THREAD = 2  # SIGEV_THREAD
_C = ctypes.PyDLL("librt.so.1", use_errno=True)  # part of libc since glibc 2.34


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux: call a function with a value."""

    _fields_ = (
        ("value", ctypes.c_char_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("others", ctypes.c_long * 8),
    )


class _Time(ctypes.Structure):
    """`struct itimerspec`: seconds and nanoseconds between expiries, and until the first."""

    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


_LIMIT, _NEVER = _Time(value=(SECONDS, 0)), _Time()
_SENTENCE = f"tokenmill: the chat template computes for more than {SECONDS} seconds in one operation; fix the template"
# The handler must not need Python: its interpreter is what hangs.
_EVENT = _Event(
    f"echo '{_SENTENCE}' >&2; kill -KILL $PPID".encode(),
    0,
    CALL_IN_THREAD,
    ctypes.cast(_C.system, ctypes.c_void_p).value,
)
_of_thread = threading.local()
os.register_at_fork(after_in_child=lambda: vars(_of_thread).clear())  # a child has none of its parent's timers


@contextmanager
def watched() -> Generator[None]:
    """A context that may take SECONDS of this thread's CPU time. Raises OSError if the kernel is out of timers."""
    timer = getattr(_of_thread, "timer", None)
    if timer is None:  # one per thread, because it counts the time of the thread that makes it
        timer = ctypes.c_void_p()
        if _C.timer_create(CPU_TIME_OF_THREAD, ctypes.byref(_EVENT), ctypes.byref(timer)):
            raise OSError(ctypes.get_errno(), "the kernel doesn't offer a timer to limit a chat template")
        _of_thread.timer = timer
    _C.timer_settime(timer, 0, ctypes.byref(_LIMIT), None)
    try:
        yield
    finally:
        _C.timer_settime(timer, 0, ctypes.byref(_NEVER), None)
