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

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

import orjson

from tests.benchmarks import corpus
from tests.benchmarks.bench import Bench
from tests.benchmarks.corpus import ASKED, Corpus, _kept, _lines, _until

Variant = Literal["plain", "reasoning"]
VARIANTS: tuple[Variant, ...] = ("plain", "reasoning")

SHARE = 0.2
"""Of the text corpus' size."""

TURNS, TURN_WEIGHTS = (1, 2, 3, 4, 5, 6), (40, 25, 15, 10, 6, 4)
WITH_SYSTEM = 0.3
MEDIAN, SHORT_MEDIAN, SIGMA = 900, 120, 0.9
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
        """The next `size` characters and the rest of the word, without white space around them, if any is left.

        Raises EOFError where the text ends.
        """
        message = ""
        while not message:
            self._reach(self.place + size + MOST_ADDED)
            stop = self.place + size
            space = SPACE.search(self.text, stop, stop + MOST_ADDED)
            start, self.place = self.place, space.start() if space else stop
            message = self.text[start : self.place].strip()
        return message

    def _reach(self, place: int) -> None:
        while len(self.text) < place:
            document = next(self.documents, None)
            if document is None:
                raise EOFError("the corpus has no more text")
            place -= self.place
            self.text, self.place = f"{self.text[self.place :]}\n{document}", 0


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes conversations with text from a tape; `median` is the characters of half of the messages."""

    tape: Tape
    variant: Variant
    median: int = MEDIAN
    random: Random = field(default_factory=lambda: Random(0))

    def conversation(self, turns: int, *, system: bool) -> bytes:
        """A conversation of some user turns as a line of JSON. Raises EOFError where the text ends."""
        messages = [{"role": "system", "content": self.tape.take(self._size())}] if system else []
        for _ in range(turns):
            messages += [{"role": "user", "content": self.tape.take(self._size())}, self._answer()]
        return orjson.dumps({"messages": messages}) + b"\n"

    def conversations(self) -> Iterator[bytes]:
        """Conversations like those of chat data sets, until the text ends."""
        with suppress(EOFError):
            while True:
                (turns,) = self.random.choices(TURNS, TURN_WEIGHTS)
                yield self.conversation(turns, system=self.random.random() < WITH_SYSTEM)

    def _answer(self) -> dict[str, str]:
        size = self._size()
        answer = {"role": "assistant", "content": self.tape.take(size)}
        if self.variant == "reasoning":
            answer["reasoning_content"] = self.tape.take(REASONING * size)
        return answer

    def _size(self) -> int:
        return 1 + int(self.median * self.random.lognormvariate(0, SIGMA))


def build(bench: Bench, variant: Variant) -> Corpus:
    """The conversations of this run: the leading ones of those kept in the bench folder, which are made if missing."""
    text = corpus.build(bench.folder)
    path = bench.folder / f"chat_{variant}" / "corpus.jsonl"
    whole = _kept(path, lambda: _until(int(ASKED * SHARE), Writer(_tape(text), variant).conversations()))
    return corpus.first(whole, int(bench.megabytes * 1_000_000 * SHARE))


def one_conversation(whole: Corpus) -> Corpus:
    """A corpus of the first conversation alone: what a process costs before its work."""
    with Path(whole.path).open("rb") as lines:
        line = next(lines)
    path = Path(whole.path).with_name("one_conversation.jsonl")
    path.write_bytes(line)
    return Corpus(str(path), len(line), 1)


def of_turns(bench: Bench, path: Path, variant: Variant, turns: int, number: int) -> Corpus:
    """`number` conversations of `turns` user turns each, with short messages, written to `path`."""
    writer = Writer(_tape(corpus.build(bench.folder)), variant, SHORT_MEDIAN)
    with path.open("wb") as out:
        size = sum(out.write(writer.conversation(turns, system=False)) for _ in range(number))
    return Corpus(str(path), size, number)


def _tape(text: Corpus) -> Tape:
    return Tape(orjson.loads(line)["text"] for line in _lines(Path(text.path)))
