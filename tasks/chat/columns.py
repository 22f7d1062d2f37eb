"""The texts of many conversations of programs at once: literals of the template joined with values of the conversations.

Arrow copies all of them in one go, some 5 GB/s, so nothing is made per text.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa


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
