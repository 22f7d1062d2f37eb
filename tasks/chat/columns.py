"""The texts of many conversations of programs at once: literals of the template joined with contents from Arrow columns.

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

    A part is the number of a content of the conversation, or -1 - n for literal n.
    """

    literals: Sequence[str]
    parts: Sequence[int]
    counts: Sequence[int]


@dataclass(slots=True)
class Columns:
    """Conversations whose contents are in columns.

    Conversation i has the texts of table `which[i]`, and its contents are those of all columns from number `firsts[i]` on.
    """

    columns: list[pa.LargeStringArray] = field(default_factory=list[pa.LargeStringArray])
    tables: dict[Table, int] = field(default_factory=dict[Table, int])
    which: list[int] = field(default_factory=list[int])
    firsts: list[int] = field(default_factory=list[int])
    _before: int = 0

    def add(self, table: Table, column: pa.LargeStringArray, first: int) -> int:
        """The number of the conversation whose contents begin at `first` of a column; the last one may be added again."""
        if not self.columns or self.columns[-1] is not column:
            self._before = sum(map(len, self.columns))
            self.columns.append(column)
        first += self._before
        if not self.firsts or self.firsts[-1] != first:
            self.which.append(self.tables.setdefault(table, len(self.tables)))
            self.firsts.append(first)
        return len(self.firsts) - 1

    def joined(self, others: pa.LargeStringArray) -> tuple[pa.LargeStringArray, np.ndarray]:
        """`others` and, after them, the texts of all conversations; and where those of each conversation begin, int64."""
        if not self.firsts:
            return others, np.empty(0, np.int64)
        which, tables = np.asarray(self.which), list(self.tables)
        literals = [literal for table in tables for literal in table.literals]
        strings = pa.concat_arrays([others, pa.array(literals, pa.large_string()), *self.columns])
        parts, counts = _Lists.of([table.parts for table in tables]), _Lists.of([table.counts for table in tables])
        literal = len(others) + np.repeat(_before(np.array([len(table.literals) for table in tables])), parts.sizes)
        content = np.repeat(len(others) + len(literals) + np.asarray(self.firsts), parts.sizes[which])
        chosen = parts.numbers(which)
        numbers = parts.values[chosen]
        numbers = np.where(numbers < 0, literal[chosen] - 1 - numbers, content + numbers)
        taken = strings.take(pa.array(np.append(np.arange(len(others)), numbers)))
        ends = np.cumsum(np.append(np.ones(len(others), np.int64), counts.values[counts.numbers(which)]))
        _, bounds, characters = taken.buffers()
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
