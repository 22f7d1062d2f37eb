"""Renderings to arrays of tokens, loss mask and roles.

A rendering is cut into segments: control tokens, which are ids, and the text between them, each trained on or not. Text between
control tokens is encoded as a whole, except where generation begins, because a server encodes its prompt separately from the
answer. Where a loss boundary is inside such a text, its segments are encoded as well; tokens on which the two disagree are
counted and not trained on.

Each distinct text of a batch is encoded once, so the cost of a long conversation is linear even if its sequences repeat it.
Placing ids takes 3 ns per token. Program sequences (`programs`) are a layout and its values, without an object per
segment: literals of the template are joined with values of many conversations at once by Arrow, about 5 GB/s.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
from tokenmill.tasks.tokenize.encoders import Encoder, Tokens

from .controls import Controls
from .conversation import Range, Role


@dataclass(frozen=True, slots=True, eq=False)
class TextTable:
    """How the texts of a program are made: text i is joined of the next `counts[i]` of the `parts`.

    A part is the number of a value in the conversation, or -1 - n for literal n.
    """

    literals: Sequence[str]
    parts: Sequence[int]
    counts: Sequence[int]

    def texts(self, values: Sequence[str]) -> list[str]:
        parts = iter([values[part] if part >= 0 else self.literals[-1 - part] for part in self.parts])
        return ["".join(itertools.islice(parts, count)) for count in self.counts]


@dataclass(slots=True)
class Columns:
    """The values of conversations; conversation i fills table `which[i]` with those from number `firsts[i]` on."""

    values: list[str] = field(default_factory=list[str])
    tables: dict[TextTable, int] = field(default_factory=dict[TextTable, int])
    which: list[int] = field(default_factory=list[int])
    firsts: list[int] = field(default_factory=list[int])
    _last: Sequence[str] | None = None

    def add(self, table: TextTable, values: Sequence[str]) -> int:
        """Return the number of the conversation with these values; the last one may be added again."""
        if values is not self._last:
            self._last = values
            self.which.append(self.tables.setdefault(table, len(self.tables)))
            self.firsts.append(len(self.values))
            self.values += values
        return len(self.firsts) - 1

    def joined(self, others: Sequence[str]) -> tuple[pa.LargeStringArray, np.ndarray]:
        """Return `others` and, after them, the texts of all conversations, and where each conversation's texts begin, int64."""
        if not self.firsts:
            return pa.array(others, pa.large_string()), np.empty(0, np.int64)
        # One string array has all pieces: others, literals of all tables, values; texts are lists of numbers into it.
        which, tables = np.array(self.which), list(self.tables)
        literals = [literal for table in tables for literal in table.literals]
        parts, counts = _Lists.of([table.parts for table in tables]), _Lists.of([table.counts for table in tables])
        literal = len(others) + np.repeat(_before(np.array([len(table.literals) for table in tables])), parts.sizes)
        value = len(others) + len(literals) + np.repeat(np.array(self.firsts), parts.sizes[which])
        chosen = parts.numbers(which)
        numbers = parts.values[chosen]
        # A negative number is a literal of the conversation's table, any other a value of the conversation.
        numbers = np.where(numbers < 0, literal[chosen] - 1 - numbers, value + numbers)
        # Taking puts the pieces of a text side by side, so its characters are those between the outer bounds.
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
    """Return the numbers `[start, start + count)` of each pair, one after the other, int64."""
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


class Segment(NamedTuple):
    """A control token (`token` is its id, `text` None) or a text: by one author, and trained on or not.

    Texts in a row are encoded as one, up to one that `breaks`.
    """

    text: str | None
    token: int
    role: int
    trained: bool
    breaks: bool = False


Segments = list[Segment]


def runs(segments: Iterable[Segment]) -> list[Segments]:
    """Return the segments that are encoded together: each control token, and the texts in a row up to one that breaks."""
    found: list[Segments] = []
    in_text = False
    for segment in segments:
        if in_text and segment.text is not None and not segment.breaks:
            found[-1].append(segment)
        else:
            found.append([segment])
        in_text = segment.text is not None
    return found


def text_of_run(run: Segments) -> str:
    """Return the text that is encoded for a run of texts."""
    return (run[0].text or "") if len(run) == 1 else "".join([segment.text or "" for segment in run])


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The runs of a sequence without the content of their texts.

    The first lists have an entry per run: `sources` is the number of a text in the table of its program, or -1 - id for a control
    token; `trained`, `roles` and `breaks` are as in Segment. `mixed` lists the runs of several segments: the run, the numbers of the
    segments' texts, and whether each is trained on. Its texts, each once, have `literal` constant characters and `values`.
    """

    sources: Sequence[int]
    trained: Sequence[bool]
    roles: Sequence[int]
    breaks: Sequence[bool]
    mixed: Sequence[tuple[int, Sequence[int], Sequence[bool]]]
    literal: int
    values: Sequence[int]


class Filled(NamedTuple):
    """A sequence of a program: its layout, the table of its texts, and the values of its conversation in these."""

    layout: Layout
    table: TextTable
    values: Sequence[str]

    def segments(self) -> Segments:
        layout, texts = self.layout, self.table.texts(self.values)
        mixed = {place: list(zip(parts, trained, strict=True)) for place, parts, trained in layout.mixed}
        found: Segments = []
        for place, (source, trained) in enumerate(zip(layout.sources, layout.trained, strict=True)):
            role, breaks = layout.roles[place], layout.breaks[place]
            if source < 0:
                found.append(Segment(None, -1 - source, role, trained, breaks))
                continue
            for part, part_trained in mixed.get(place, [(source, trained)]):
                found.append(Segment(texts[part], -1, role, part_trained, breaks))
                breaks = False
        return found


class Tokenized(NamedTuple):
    """A sequence of a row that is tokenized already: `ids` int32 and `trained` int8, an entry per token, not shifted.

    Who wrote its tokens isn't known: those that are trained on count as the assistant's, and others as the template's. `unread`
    names fields of the row that aren't read.
    """

    ids: np.ndarray
    trained: np.ndarray
    unread: tuple[str, ...]


class Passage(NamedTuple):
    """Part of a rendering: its end (it begins where the previous one ends), its author, the characters trained on, and
    where generation begins (-1: nowhere).
    """

    stop: int
    role: int
    trained: Sequence[Range] = ()
    generation: int = -1


def cut(text: str, passages: Sequence[Passage], controls: Controls) -> list[Segments]:
    """Return the segments of each passage of a rendering, in order, without empty texts. The last passage ends the text."""
    groups: list[Segments] = [[] for _ in passages]
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
                is_trained = _covered(passage.trained, place, end)
                group.append(_segment(None, controls.ids[found], passage.role, is_trained))
                place = end
            else:
                stop = min(end, passage.stop)
                group += _cut_text(found if stop - place == len(found) else text[place:stop], place, passage)
                place = stop
    return groups


# Control tokens, and the line end that most templates write after every message, are segments that occur all the time.
_segment = lru_cache(maxsize=4096)(Segment)


def _cut_text(text: str, place: int, passage: Passage) -> Segments:
    """A text without control tokens, split where generation begins, and where training begins or ends."""
    _, role, trained, generation = passage
    if not trained and generation < 0:
        return [_segment(text, -1, role, False) if text == "\n" else Segment(text, -1, role, False)]
    stop = place + len(text)
    # Most texts of an answer: trained on as a whole.
    if not place < generation < stop and len(trained) == 1 and trained[0][0] <= place and stop <= trained[0][1]:
        return [Segment(text, -1, role, True, place == generation)]
    borders = {place, stop, generation, *itertools.chain.from_iterable(trained)}
    inside = sorted(border for border in borders if place <= border <= stop)
    return [
        Segment(text[a - place : b - place], -1, role, _covered(trained, a, b), a == generation)
        for a, b in itertools.pairwise(inside)
    ]


def _covered(ranges: Sequence[Range], start: int, stop: int) -> bool:
    return any(first <= start and stop <= last for first, last in ranges)


def connected(passages: Iterable[Segments]) -> Segments:
    """Return the segments of consecutive passages. Texts that meet are encoded as one, so all of a run are by the author of its first."""
    segments: Segments = []
    for passage in passages:
        for number, segment in enumerate(passage):
            last = segments[-1] if segments else segment
            if last.text is None or segment.text is None or segment.breaks or not segments:
                segments.append(segment)
            elif number == 0 and last.trained == segment.trained:
                segments[-1] = last._replace(text=last.text + segment.text)
            else:
                segments.append(segment._replace(role=last.role))
    return segments


@dataclass(frozen=True, slots=True)
class Sequences:
    """Encoded sequences, back to back; sequence i is `[offsets[i], offsets[i + 1])`.

    `ids` int32 [tokens]; `trained` int8 [tokens], 1 where the token itself is to be predicted (not shifted); `offsets`
    int64 [sequences + 1]. Roles are runs: from token `role_starts[j]` (int64, counted over the batch) on, tokens are by
    `roles[j]` (int8, see ROLES); every sequence begins a run. `straddled` int64 [sequences] counts tokens that contain a loss
    boundary, which are not trained on.
    """

    ids: np.ndarray
    trained: np.ndarray
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

    The runs of each rendered sequence and of each layout are listed once, in `sources`, `trained` and `roles`: sequence i has
    `counts[i]` of them, from number `starts[i]` on. Its texts are numbered within conversation `owners[i]` of `columns`, or, if that
    is -1, in `texts`. `mixed` lists the runs of several segments: the sequence, the run in it, the numbers of the segments' texts, and
    whether each is trained on. `tokenized` sequences have a run per token, listed after all others: if `starts[i]` is -1 - n, from
    number n of these on. `characters` counts the characters in the texts of all sequences, and tokens of `tokenized`.
    """

    texts: list[str] = field(default_factory=list[str])
    columns: Columns = field(default_factory=Columns)
    sources: list[int] = field(default_factory=list[int])
    trained: list[bool] = field(default_factory=list[bool])
    roles: list[int] = field(default_factory=list[int])
    starts: list[int] = field(default_factory=list[int])
    counts: list[int] = field(default_factory=list[int])
    owners: list[int] = field(default_factory=list[int])
    mixed: list[tuple[int, int, Sequence[int], Sequence[bool]]] = field(default_factory=list[Any])
    tokenized: list[Tokenized] = field(default_factory=list[Tokenized])
    characters: int = 0
    _tokens: int = 0
    _layouts: dict[Layout, int] = field(default_factory=dict[Layout, int])

    def add(self, sequence: Segments | Filled | Tokenized) -> None:
        if isinstance(sequence, Filled):
            layout, table, values = sequence
            # Runs of a layout are listed once for all conversations of its shape.
            start = self._layouts.get(layout)
            if start is None:
                start = self._layouts[layout] = self._list(layout.sources, layout.trained, layout.roles)
            self._append(start, len(layout.sources), self.columns.add(table, values), layout.mixed)
            self.characters += layout.literal + sum([len(values[number]) for number in layout.values])
        elif isinstance(sequence, Tokenized):
            self._append(-1 - self._tokens, len(sequence.ids), -1, ())
            self.tokenized.append(sequence)
            self._tokens += len(sequence.ids)
            self.characters += len(sequence.ids)
        else:
            found = runs(sequence)
            sources = [-1 - run[0].token if run[0].text is None else self._text(text_of_run(run)) for run in found]
            mixed = [
                (place, [self._text(each.text or "") for each in run], [each.trained for each in run])
                for place, run in enumerate(found)
                if len(run) > 1
            ]
            start = self._list(sources, [run[0].trained for run in found], [run[0].role for run in found])
            self._append(start, len(sources), -1, mixed)
            self.characters += sum([len(each.text) for each in sequence if each.text is not None])

    def _list(self, sources: Sequence[int], trained: Sequence[bool], roles: Sequence[int]) -> int:
        """List some runs, and return the number of the first."""
        start = len(self.sources)
        self.sources += sources
        self.trained += trained
        self.roles += roles
        return start

    def _append(
        self, start: int, count: int, owner: int, mixed: Sequence[tuple[int, Sequence[int], Sequence[bool]]]
    ) -> None:
        self.mixed += [(len(self.starts), *each) for each in mixed]
        self.starts.append(start)
        self.counts.append(count)
        self.owners.append(owner)

    def _text(self, text: str) -> int:
        self.texts.append(text)
        return len(self.texts) - 1

    def encode(self, encoder: Encoder) -> Sequences:
        texts, firsts = self.columns.joined(self.texts)
        # Sequences of one conversation repeat its history: each distinct text is encoded once.
        distinct = texts.dictionary_encode()
        encoded, numbers = encoder.encode(distinct.dictionary), distinct.indices.to_numpy()
        counts, base = np.array(self.counts, np.int64), np.append(firsts, 0)[np.array(self.owners, np.int64)]
        starts = np.array(self.starts, np.int64)
        listed = ranges(np.where(starts < 0, len(self.sources) - 1 - starts, starts), counts)
        # From here on, a run is the number of its distinct text, or ~id.
        sources = np.concatenate([np.array(self.sources, np.int64), *(~each.ids for each in self.tokenized)])[listed]
        given = [each.trained for each in self.tokenized]
        flags = np.concatenate([np.array(self.trained, np.int8), *given])[listed]
        roles = np.concatenate([np.array(self.roles, np.int8), *(each * ASSISTANT for each in given)])[listed]
        is_text = sources >= 0
        sources[is_text] = numbers[(sources + np.repeat(base, counts))[is_text]]
        lengths = np.ones(len(sources), np.int64)
        lengths[is_text] = encoded.lengths[sources[is_text]]
        starts, ends = (np.append(0, np.cumsum(sizes)) for sizes in (lengths, counts))
        trained = np.repeat(flags, lengths)
        straddled = np.zeros(len(counts), np.int64)
        # Few texts hold a loss boundary; for these, tokens of the parts are compared with tokens of the whole.
        for number, place, parts, wanted in self.mixed:
            run = int(ends[number]) + place
            texts = (sources[run], *numbers[base[number] + parts])
            whole, *split = [encoded.ids[encoded.offsets[each] : encoded.offsets[each + 1]] for each in texts]
            trained[starts[run] : starts[run + 1]], doubtful = _trained_tokens(whole, split, wanted)
            straddled[number] += doubtful
        # an author's tokens begin where the author or the sequence changes; runs without tokens begin none
        owners = np.repeat(np.arange(len(counts)), counts)
        filled = np.diff(starts) > 0
        owners, roles, places = owners[filled], roles[filled], starts[:-1][filled]
        first = np.ones(len(roles), np.bool_)
        first[1:] = (roles[1:] != roles[:-1]) | (owners[1:] != owners[:-1])
        by_role = places[first], roles[first]
        return Sequences(_ids(encoded, sources), trained, starts[ends], *by_role, straddled)


def _ids(encoded: Tokens, sources: np.ndarray) -> np.ndarray:
    """The ids of all runs in order, int32 [tokens]: Arrow copies text by text, as bytes, so nothing is made per token."""
    # Each control token becomes a text of one token, behind all others.
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


def _trained_tokens(whole: np.ndarray, parts: Sequence[np.ndarray], trained: Sequence[bool]) -> tuple[np.ndarray, int]:
    """Which tokens of a run of texts are trained on, int8, and how many tokens contain a boundary.

    `parts` are the tokens of each text encoded separately. Where they equal the tokens of the whole, boundaries are exact; otherwise only
    tokens that agree from either end count.
    """
    flags = np.repeat(np.array(trained, np.int8), [len(part) for part in parts])
    joined = np.concatenate(parts)
    if np.array_equal(joined, whole):
        return flags, 0
    size = min(len(joined), len(whole))
    same_at_start = int(np.argmin(np.append(joined[:size] == whole[:size], False)))
    same_at_end = int(np.argmin(np.append(joined[::-1][:size] == whole[::-1][:size], False)))
    # A repeated token must not count from both ends.
    same_at_end = min(same_at_end, len(whole) - same_at_start)
    found = np.zeros(len(whole), np.int8)
    found[:same_at_start] = flags[:same_at_start]
    if same_at_end:
        found[len(whole) - same_at_end :] = flags[len(joined) - same_at_end :]
    return found, len(whole) - same_at_start - same_at_end
