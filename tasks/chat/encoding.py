"""The texts of many conversations of programs at once: literals of the template joined with values of the conversations.

Arrow copies all of them in one go, some 5 GB/s, so nothing is made per text.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
from tokenmill.tasks.tokenize.encoders import Encoder, Tokens

from .controls import Controls
from .conversation import Role
from .loss import Range


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """How the texts of a program are made: text i is joined of the next `counts[i]` of the `parts`.

    A part is the number of a value of the conversation, or -1 - n for literal n.
    """

    literals: Sequence[str]
    parts: Sequence[int]
    counts: Sequence[int]

    def texts(self, values: Sequence[str]) -> list[str]:
        """The texts of one conversation."""
        parts = iter([values[part] if part >= 0 else self.literals[-1 - part] for part in self.parts])
        return ["".join(itertools.islice(parts, count)) for count in self.counts]


@dataclass(slots=True)
class Columns:
    """The values of conversations; conversation i fills table `which[i]` with those from number `firsts[i]` on."""

    values: list[str] = field(default_factory=list[str])
    tables: dict[Table, int] = field(default_factory=dict[Table, int])
    which: list[int] = field(default_factory=list[int])
    firsts: list[int] = field(default_factory=list[int])
    _last: Sequence[str] | None = None

    def add(self, table: Table, values: Sequence[str]) -> int:
        """The number of the conversation with these values; the last one may be added again."""
        if values is not self._last:
            self._last = values
            self.which.append(self.tables.setdefault(table, len(self.tables)))
            self.firsts.append(len(self.values))
            self.values += values
        return len(self.firsts) - 1

    def joined(self, others: Sequence[str]) -> tuple[pa.LargeStringArray, np.ndarray]:
        """`others` and, after them, the texts of all conversations; and where those of each conversation begin, int64."""
        if not self.firsts:
            return pa.array(others, pa.large_string()), np.empty(0, np.int64)
        which, tables = np.array(self.which), list(self.tables)
        literals = [literal for table in tables for literal in table.literals]
        parts, counts = _Lists.of([table.parts for table in tables]), _Lists.of([table.counts for table in tables])
        literal = len(others) + np.repeat(_before(np.array([len(table.literals) for table in tables])), parts.sizes)
        value = len(others) + len(literals) + np.repeat(np.array(self.firsts), parts.sizes[which])
        chosen = parts.numbers(which)
        numbers = parts.values[chosen]
        numbers = np.where(numbers < 0, literal[chosen] - 1 - numbers, value + numbers)
        strings = pa.array([*others, *literals, *self.values], pa.large_string())
        _, bounds, characters = strings.take(pa.array(np.append(np.arange(len(others)), numbers))).buffers()
        ends = np.cumsum(np.append(np.ones(len(others), np.int64), counts.values[counts.numbers(which)]))
        bounds = np.frombuffer(bounds, np.int64)[np.append(0, ends)]
        texts = pa.LargeStringArray.from_buffers(len(ends), pa.py_buffer(bounds), characters)
        return texts, len(others) + _before(counts.sizes[which])


class _Lists(NamedTuple):
    """Lists of integers: the values of all, and the size of each."""

    values: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Self:
        sizes = np.array([len(each) for each in lists], np.int64)
        return cls(np.array(list(itertools.chain.from_iterable(lists)), np.int64), sizes)

    def numbers(self, chosen: np.ndarray) -> np.ndarray:
        """Where the values of the chosen lists are, one list after the other."""
        return ranges(_before(self.sizes)[chosen], self.sizes[chosen])


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers `[start, start + count)` of each pair, one after the other, int64."""
    return np.repeat(starts - _before(counts), counts) + np.arange(counts.sum())


def _before(sizes: np.ndarray) -> np.ndarray:
    """The total of the sizes before each."""
    return np.cumsum(sizes) - sizes


ROLES: tuple[Literal["template", "padding"] | Role, ...] = (
    "template", "system", "developer", "user", "assistant", "tool", "padding",
)  # fmt: skip
"""Who wrote a token: the role's number is its index."""

ID_BYTES = np.dtype(np.int32).itemsize

ROLE_NUMBERS: dict[str, int] = {role: number for number, role in enumerate(ROLES)}

ASSISTANT = np.int8(ROLE_NUMBERS["assistant"])


class Piece(NamedTuple):
    """A control token (`token` is its id, `text` None) or a text.

    `learned` says whether it is trained on; for a text with a loss boundary inside, it is the lengths of its parts in
    characters, untrained first (possibly 0). `breaks`: do not join it with the text before it.
    """

    text: str | None
    token: int
    role: int
    learned: bool | tuple[int, ...]
    breaks: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The pieces of a sequence apart from what its texts say.

    The first lists have an entry per piece: `sources` is the number of a text in the table of its program, or -1 - id for a control
    token; `learned`, `roles` and `breaks` are as in Piece. `mixed` lists the pieces that are trained on in part: the piece, and the
    numbers of its parts, untrained and trained in turn. Its texts, each once, have `literal` characters of their own and `values`.
    """

    sources: Sequence[int]
    learned: Sequence[bool]
    roles: Sequence[int]
    breaks: Sequence[bool]
    mixed: Sequence[tuple[int, Sequence[int]]]
    literal: int
    values: Sequence[int]


class Filled(NamedTuple):
    """A sequence of a program: its layout, the table of its texts, and the values of its conversation in these."""

    layout: Layout
    table: Table
    values: Sequence[str]

    def pieces(self) -> list[Piece]:
        """The same sequence as pieces."""
        layout, texts, parts = self.layout, self.table.texts(self.values), dict(self.layout.mixed)
        return [
            Piece(
                None if source < 0 else texts[source],
                -1 - source if source < 0 else -1,
                role,
                tuple(len(texts[part]) for part in parts[place]) if place in parts else learned,
                breaks,
            )
            for place, (source, learned, role, breaks) in enumerate(
                zip(layout.sources, layout.learned, layout.roles, layout.breaks, strict=True)
            )
        ]


class Tokenized(NamedTuple):
    """A sequence of a row that is tokenized already: `ids` int32 and `learned` int8, an entry per token, not shifted.

    Who wrote its tokens isn't known: those that are trained on count as the assistant's, and others as the template's. `unread`
    names fields of the row that aren't read.
    """

    ids: np.ndarray
    learned: np.ndarray
    unread: tuple[str, ...]


class Passage(NamedTuple):
    """Part of a rendering: its end (it begins where the previous one ends), its author, the characters trained on, and
    where generation begins (-1: nowhere).
    """

    stop: int
    role: int
    learned: Sequence[Range] = ()
    generation: int = -1


def cut(text: str, passages: Sequence[Passage], controls: Controls) -> list[list[Piece]]:
    """The pieces of each passage of a rendering, in order, without empty texts. The last passage ends the text."""
    groups: list[list[Piece]] = [[] for _ in passages]
    number, passage, group = 0, passages[0], groups[0]
    place, is_control = 0, True
    for found in controls.pattern.split(text):
        is_control = not is_control  # texts and control tokens alternate, starting with a text
        end = place + len(found)
        while place < end:
            while place >= passage.stop:
                number += 1
                passage, group = passages[number], groups[number]
            if is_control:
                learned = bool(passage.learned) and _learned(passage.learned, place, end) is True
                group.append(_control(controls.ids[found], passage.role, learned))
                place = end
            else:
                stop = min(end, passage.stop)
                group += _cut_text(found if stop - place == len(found) else text[place:stop], place, passage)
                place = stop
    return groups


@lru_cache(maxsize=4096)
def _control(token: int, role: int, learned: bool) -> Piece:
    return Piece(None, token, role, learned)


@lru_cache(maxsize=16)
def _line_end(role: int) -> Piece:
    """The text that most templates write after every message."""
    return Piece("\n", -1, role, False)


def _cut_text(text: str, place: int, passage: Passage) -> list[Piece]:
    """A text without control tokens, split where generation begins inside it."""
    if not passage.learned and passage.generation < 0:
        return [_line_end(passage.role) if text == "\n" else Piece(text, -1, passage.role, False)]
    boundary = passage.generation - place
    if 0 < boundary < len(text):
        return [_text_piece(text[:boundary], place, passage), _text_piece(text[boundary:], passage.generation, passage)]
    return [_text_piece(text, place, passage)]


def _text_piece(text: str, place: int, passage: Passage) -> Piece:
    learned = _learned(passage.learned, place, place + len(text))
    return Piece(text, -1, passage.role, learned, place == passage.generation)


def _learned(ranges: Sequence[Range], start: int, stop: int) -> bool | tuple[int, ...]:
    """Whether the characters `[start, stop)` are trained on, or which of them."""
    if len(ranges) == 1 and ranges[0][0] <= start and stop <= ranges[0][1]:
        return True
    inside = [(max(first, start), min(last, stop)) for first, last in ranges if first < stop and last > start]
    if not inside:
        return False
    if inside == [(start, stop)]:
        return True
    boundaries = [boundary for each in inside for boundary in each]
    if boundaries[-1] < stop:
        boundaries.append(stop)
    return tuple(boundary - before for before, boundary in zip([start, *boundaries], boundaries, strict=False))


def connected(passages: Sequence[Sequence[Piece]]) -> list[Piece]:
    """The pieces of consecutive passages; adjacent texts are joined, because they are encoded as one."""
    pieces: list[Piece] = []
    for passage in passages:
        if passage and pieces and _meet(pieces[-1], passage[0]):
            pieces[-1] = _joined(pieces[-1], passage[0])
            pieces += passage[1:]
        else:
            pieces += passage
    return pieces


def _meet(left: Piece, right: Piece) -> bool:
    return left.text is not None and right.text is not None and not right.breaks


def _joined(left: Piece, right: Piece) -> Piece:
    one, other = left.text or "", right.text or ""
    if left.learned is right.learned:
        return left._replace(text=one + other)
    lengths = [*_lengths(left.learned, len(one))]
    for number, length in enumerate(_lengths(right.learned, len(other))):
        if number % 2 == (len(lengths) - 1) % 2:
            lengths[-1] += length
        else:
            lengths.append(length)
    return left._replace(text=one + other, learned=tuple(lengths))


def _lengths(learned: bool | tuple[int, ...], size: int) -> tuple[int, ...]:
    """The lengths of untrained and trained parts in turn."""
    if isinstance(learned, tuple):
        return learned
    return (0, size) if learned else (size,)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Encoded sequences, back to back; sequence i is `[offsets[i], offsets[i + 1])`.

    `ids` int32 [tokens]; `loss` int8 [tokens], 1 where the token itself is to be predicted (not shifted); `offsets`
    int64 [sequences + 1]. Roles are runs: from token `role_starts[j]` (int64, counted over the batch) on, tokens are by
    `roles[j]` (int8, see ROLES); every sequence begins a run. `straddled` int64 [sequences] counts tokens that contain a loss
    boundary, which are not trained on.
    """

    ids: np.ndarray
    loss: np.ndarray
    offsets: np.ndarray
    role_starts: np.ndarray
    roles: np.ndarray
    straddled: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per sequence, int64."""
        return np.diff(self.offsets)


@dataclass(slots=True)
class Batch:
    """Sequences to encode.

    The pieces of each rendered sequence and of each layout are listed once, in `sources`, `learned` and `roles`: sequence i has
    `counts[i]` of them, from number `starts[i]` on. Its texts are numbered within conversation `owners[i]` of `columns`, or, if that
    is -1, in `texts`. `mixed` lists the pieces that are trained on in part: the sequence, the piece of it, and the numbers of its
    parts. `tokenized` sequences have a piece per token, listed after all others: if `starts[i]` is -1 - n, from number n of these on.
    `characters` counts those of the texts of all sequences, and tokens of `tokenized`.
    """

    texts: list[str] = field(default_factory=list[str])
    columns: Columns = field(default_factory=Columns)
    sources: list[int] = field(default_factory=list[int])
    learned: list[bool] = field(default_factory=list[bool])
    roles: list[int] = field(default_factory=list[int])
    starts: list[int] = field(default_factory=list[int])
    counts: list[int] = field(default_factory=list[int])
    owners: list[int] = field(default_factory=list[int])
    mixed: list[tuple[int, int, Sequence[int]]] = field(default_factory=list[tuple[int, int, Sequence[int]]])
    tokenized: list[Tokenized] = field(default_factory=list[Tokenized])
    characters: int = 0
    _tokens: int = 0
    _layouts: dict[Layout, int] = field(default_factory=dict[Layout, int])

    def add(self, sequence: Sequence[Piece] | Filled | Tokenized) -> None:
        """Append one sequence."""
        if isinstance(sequence, Filled):
            self._add_filled(*sequence)
        elif isinstance(sequence, Tokenized):
            self._append(-1 - self._tokens, len(sequence.ids), -1, ())
            self.tokenized.append(sequence)
            self._tokens += len(sequence.ids)
            self.characters += len(sequence.ids)
        else:
            self._add_pieces(sequence)

    def _add_filled(self, layout: Layout, table: Table, values: Sequence[str]) -> None:
        start = self._layouts.get(layout)
        if start is None:
            start = self._layouts[layout] = self._listed(layout.sources, layout.learned, layout.roles)
        self._append(start, len(layout.sources), self.columns.add(table, values), layout.mixed)
        self.characters += layout.literal + sum([len(values[number]) for number in layout.values])

    def _add_pieces(self, pieces: Sequence[Piece]) -> None:
        sources = [-1 - token if text is None else self._text(text) for text, token, _, _, _ in pieces]
        mixed = [
            (place, self._parts(piece.text or "", piece.learned))
            for place, piece in enumerate(pieces)
            if isinstance(piece.learned, tuple)
        ]
        start = self._listed(sources, [piece.learned is True for piece in pieces], [piece.role for piece in pieces])
        self._append(start, len(sources), -1, mixed)
        self.characters += sum([len(piece.text) for piece in pieces if piece.text is not None])

    def _listed(self, sources: Sequence[int], learned: Sequence[bool], roles: Sequence[int]) -> int:
        """The number of the first of some pieces, which are appended."""
        start = len(self.sources)
        self.sources += sources
        self.learned += learned
        self.roles += roles
        return start

    def _append(self, start: int, count: int, owner: int, mixed: Sequence[tuple[int, Sequence[int]]]) -> None:
        self.mixed += [(len(self.starts), place, parts) for place, parts in mixed]
        self.starts.append(start)
        self.counts.append(count)
        self.owners.append(owner)

    def _text(self, text: str) -> int:
        self.texts.append(text)
        return len(self.texts) - 1

    def _parts(self, text: str, lengths: tuple[int, ...]) -> list[int]:
        """The numbers of the parts of a text that is trained on in part."""
        boundaries = [0, *itertools.accumulate(lengths)]
        return [self._text(text[start:stop]) for start, stop in itertools.pairwise(boundaries)]

    def encode(self, encoder: Encoder) -> Sequences:
        """The arrays of all sequences."""
        texts, firsts = self.columns.joined(self.texts)
        distinct = texts.dictionary_encode()
        encoded, numbers = encoder.encode(distinct.dictionary), distinct.indices.to_numpy()
        counts, base = np.array(self.counts, np.int64), np.append(firsts, 0)[np.array(self.owners, np.int64)]
        starts = np.array(self.starts, np.int64)
        pieces = ranges(np.where(starts < 0, len(self.sources) - 1 - starts, starts), counts)
        sources = np.concatenate([np.array(self.sources, np.int64), *(~each.ids for each in self.tokenized)])[pieces]
        given = [each.learned for each in self.tokenized]
        learned = np.concatenate([np.array(self.learned, np.int8), *given])[pieces]
        roles = np.concatenate([np.array(self.roles, np.int8), *(each * ASSISTANT for each in given)])[pieces]
        is_text = sources >= 0
        sources[is_text] = numbers[(sources + np.repeat(base, counts))[is_text]]
        lengths = np.ones(len(sources), np.int64)
        lengths[is_text] = encoded.lengths[sources[is_text]]
        starts, ends = (np.append(0, np.cumsum(sizes)) for sizes in (lengths, counts))
        loss = np.repeat(learned, lengths)
        straddled = np.zeros(len(counts), np.int64)
        for number, place, parts in self.mixed:
            piece = int(ends[number]) + place
            whole, *split = [_document(encoded, each) for each in (sources[piece], *numbers[base[number] + parts])]
            loss[starts[piece] : starts[piece + 1]], doubtful = _learned_tokens(whole, split)
            straddled[number] += doubtful
        runs = _role_runs(starts, roles, np.repeat(np.arange(len(counts)), counts))
        return Sequences(_ids(encoded, sources), loss, starts[ends], *runs, straddled)


def _role_runs(starts: np.ndarray, roles: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the author changes, and the new author; pieces without tokens start no run. `owners` are the sequences of pieces."""
    filled = np.diff(starts) > 0
    owners, roles, places = owners[filled], roles[filled], starts[:-1][filled]
    first = np.ones(len(roles), np.bool_)
    first[1:] = (roles[1:] != roles[:-1]) | (owners[1:] != owners[:-1])
    return places[first], roles[first]


def _ids(encoded: Tokens, sources: np.ndarray) -> np.ndarray:
    """The ids of all pieces in order, int32 [tokens]: Arrow copies text by text, as bytes, so nothing is made per token."""
    controls, places = np.unique(-1 - sources[sources < 0], return_inverse=True)
    texts = len(encoded.offsets) - 1
    chosen = sources.copy()
    chosen[sources < 0] = texts + places
    offsets = np.concatenate([encoded.offsets, encoded.offsets[-1] + np.arange(1, len(controls) + 1)]) * ID_BYTES
    values = np.concatenate([encoded.ids, controls.astype(np.uint32)])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    strings = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
    content = strings.take(pa.array(chosen)).buffers()[2]
    return np.frombuffer(content or b"", np.int32)


def _document(encoded: Tokens, number: int) -> np.ndarray:
    return encoded.ids[encoded.offsets[number] : encoded.offsets[number + 1]]


def _learned_tokens(whole: np.ndarray, parts: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
    """Which tokens of a text are trained on, int8, and how many tokens contain a boundary.

    `parts` are its parts, untrained and trained in turn, each encoded alone. Where their tokens equal those of the
    whole, boundaries are exact; otherwise only tokens that agree from either end count.
    """
    flags = np.concatenate([np.full(len(part), number % 2, np.int8) for number, part in enumerate(parts)])
    joined = np.concatenate(parts)
    if np.array_equal(joined, whole):
        return flags, 0
    size = min(len(joined), len(whole))
    same_at_start = int(np.argmin(np.append(joined[:size] == whole[:size], False)))
    same_at_end = int(np.argmin(np.append(joined[::-1][:size] == whole[::-1][:size], False)))
    same_at_end = min(same_at_end, len(whole) - same_at_start)
    learned = np.zeros(len(whole), np.int8)
    learned[:same_at_start] = flags[:same_at_start]
    if same_at_end:
        learned[len(whole) - same_at_end :] = flags[len(joined) - same_at_end :]
    return learned, len(whole) - same_at_start - same_at_end
