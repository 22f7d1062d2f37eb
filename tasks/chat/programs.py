"""Programs: what a conversation of a known shape becomes, learned once and then filled with its texts.

The *shape* of a conversation is all of it but its texts: the keys and roles of every message, which texts are empty, the names
and nesting of arguments, and the tools. Most plain conversations of a data set have one of a few dozen shapes. When a shape comes up
for the eighth time, its conversation is rendered with unknown contents (`symbolic`). If the template takes the same path for all
contents, the resulting pieces with holes are the *program* of the shape: to fill it takes 4 µs per message, and to render takes
45. Long conversations with tool calls hardly ever share a shape; they are rendered as before.

A conversation is rendered as before if its shape has no program, if one of its texts is blank or contains a tag that the
template searches for or a control token, if only some of its characters are trained on, or if it is very long. So programs change
no byte. Two checks guard this: a new program must give the pieces that its conversation is rendered to, and one conversation in a
hundred, chosen by a hash of its text, is rendered and compared as well.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa
from tokenmill.tasks.errors import RunError
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from .columns import Table
from .controls import Controls
from .conversation import Arguments, Conversation, Message, Rejected
from .encoding import Filled, Layout, Placed
from .messages import CLOSE, OPEN
from .plain import PlainRows, beginning_with, spelling
from .sequences import Pieces, Renderer, begins_with_markup
from .symbolic import FIRST, LAST, STAND_IN, Hole, SymbolicTemplate, UnprovableError

MOST_CHARACTERS = 1_000_000
"""Of the texts of a conversation; far below the limits of a rendering."""

MOST_SHAPES = 50_000
"""Shapes counted, 100 bytes each."""

MOST_PIECES = 500_000
"""Pieces of all programs, which take about 100 bytes each; programs are then learned anew."""

RENDERED_FIRST = 7
"""Conversations of a shape that are rendered before a program is learned, because learning takes as long as three renderings."""

ONE_IN = 100
"""Filled conversations per one that is rendered as well."""

SEPARATOR = "\x1f"

Shape = tuple[Any, ...]


class ProgramError(RunError):
    """A program gave other pieces than the template, so none of what was filled can be trusted."""


class _ShapelessError(Exception):
    """A conversation that has no program."""


def shape(conversation: Conversation) -> tuple[Shape, list[str]] | None:
    """The shape of a conversation, and its texts in a fixed order; None if it can have no program."""
    texts: list[str] = []
    try:
        kinds = [
            message["role"] if len(message) == 2 and _take(message["content"], texts) else _kind(message, texts)  # noqa: PLR2004 - a role and a content
            for message in conversation.messages
        ]
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
        if name == "trained" and value:
            raise _ShapelessError
        kind.append(name)
        kind.append(value if name in LITERAL else _structure(value, texts))
    return tuple(kind)


LITERAL = frozenset({"role", "type", "trained"})
"""The keys of messages and calls whose values belong to the shape."""


def _structure(value: object, texts: list[str]) -> object:
    """The shape of a value: texts are taken, other leaves are spelled out."""
    if isinstance(value, str):
        return _take(value, texts)
    if isinstance(value, dict):
        found: list[object] = ["{"]
        for key, inner in cast("dict[str, Any]", value).items():
            found += (key, inner if key in LITERAL and isinstance(inner, str) else _structure(inner, texts))
        if isinstance(value, Arguments):
            _take(value.text, texts)
        return tuple(found)
    if isinstance(value, list):
        return ("[", *[_structure(inner, texts) for inner in cast("list[Any]", value)])
    return None if value is None else (type(value).__name__, repr(value))


def stand_ins(conversation: Conversation) -> Conversation:
    """The conversation with stand-ins for its texts, numbered in the order of `shape`."""
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


@dataclass(frozen=True, eq=False)
class Program:
    """The sequences of a shape: the patterns of their texts, each once, and their layouts. `absent` are the tags and control
    tokens that the texts of a conversation must not contain.
    """

    patterns: Sequence["Pattern"]
    layouts: Sequence[Layout]
    absent: Controls

    @cached_property
    def fills(self) -> Sequence["Fill"]:
        """What makes each text of those of a conversation."""
        return [_fill(pattern) for pattern in self.patterns]

    @cached_property
    def table(self) -> Table | None:
        """The patterns for contents that begin and end with no blank, and so are not stripped; None if some become JSON."""
        parts = [part for pattern in self.patterns for part in pattern]
        if any(isinstance(part, Hole) and part.is_json for part in parts):
            return None
        literals = list(dict.fromkeys(part for part in parts if isinstance(part, str)))
        numbers = [part.slot if isinstance(part, Hole) else -1 - literals.index(part) for part in parts]
        return Table(literals, numbers, [len(pattern) for pattern in self.patterns])

    @cached_property
    def characters(self) -> Sequence[tuple[int, Sequence[int]]]:
        """Of the texts of each sequence: characters of their literals, and the numbers of the contents in them."""
        used = [[part for number in layout.used for part in self.patterns[number]] for layout in self.layouts]
        literal = [sum(len(part) for part in parts if isinstance(part, str)) for parts in used]
        slots = [[part.slot for part in parts if isinstance(part, Hole)] for parts in used]
        return list(zip(literal, slots, strict=True))

    @property
    def size(self) -> int:
        """Pieces of all sequences."""
        return sum(len(layout.sources) for layout in self.layouts)

    def filled(self, texts: Sequence[str]) -> list[Filled]:
        """The sequences with these texts."""
        filled = [fill(texts) for fill in self.fills]
        return [Filled(layout, filled) for layout in self.layouts]

    def placed(self, column: pa.LargeStringArray, first: int, lengths: Sequence[int]) -> list[Placed]:
        """The sequences with the texts of a column, of these lengths, from number `first` on."""
        table = cast("Table", self.table)
        return [
            Placed(layout, table, column, first, literal + sum([lengths[first + slot] for slot in slots]))
            for layout, (literal, slots) in zip(self.layouts, self.characters, strict=True)
        ]


class Programs:
    """A renderer with its programs. `sequences` gives what the renderer gives, filled or as pieces."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self._programs: dict[Shape, Program | None] = {}
        self._seen: Counter[int] = Counter()
        self._pieces = 0

    def sequences(self, conversation: Conversation) -> Sequence[Pieces | Filled] | Rejected:
        """The sequences of a conversation, or why it has none.

        Raises ProgramError if a program gives other pieces than the template.
        """
        found = shape(conversation)
        if found is None:
            return self.renderer.sequences(conversation)
        key, texts = found
        program = self._programs[key] if key in self._programs else self._learned(key, conversation, texts)
        if program is None or not self._fits(program, conversation, texts):
            return self.renderer.sequences(conversation)
        if _is_compared(texts[-1]):
            _require_same(program, texts, self.renderer.sequences(conversation))
        return program.filled(texts)

    def placed(self, plain: PlainRows) -> dict[int, tuple[Conversation, list[Placed]]]:
        """The plain rows whose program is known and surely holds, by number, and their sequences: those of `sequences`."""
        found = [(row, self._programs.get(row.shape)) for row in plain.rows]
        known = [(row, program) for row, program in found if program is not None and program.table is not None]
        try:
            column = pa.array(plain.texts if known else [], pa.large_string())
        except UnicodeEncodeError:  # half a surrogate pair, which `parse` rejects
            return {}
        doubts = np.append(0, np.cumsum(self._doubtful(column, {program for _, program in known}))).tolist()
        lengths = list(map(len, plain.texts))
        return {
            row.number: (row.conversation, program.placed(column, row.start, lengths))
            for row, program in known
            if doubts[row.start] == doubts[row.stop]
            and sum(lengths[row.start : row.stop], row.stop - row.start) <= MOST_CHARACTERS
            and not _is_compared(plain.texts[row.stop - 1])
        }

    def _doubtful(self, column: pa.LargeStringArray, programs: Iterable[Program]) -> np.ndarray:
        """Which texts may hold reasoning, or may be texts for which a program does not hold, bool [texts]."""
        tags = {OPEN, CLOSE}.union(*(program.absent.ids for program in programs))
        doubtful = spelling(column, tags)
        return doubtful | beginning_with(column, "<") if self.renderer.splits_turns and len(column) else doubtful

    def _fits(self, program: Program, conversation: Conversation, texts: Sequence[str]) -> bool:
        """Whether a program holds for these texts."""
        everything = SEPARATOR.join(texts)
        if len(everything) > MOST_CHARACTERS or program.absent.occur_in(everything):
            return False
        return not (self.renderer.splits_turns and "<" in everything and begins_with_markup(conversation.messages))

    def _learned(self, key: Shape, conversation: Conversation, texts: Sequence[str]) -> Program | None:
        """The program of a shape, once enough of its conversations were rendered."""
        if len(self._seen) >= MOST_SHAPES or self._pieces >= MOST_PIECES:
            self._seen.clear()
            self._programs.clear()
            self._pieces = 0
        number = hash(key)
        self._seen[number] += 1
        if self._seen[number] <= RENDERED_FIRST:
            return None
        program = self._program(key, conversation)
        if program is not None and self._fits(program, conversation, texts):
            try:
                _require_same(program, texts, self.renderer.sequences(conversation))
            except ProgramError:
                program = None
        self._programs[key] = program
        self._pieces += len(key) if program is None else program.size
        return program

    @property
    def controls(self) -> Controls:
        """The control tokens of the template."""
        return self.renderer.controls

    @cached_property
    def _symbolic(self) -> SymbolicTemplate | None:
        template = self.renderer.template
        if _has_stand_ins([template.source, template.variables]):
            return None
        return SymbolicTemplate(template.source, template.variables, self.controls)

    def _program(self, key: Shape, conversation: Conversation) -> Program | None:
        template, given = self._symbolic, stand_ins(conversation)
        if template is None or _has_stand_ins([key, conversation.tools]) or self.controls.spelled_in(given):
            return None
        template.begin()
        try:
            found = replace(self.renderer, template=template).sequences(given)
            if isinstance(found, Rejected):
                return None
            absent = Controls(dict.fromkeys([*self.controls.ids, *template.tags], 0))
            return _program_of(found, template.holes, absent)
        except UnprovableError:
            return None


def _has_stand_ins(value: object) -> bool:
    """Whether something other than a text contains a character of stand-ins."""
    written = ascii(value)
    return ascii(FIRST)[1:-1] in written or ascii(LAST)[1:-1] in written


def _is_compared(text: str) -> bool:
    """Whether a conversation that ends with this text is rendered although it is filled."""
    return xxh3_64_intdigest(text.encode()) % ONE_IN == 0


def _require_same(program: Program, texts: Sequence[str], rendered: Sequence[Pieces] | Rejected) -> None:
    if [filled.pieces() for filled in program.filled(texts)] != rendered:
        raise ProgramError(
            f"chat_template: {texts[0][:40]!r}: filled, this conversation differs from what the template renders; report this, "
            "with the template and the conversation"
        )


Pattern = tuple[str | Hole, ...]


Fill = Callable[[Sequence[str]], str]
"""The text of a pattern from the texts of a conversation."""


def _fill(pattern: Pattern) -> Fill:
    """Compiled, because most patterns are one content between literal texts."""
    holes = [part for part in pattern if isinstance(part, Hole)]
    if not holes:
        literal = "".join(cast("Sequence[str]", pattern))
        return lambda _: literal
    if len(holes) > 1:
        parts = [part if isinstance(part, str) else _fill((part,)) for part in pattern]
        return lambda texts: "".join([part if isinstance(part, str) else part(texts) for part in parts])
    (hole,), place = holes, pattern.index(holes[0])
    before, after = ("".join(cast("Sequence[str]", each)) for each in (pattern[:place], pattern[place + 1 :]))
    slot, changed = hole.slot, hole.filled
    if not hole.operations:
        return lambda texts: before + texts[slot] + after
    return lambda texts: before + changed(texts[slot]) + after


def _program_of(sequences: Sequence[Pieces], holes: Sequence[Hole], absent: Controls) -> Program:
    """The program of sequences with stand-ins for holes."""
    table: dict[Pattern, int] = {}
    layouts = [_layout(pieces, holes, table) for pieces in sequences]
    return Program(list(table), layouts, absent)


def _layout(pieces: Pieces, holes: Sequence[Hole], table: dict[Pattern, int]) -> Layout:
    used: dict[int, None] = {}

    def place(text: str) -> int:
        number = table.setdefault(_pattern(text, holes), len(table))
        used[number] = None
        return number

    sources = [-1 - piece.token if piece.text is None else place(piece.text) for piece in pieces]
    mixed = [
        (number, [place(part) for part in _parts(piece.text or "", piece.learned)])
        for number, piece in enumerate(pieces)
        if isinstance(piece.learned, tuple)
    ]
    learned = [piece.learned is True for piece in pieces]
    return Layout(
        list(used), sources, learned, [piece.role for piece in pieces], [piece.breaks for piece in pieces], mixed
    )


def _parts(text: str, lengths: Sequence[int]) -> list[str]:
    ends = [0, *itertools.accumulate(lengths)]
    return [text[start:stop] for start, stop in itertools.pairwise(ends)]


def _pattern(text: str, holes: Sequence[Hole]) -> Pattern:
    parts = STAND_IN.split(text)
    if any(FIRST in part or LAST in part for part in parts[::2]):
        raise UnprovableError("a boundary lies inside of a content")
    found = [holes[int(part)] if number % 2 else part for number, part in enumerate(parts)]
    return tuple(part for part in found if part)
