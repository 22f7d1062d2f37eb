"""What a run of benchmarks shares: where it keeps things, how much text it uses, and which vocabularies.

Set from the environment: `BENCH_MEGABYTES` (500), `BENCH_TOKENIZERS` (o200k_harmony,deepseek), `BENCH_DOCUMENTS`
(1000000, of deduplication) and `BENCH_FOLDER` (build/bench). Corpus and vocabularies are kept there, and every measured output is
written there and removed again, so that all sides write to the same disk.
"""

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import child, corpus
from bench.corpus import Corpus


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer folder, the id that ends a document, and what our commands are told: a name where there is one."""

    folder: str
    eod: int
    ours: str


NAMED = {"o200k_harmony"}
"""Vocabularies that tokenmill ships; the peer reads the same one from a converted tokenizer.json."""


@cache
def _vocabulary(directory: Path, name: str) -> Vocabulary:
    """Made in a process of its own, because the one that measures has to stay small (see `child.Child`)."""
    made = child.python("tests.peers.vocabularies", name, directory)
    facts = json.loads(made.stdout)
    return Vocabulary(**facts, ours=name if name in NAMED else facts["folder"])


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings of one run. `megabytes` is in units of 10^6 bytes."""

    folder: Path
    megabytes: int
    tokenizers: tuple[str, ...]

    @classmethod
    def from_environment(cls) -> "Bench":
        """The settings that the environment asks for."""
        names = os.environ.get("BENCH_TOKENIZERS", "o200k_harmony,deepseek")
        folder = child.ROOT / os.environ.get("BENCH_FOLDER", "build/bench")
        return cls(folder, int(os.environ.get("BENCH_MEGABYTES", "500")), tuple(names.split(",")))

    def corpus(self, share: float = 1.0) -> Corpus:
        """The text of this run, or its leading share."""
        return corpus.first(corpus.build(self.folder), int(self.megabytes * 1_000_000 * share))

    def one_document(self) -> Corpus:
        """A corpus of the first document alone: what a process costs before its work."""
        with Path(self.corpus().path).open("rb") as lines:
            line = next(lines)
        path = self.folder / "one_document.jsonl"
        path.write_bytes(line)
        return Corpus(str(path), len(line), 1)

    def vocabulary(self, name: str) -> Vocabulary:
        """One of `tests/peers/vocabularies.py`, made if it is missing."""
        return _vocabulary(self.folder / "vocabularies", name)

    @contextmanager
    def scratch(self) -> Generator[Path]:
        """A folder for the output of one measurement, gone afterwards."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=self.folder) as folder:
            yield Path(folder)
