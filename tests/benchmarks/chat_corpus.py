"""The conversations that are measured on: the corpus' text, cut into messages as long as those of chat data sets.

Lengths of messages are lognormal (median 900 characters, sigma 0.9; 1,350 on average), which is how assistants'
answers and what people paste are distributed; a conversation has one to six user turns, four in five of them one to
three, and three in ten have a system message. `reasoning` gives every assistant message twice as much again as
`reasoning_content`. The text runs from document to document and every character is used once: messages that repeat
would flatter a program that encodes equal texts once, and real ones do repeat (system prompts), so that ours is a bit
faster than shown. A message ends where a word does. Seeded, so the same corpus gives the same bytes; a fifth of its
size by default.

For `long_conversations` there are conversations of one number of turns, of the same text, with shorter messages.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson

from tests.benchmarks import corpus
from tests.benchmarks.bench import Bench
from tests.benchmarks.corpus import ASKED, Corpus

Variant = Literal["plain", "reasoning"]
VARIANTS: tuple[Variant, ...] = ("plain", "reasoning")

SHARE = 0.2
"""Of the text corpus' size."""

TURNS, TURN_WEIGHTS = (1, 2, 3, 4, 5, 6), (40, 25, 15, 10, 6, 4)
WITH_SYSTEM = 0.3
MEDIAN, SIGMA = 900, 0.9
REASONING = 2
"""Characters of reasoning for one of the answer."""

MOST_ADDED = 200
"""Characters that a message grows by at most until a word ends."""

SPACE = re.compile(r"\s")


@dataclass(slots=True)
class Tape:
    """All the text, from the first document to the last, handed out a message at a time."""

    documents: Iterator[str]
    text: str = ""
    place: int = 0

    def take(self, size: int) -> str:
        """The next `size` characters and the rest of the word, without white space around them; never empty.

        Raises StopIteration where the text ends.
        """
        while True:
            while len(self.text) - self.place < size + MOST_ADDED:
                self.text = f"{self.text[self.place :]}\n{next(self.documents)}"
                self.place = 0
            stop = self.place + size
            found = SPACE.search(self.text, stop, stop + MOST_ADDED)
            start, self.place = self.place, found.start() if found else stop
            if message := self.text[start : self.place].strip():
                return message


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes conversations with text from a tape; `median` is of the characters of a message."""

    tape: Tape
    variant: Variant
    median: float
    random: random.Random

    def conversation(self, turns: int, *, system: bool) -> bytes:
        """A line of JSON. Raises StopIteration where the text ends."""
        messages = [{"role": "system", "content": self.tape.take(self._size())}] if system else []
        for _ in range(turns):
            messages += [{"role": "user", "content": self.tape.take(self._size())}, self._answer()]
        return orjson.dumps({"messages": messages}) + b"\n"

    def _answer(self) -> dict[str, str]:
        size = self._size()
        answer = {"role": "assistant", "content": self.tape.take(size)}
        return answer | ({"reasoning_content": self.tape.take(REASONING * size)} if self.variant == "reasoning" else {})

    def _size(self) -> int:
        return 1 + int(self.median * self.random.lognormvariate(0, SIGMA))


def build(bench: Bench, variant: Variant) -> Corpus:
    """The conversations of this run: the leading ones of those kept in the folder, which are made if missing."""
    whole = corpus.build(bench.folder)
    kept = corpus.kept(
        bench.folder / f"chat_{variant}" / "corpus.jsonl",
        lambda: corpus.until(int(ASKED * SHARE), _conversations(_writer(whole, variant, MEDIAN))),
    )
    return corpus.first(kept, int(bench.megabytes * 1_000_000 * SHARE))
