"""Peak memory of one worker on 100 MB of text, and on ten times as much, for pretraining and for SFT.

Rows stream in batches, so ten times the text may need no more than a tenth more memory: for the index, and for what the engine
remembers of the words that it has seen. Real text that is ten times as long has other words, too, so the longer corpus is the whole
corpus, and then the whole corpus again with other letters. The peak is the largest resident set that the kernel saw.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

import orjson

from bench import chat_corpus, child, corpus
from bench.bench import Bench
from bench.chat_corpus import Tape, Writer
from bench.corpus import Corpus
from bench.record import Measure

TARGET = 1.1
SMALL, TIMES = 0.2, 10
"""The share of the asked size that the smaller text has, and how much more the larger one has."""

OTHER_LETTERS = str.maketrans(
    ascii_lowercase + ascii_uppercase,
    ascii_lowercase[13:] + ascii_lowercase[:13] + ascii_uppercase[13:] + ascii_uppercase[:13],
)


def measure(bench: Bench) -> list[Measure]:
    """Rows for pretraining and SFT, with the first vocabulary."""
    sizes = [int(bench.megabytes * 1_000_000 * SMALL) * times for times in (1, TIMES)]
    texts = [chat_corpus.write(bench.folder / f"memory_text_{number}.jsonl", chat_corpus.until(size, _documents(bench)))
             for number, size in enumerate(sizes)]  # fmt: skip
    chats = [chat_corpus.write(bench.folder / f"memory_chat_{number}.jsonl", chat_corpus.until(size, _chats(bench)))
             for number, size in enumerate(sizes)]  # fmt: skip
    return [_compare(bench, "pretrain", *texts), _compare(bench, "sft", *chats)]


def _documents(bench: Bench) -> Iterator[bytes]:
    whole = Path(corpus.build(bench.folder).path)
    with whole.open("rb") as lines:
        yield from lines
    with whole.open("rb") as lines:
        for line in lines:
            yield orjson.dumps({"text": orjson.loads(line)["text"].translate(OTHER_LETTERS)}) + b"\n"


def _chats(bench: Bench) -> Iterator[bytes]:
    texts = (orjson.loads(line)["text"] for line in _documents(bench))
    return Writer(Tape(text for text in texts if not chat_corpus.MARKUP.search(text)), "plain").conversations()


def _compare(bench: Bench, kind: str, small: Corpus, large: Corpus) -> Measure:
    low, high = (_worker(bench, kind, each) for each in (small, large))
    shown = [
        f"{run['peak_bytes'] / 1e6:.0f} MB for {each.size / 1e6:,.0f} MB" for run, each in ((high, large), (low, small))
    ]
    facts = {"bytes": [small.size, large.size], "runs": [low, high]}
    ratio = high["peak_bytes"] / low["peak_bytes"]
    return Measure(f"memory of a worker, {kind}", *shown, ratio, "x", TARGET, at_least=False, facts=facts)


def _worker(bench: Bench, kind: str, text: Corpus) -> dict[str, float]:
    with bench.scratch() as out:
        name = bench.vocabulary(bench.tokenizers[0]).ours
        return json.loads(child.python("bench.memory_worker", kind, text.path, name, out).stdout)
