"""The conversations that are measured on: the corpus' text, cut into messages as long as those of chat datasets.

Lengths of messages are lognormal (median 900 characters, sigma 0.9; 1,350 on average). A conversation has one to six
user turns, four in five of them one to three, and three in ten have a system message. `reasoning` gives every message
of the assistant twice as much again as `reasoning_content`. The text runs on from document to document, a message ends
where a word does, and no text is used twice: equal messages (system prompts, in real data) would flatter a program that
encodes equal texts once. Left out are documents that spell control tokens or tags of reasoning, for these mean different
things to different programs (see `sft_speed`). The same corpus gives the same bytes, a fifth of its size, in a second or
two, so they are written anew every time.

For `long_conversations` there are conversations of one number of turns, of the same text, in shorter messages.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import Literal

import orjson

from bench import corpus
from bench.bench import Bench
from bench.corpus import Corpus

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
MARKUP = re.compile(r"<\|[^|\s]{1,40}\|>|</?think>")


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
        messages = [{"role": "system", "content": self.text()}] if system else []
        for _ in range(turns):
            messages += [{"role": "user", "content": self.text()}, self._answer()]
        return orjson.dumps({"messages": messages}) + b"\n"

    def text(self) -> str:
        """The text of a message. Raises EOFError where there is no more."""
        return self.tape.take(self._size())

    def conversations(self) -> Iterator[bytes]:
        """Conversations like those of chat datasets, until the text ends."""
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
    """The conversations of this run."""
    path, size = bench.folder / f"chat_{variant}.jsonl", int(bench.megabytes * 1_000_000 * SHARE)
    return write(path, until(size, Writer(tape(bench), variant).conversations()))


def leading(whole: Corpus, size: int) -> Corpus:
    """The first conversations, `size` bytes at most."""
    return write(_beside(whole, "leading"), until(size, _lines(whole)))


def one_conversation(whole: Corpus) -> Corpus:
    """The first conversation alone: what a process costs before its work."""
    return write(_beside(whole, "one"), islice(_lines(whole), 1))


def of_turns(bench: Bench, path: Path, variant: Variant, turns: int, number: int) -> Corpus:
    """`number` conversations of `turns` user turns each, in short messages, written to `path`.

    Raises EOFError where the text of the whole corpus is not enough for them.
    """
    writer = Writer(tape(bench), variant, SHORT_MEDIAN)
    return write(path, (writer.conversation(turns, system=False) for _ in range(number)))


def tape(bench: Bench) -> Tape:
    """The text of the whole corpus."""
    texts = (orjson.loads(line)["text"] for line in _lines(corpus.build(bench.folder)))
    return Tape(text for text in texts if not MARKUP.search(text))


def _lines(kept: Corpus) -> Iterator[bytes]:
    with Path(kept.path).open("rb") as lines:
        yield from lines


def until(size: int, lines: Iterator[bytes]) -> Iterator[bytes]:
    """The first lines, `size` bytes at most."""
    for line in lines:
        size -= len(line)
        if size < 0:
            return
        yield line


def _beside(whole: Corpus, name: str) -> Path:
    path = Path(whole.path)
    return path.with_stem(f"{path.stem}_{name}")


def write(path: Path, lines: Iterable[bytes]) -> Corpus:
    """Write lines to a file."""
    size = conversations = 0
    with path.open("wb") as out:
        for line in lines:
            size += out.write(line)
            conversations += 1
    return Corpus(str(path), size, conversations)
