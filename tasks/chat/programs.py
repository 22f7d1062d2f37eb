"""Programs: the rendering of a conversation with a known shape, learned once and then filled with its texts.

The *shape* of a conversation is all of it but its texts: the keys and roles of every message, which texts are empty, the names
and nesting of arguments, and the tools. Most plain conversations of a dataset have one of a few dozen shapes. When a shape occurs
for the fourth time, its conversation is rendered with unknown contents (`symbolic`). If the template takes the same path for all
contents, the resulting segments with holes are the *program* of the shape: to fill it takes 2 µs per message, and to render takes
45. Long conversations with tool calls hardly ever share a shape; they are rendered as before.

A conversation is rendered as before if its shape doesn't have a program, if one of its texts is blank or contains a tag that the
template searches for or a control token, if only some of its characters are trained on, or if it is very long. So programs change
no byte. Two checks guard this: a new program must give the segments that its conversation is rendered to, and one conversation in a
hundred, chosen by a hash of its text, is rendered and compared as well.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import orjson
from tokenmill.tasks.errors import RunError
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from .controls import Controls
from .conversation import Arguments, Conversation, Message, Rejected
from .encoding import Filled, Layout, Segments, TextTable, runs, text_of_run
from .sequences import Renderer, begins_with_markup
from .symbolic import FIRST, LAST, STAND_IN, Hole, SymbolicTemplate, UnprovableError

MAX_CHARACTERS = 1_000_000  # of the texts of a conversation; far below the limits of a rendering
MAX_SHAPES = 50_000  # shapes counted, 100 bytes each
MAX_RUNS = 500_000  # segments of all programs, which take about 100 bytes each; programs are then learned anew

RENDERED_FIRST = 3
"""Conversations of a shape that are rendered before a program is learned, because learning takes as long as three renderings."""

ONE_IN = 100  # filled conversations per one that is rendered as well

SEPARATOR = "\x1f"

Shape = tuple[Any, ...]


class ProgramError(RunError):
    """A program gave different segments than the template, so filled conversations can't be trusted."""


class _ShapelessError(Exception):
    """A conversation without a program."""


def shape(conversation: Conversation) -> tuple[Shape, list[str]] | None:
    """Return the shape of a conversation, and its texts in a fixed order; None if it can't have a program."""
    texts: list[str] = []
    try:
        kinds = [
            message["role"] if len(message) == 2 and _take(message["content"], texts) else _kind(message, texts)  # noqa: PLR2004 - a role and a content
            for message in conversation.messages
        ]
        # Tools are a part of the shape, not values: templates walk through their structure.
        tools = xxh3_128_digest(orjson.dumps(conversation.tools)) if conversation.tools else None
    except (_ShapelessError, TypeError):  # a number in a tool that orjson cannot write
        return None
    return ((*kinds, tools), texts) if texts else None


def _take(text: str | None, texts: list[str]) -> bool:
    """Whether a text is not empty; then it is appended to `texts`."""
    if not text:
        return False
    if text.isspace():
        raise _ShapelessError
    texts.append(text)
    return True


def _kind(message: Message, texts: list[str]) -> Shape:
    kind: list[Any] = []
    for name, value in message.items():
        if name in {"trained", "cut"} and value:
            raise _ShapelessError
        kind.append(name)
        kind.append(value if name in LITERAL else _structure(value, texts))
    return tuple(kind)


LITERAL = frozenset({"role", "type", "trained"})  # the keys of messages and calls whose values belong to the shape


def _structure(value: object, texts: list[str]) -> object:
    """The shape of a value: texts are taken, other leaves are spelled out."""
    if isinstance(value, str):
        return _take(value, texts)
    if isinstance(value, dict):
        found: list[object] = ["{"]
        for key, inner in cast("dict[str, Any]", value).items():
            found += (key, inner if key in LITERAL and isinstance(inner, str) else _structure(inner, texts))
        if isinstance(value, Arguments):
            # Templates write either the values or their text.
            _take(value.text, texts)
        return tuple(found)
    if isinstance(value, list):
        return ("[", *[_structure(inner, texts) for inner in cast("list[Any]", value)])
    return None if value is None else (type(value).__name__, repr(value))


def stand_ins(conversation: Conversation) -> Conversation:
    """Return the conversation with placeholders for its texts, numbered in the order of `shape`."""
    numbers = iter(range(1 << 62))

    def stood_in(value: Any) -> Any:  # noqa: ANN401 - any part of a message
        if isinstance(value, str):
            return f"{FIRST}{next(numbers)}{LAST}" if value else value
        if isinstance(value, dict):
            made = {
                key: inner if key in LITERAL and isinstance(inner, str) else stood_in(inner)
                for key, inner in cast("dict[str, Any]", value).items()
            }
            return Arguments(made, stood_in(value.text)) if isinstance(value, Arguments) else made
        return [stood_in(inner) for inner in cast("list[Any]", value)] if isinstance(value, list) else value

    messages = [
        cast("Message", {name: each if name in LITERAL else stood_in(each) for name, each in message.items()})
        for message in conversation.messages
    ]
    return Conversation(messages, conversation.tools)


@dataclass(frozen=True, slots=True)
class Program:
    """The sequences of a shape: a conversation's values, the text table with them, and the layouts. `absent` are the
    tags and control tokens that the texts of a conversation must not contain.
    """

    holes: Sequence[Hole]
    table: TextTable
    layouts: Sequence[Layout]
    absent: Controls

    @property
    def size(self) -> int:
        return sum(len(layout.sources) for layout in self.layouts)

    def filled(self, texts: Sequence[str]) -> list[Filled]:
        values = [hole.filled(texts[hole.slot]) for hole in self.holes]
        return [Filled(layout, self.table, values) for layout in self.layouts]


class Programs:
    """A renderer with its programs. `sequences` gives the renderer's result, filled or as segments."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self._programs: dict[Shape, Program | None] = {}
        self._seen: Counter[int] = Counter()
        self._runs = 0

    def sequences(self, conversation: Conversation) -> Sequence[Segments | Filled] | Rejected:
        """Return the sequences of a conversation, or why it has none.

        Raises ProgramError if a program gives other segments than the template.
        """
        found = shape(conversation)
        if found is None:
            return self.renderer.sequences(conversation)
        key, texts = found
        program = self._programs[key] if key in self._programs else self._learned(key, conversation, texts)
        if program is None or not self._fits(program, conversation, texts):
            return self.renderer.sequences(conversation)
        # A hash of the text, so the same conversations are compared in every run.
        if xxh3_64_intdigest(texts[-1].encode()) % ONE_IN == 0:
            _require_same(program, texts, self.renderer.sequences(conversation))
        return program.filled(texts)

    def _fits(self, program: Program, conversation: Conversation, texts: Sequence[str]) -> bool:
        # One search in all texts at once.
        everything = SEPARATOR.join(texts)
        if len(everything) > MAX_CHARACTERS or program.absent.occur_in(everything):
            return False
        return not (self.renderer.splits_turns and "<" in everything and begins_with_markup(conversation.messages))

    def _learned(self, key: Shape, conversation: Conversation, texts: Sequence[str]) -> Program | None:
        """The program of a shape, once enough of its conversations were rendered."""
        if len(self._seen) >= MAX_SHAPES or self._runs >= MAX_RUNS:
            self._seen.clear()
            self._programs.clear()
            self._runs = 0
        # Counts are by hash, because keys hold all roles and names; a collision only learns a program earlier.
        number = hash(key)
        self._seen[number] += 1
        if self._seen[number] <= RENDERED_FIRST:
            return None
        program = self._program(key, conversation)
        if program is not None and self._fits(program, conversation, texts):
            try:
                _require_same(program, texts, self.renderer.sequences(conversation))
            # A template may treat this conversation in a way that symbols don't show; its shape is rendered from now on.
            except ProgramError:
                program = None
        self._programs[key] = program
        self._runs += len(key) if program is None else program.size
        return program

    @cached_property
    def _symbolic(self) -> SymbolicTemplate | None:
        template = self.renderer.template
        if _has_stand_ins([template.source, template.variables]):
            return None
        return SymbolicTemplate(template.source, template.variables, self.renderer.controls)

    def _program(self, key: Shape, conversation: Conversation) -> Program | None:
        template, given = self._symbolic, stand_ins(conversation)
        if template is None or _has_stand_ins([key, conversation.tools]) or self.renderer.controls.spelled_in(given):
            return None
        template.begin()
        try:
            found = replace(self.renderer, template=template).sequences(given)
            if isinstance(found, Rejected):
                return None
            absent = Controls(dict.fromkeys([*self.renderer.controls.ids, *template.tags], 0))
            texts = _Texts()
            layouts = [_layout(segments, template.holes, texts) for segments in found]
            return Program(list(texts.holes), texts.table(), layouts, absent)
        except UnprovableError:
            return None


def _has_stand_ins(value: object) -> bool:
    """Whether a value other than a text contains a placeholder character."""
    written = ascii(value)
    return ascii(FIRST)[1:-1] in written or ascii(LAST)[1:-1] in written


def _require_same(program: Program, texts: Sequence[str], rendered: Sequence[Segments] | Rejected) -> None:
    if [filled.segments() for filled in program.filled(texts)] != rendered:
        raise ProgramError(
            f"chat_template: {texts[0][:40]!r}: filled, this conversation differs from the rendered template; report this, "
            "with the template and the conversation"
        )


Pattern = tuple[str | Hole, ...]


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts of a program while it is made: the numbers of their patterns, and of the holes and literals in these."""

    patterns: dict[Pattern, int] = field(default_factory=dict[Pattern, int])
    holes: dict[Hole, int] = field(default_factory=dict[Hole, int])
    literals: dict[str, int] = field(default_factory=dict[str, int])

    def number(self, pattern: Pattern) -> int:
        for part in pattern:
            if isinstance(part, Hole):
                self.holes.setdefault(part, len(self.holes))
            else:
                self.literals.setdefault(part, len(self.literals))
        return self.patterns.setdefault(pattern, len(self.patterns))

    def table(self) -> TextTable:
        parts = [part for pattern in self.patterns for part in pattern]
        numbers = [self.holes[part] if isinstance(part, Hole) else -1 - self.literals[part] for part in parts]
        return TextTable(list(self.literals), numbers, list(map(len, self.patterns)))


def _layout(segments: Segments, holes: Sequence[Hole], texts: _Texts) -> Layout:
    used: dict[Pattern, int] = {}

    def place(text: str) -> int:
        parts = STAND_IN.split(text)
        if any(FIRST in part or LAST in part for part in parts[::2]):
            raise UnprovableError("a boundary is inside a content")
        found = [holes[int(part)]._replace(origin=None) if number % 2 else part for number, part in enumerate(parts)]
        pattern = tuple(part for part in found if part)
        return used.setdefault(pattern, texts.number(pattern))

    found = runs(segments)
    sources = [-1 - run[0].token if run[0].text is None else place(text_of_run(run)) for run in found]
    mixed = [
        (number, [place(each.text or "") for each in run], [each.trained for each in run])
        for number, run in enumerate(found)
        if len(run) > 1
    ]
    trained, roles, breaks = zip(*((run[0].trained, run[0].role, run[0].breaks) for run in found), strict=True)
    parts = [part for pattern in used for part in pattern]
    literal = sum(len(part) for part in parts if isinstance(part, str))
    values = [texts.holes[part] for part in parts if isinstance(part, Hole)]
    return Layout(sources, trained, roles, breaks, mixed, literal, values)
