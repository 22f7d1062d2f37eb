"""The exactness gate: an engine is used only if it equals the reference on test strings and on the data.

Before a dataset is tokenized, an engine's exact encoder (`exact`) and the reference encode the same texts: strings that break
tokenizers (every control string of the vocabulary, runs of one character, combining marks, new emoji, rare scripts, all
whitespace), and documents from the beginning, middle and end of the dataset. The first engine that passes is used.

The exact encoder already sends documents with suspect characters to the reference. Any remaining difference has an unknown
cause, which may affect any document. If no engine passes, the reference encodes the whole dataset, a hundred times slower.
The plan, the manifest and every receipt record this, because the backend is part of a shard's identity.

The reference takes half a second to load and encodes 3 MB/s, so a verdict is cached in the store, keyed by the texts and the
versions of the libraries: an unchanged dataset is checked once.

Of the engines that pass, the fastest encodes a large dataset. It depends on the vocabulary, the processor and the size of the
dataset, because engines take 0.3 to 3 s to load. Speeds are cached per user and machine and are part of no shard's identity: all
engines that pass the gate give the same ids. A race costs up to 5 s, once, and a good choice saves a third of the encoding. So
datasets with less than RACE_FROM left to encode use the first engine.
"""

import hashlib
import itertools
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any
from unicodedata import normalize

import numpy as np
import orjson
import pyarrow as pa
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.progress import explained
from tokenmill.tasks.shards.store import remembered
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.formats import read_texts
from tokenmill.tasks.storage import join, user_cache

from .added import SPACES
from .encoders import ENGINES, Tokens
from .exact import LIBRARIES, exact_encoder
from .settings import Backend, Engine
from .sweep import SWEEP_VERSION
from .vocabulary import Vocabulary

SAMPLED_DOCUMENTS = 16
SAMPLED_CHARACTERS = 16_384
"""Per sampled slice; three slices of 16 documents cost the reference at most a quarter of a second."""

ADDED_TOKENS_TRIED = 2_000

RACE_FROM = 256_000_000
"""Bytes of source left to encode from which a race pays off."""

COURSE = 16_000_000
"""Characters that each engine encodes, as it would at the beginning of a shard: without a warm cache."""

BATCH = 1_000_000
"""Characters per call."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The backend, and why engines before it in ENGINES were rejected."""

    backend: Backend
    refused: Mapping[Engine, str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The number of texts that an engine and the reference encoded, and the first difference, or None."""

    texts: int
    difference: str | None


def gate_notes(verdicts: Mapping[str, Verdict]) -> dict[str, str]:
    """Human-readable reasons why datasets (by `split/name`) are not encoded by the first engine."""
    notes: dict[str, str] = {}
    for name, verdict in verdicts.items():
        if verdict.refused:
            used = "the reference tokenizer" if verdict.backend == "reference" else verdict.backend
            notes[name] = "; ".join(
                [f"{used} is used", *(f"{engine} {why}" for engine, why in verdict.refused.items())]
            )
    return notes


Documents = Callable[[Slice], Iterator[str]]
"""Gives the texts to encode of a slice, in order."""


@dataclass(frozen=True)
class Gate:
    """Compares engines with the reference on the texts of a dataset made of `slices`; results are cached in the store.

    `which` names the texts that `documents` reads from a row; it is part of the cache key.
    """

    vocabulary: Vocabulary
    slices: Sequence[Slice]
    documents: Documents
    which: str
    store: str
    literal: bool

    def verdict(self) -> Verdict:
        """Return the first engine that equals the reference, or the reference."""
        refused: dict[Engine, str] = {}
        for engine in ENGINES:
            difference = self.difference(engine)
            if difference is None:
                return Verdict(engine, refused)
            refused[engine] = difference
        return Verdict("reference", refused)

    def difference(self, engine: Engine) -> str | None:
        """Return how an engine differs from the reference; None if it does not."""
        rows: list[list[Any]] = []
        for part in self._sampled:
            # Filters change the documents of a slice. Keys without any are as they were before there were filters.
            chosen = [part.filters, part.where] if part.filters or part.where else []
            rows.append([part.content, part.rows, *chosen, *([part.keys] if part.keys else [])])
        key = [
            engine, self.vocabulary.fingerprint, self.literal, self.which, rows,
            nasty_strings(self.vocabulary), SAMPLED_DOCUMENTS, SAMPLED_CHARACTERS, SWEEP_VERSION, [version(library) for library in LIBRARIES],
        ]  # fmt: skip
        place = join(self.store, "gates", f"{hashlib.sha256(orjson.dumps(key)).hexdigest()[:32]}.json")

        def compared() -> Comparison:
            with explained(f"check tokenizer: comparing {engine} with the reference, once for each dataset in a store"):
                return compare(self.vocabulary, engine, self._encoded, literal=self.literal)

        return remembered(place, Comparison, compared).difference

    @cached_property
    def _sampled(self) -> list[Slice]:
        count = len(self.slices)
        # Sources are often sorted, so the middle and the end differ from the beginning.
        return [self.slices[number] for number in sorted({0, count // 2, count - 1} if count else ())]

    @cached_property
    def _encoded(self) -> "Encoded":
        """What engines have to equal. The reference takes a quarter of a second, so it isn't asked for each engine."""
        documents = (itertools.islice(self.documents(part), SAMPLED_DOCUMENTS) for part in self._sampled)
        texts = [text[:SAMPLED_CHARACTERS] for text in itertools.chain.from_iterable(documents)]
        return by_reference(self.vocabulary, nasty_strings(self.vocabulary) + texts, literal=self.literal)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Texts, and the ids that the reference gives them."""

    texts: list[str]
    tokens: Tokens


def by_reference(vocabulary: Vocabulary, texts: list[str], *, literal: bool) -> Encoded:
    """Encode `texts` by the reference. Raises RunError if it can't be loaded."""
    return Encoded(texts, vocabulary.reference(literal).encode(pa.array(texts, pa.large_string())))


def compare(vocabulary: Vocabulary, engine: Engine, expected: Encoded, *, literal: bool) -> Comparison:
    """Encode the texts by an engine, and compare."""
    texts, reference = expected.texts, expected.tokens
    try:
        encoder = exact_encoder(vocabulary, engine, literal=literal)
    except ValueError as error:  # it doesn't support the vocabulary
        return Comparison(0, str(error))
    found = encoder.encode(pa.array(texts, pa.large_string()))
    if np.array_equal(found.ids, reference.ids) and np.array_equal(found.offsets, reference.offsets):
        return Comparison(len(texts), None)
    # The first text that differs is enough to reject the engine.
    for number, text in enumerate(texts):
        one, other = (ids.ids[ids.offsets[number] : ids.offsets[number + 1]] for ids in (found, reference))
        if not np.array_equal(one, other):
            difference = f"encodes {text[:80]!r} as {one[:12].tolist()}, the reference as {other[:12].tolist()}"
            return Comparison(len(texts), difference)
    raise RunError("the encoders disagree on the number of documents; report this set of texts")


def texts_of(text_field: str, part: Slice) -> Iterator[str]:
    """Yield the texts of a slice, in order."""
    for batch in read_texts(part, text_field):
        yield from batch.texts.to_pylist()


@dataclass(frozen=True, slots=True)
class Speed:
    """CPU seconds that an engine takes to load a vocabulary, and to encode a byte."""

    load: float
    encode: float

    def seconds(self, size: int) -> float:
        """CPU seconds for `size` bytes of source."""
        return self.load + self.encode * size


def fastest_engine(gate: Gate, size: int) -> Engine | None:
    """Return the fastest engine for `size` bytes of source, of those that pass the gate; None if none does."""
    vocabulary, libraries = gate.vocabulary, [(engine, version(engine)) for engine in ENGINES]
    key = [vocabulary.fingerprint, gate.literal, libraries, platform.node(), platform.machine(), COURSE]
    place = user_cache("races", f"{hashlib.sha256(orjson.dumps(key)).hexdigest()[:32]}.json")
    speeds = remembered(place, dict[Engine, Speed], lambda: _race(gate))
    # Only as many engines are compared as it takes to find one that passes.
    by_time = sorted(speeds, key=lambda engine: speeds[engine].seconds(size))
    return next((engine for engine in by_time if gate.difference(engine) is None), None)


def _race(gate: Gate) -> dict[Engine, Speed]:
    """The speeds of the engines that support the vocabulary, on the beginning of the dataset."""
    course = [pa.array(texts, pa.large_string()) for texts in _course(gate)]
    speeds: dict[Engine, Speed] = {}
    with explained("check tokenizer: measuring the speed of engines, once per machine"):
        for engine in ENGINES:
            with suppress(ValueError):  # for a vocabulary that the engine does not support
                start = time.process_time()
                gate.vocabulary.fast(engine, gate.literal)
                loaded = time.process_time()
                # The exact encoder may sweep first, which is neither loading nor encoding.
                encoder = exact_encoder(gate.vocabulary, engine, literal=gate.literal)
                begun = time.process_time()
                for texts in course:
                    encoder.encode(texts)
                size = max(sum(texts.nbytes for texts in course), 1)
                speeds[engine] = Speed(loaded - start, (time.process_time() - begun) / size)
    return speeds


def _course(gate: Gate) -> Iterator[list[str]]:
    """Batches of the first texts of a dataset."""
    texts = itertools.chain.from_iterable(map(gate.documents, gate.slices))
    batch: list[str] = []
    size = total = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            total += size
            batch, size = [], 0
        if total >= COURSE:
            return
    yield batch


def nasty_strings(vocabulary: Vocabulary) -> list[str]:
    """Strings that break tokenizers, with the control strings and other added tokens of this vocabulary.

    Tokenizers differ in whether they match added tokens within words or in a different normal form, and in how they strip.
    """
    added = list(dict.fromkeys([*vocabulary.special_tokens, *vocabulary.controls]))[:ADDED_TOKENS_TRIED]
    forms = dict.fromkeys(form for token in added for form in (token, normalize("NFC", token), normalize("NFD", token)))
    return [
        *NASTY,
        *forms,
        *(f"before{form}after {form} {form}{form}\n" for form in forms),
        *(token[:-1] for token in added),  # almost a token
        *vocabulary.added.neighbors(),
    ]


NASTY: list[str] = [
    "",
    " ",
    "a",
    "\x00",
    "\x00\x01\x02\x7f\x80\x9f",
    "\ufeffbyte order mark \ufeff inside",
    "\ufffd\ufffe\uffff\U0010ffff\ue000",
    "line\nline\r\nline\rline\x0bline\x0cline\x85line\u2028line\u2029line",
    "\t\ttabs \t mixed \n\t \n  \n\n\n   end   ",
    "\u00a0\u1680\u2000\u2003\u2009\u200a\u202f\u205f\u3000 wide spaces",
    "zero\u200bwidth\u200cjoiners\u200d\u2060\u00adsoft",
    "I'm you're THEY'LL We'd 'tis don\u2019t can\u2018t 'S 'T 'Re O'Neill\u02bcs",
    "1 12 123 1234 12345 1,234,567.89 0x1F 1e-10 ٣٤٥ १२३ ⅣⅧ ½ ²³ 一二三",
    "CamelCaseWords snake_case_words kebab-case-words SCREAMING_CASE mixedUPPERlower",
    "https://example.com/a/b?c=d&e=f#g user@example.com C:\\path\\file.txt ../../etc",
    "def f(x):\n    return {'a': [1, 2, 3], **x}  # comment\n\n\nclass A(B): ...\n",
    '<div class="a">&nbsp;&amp;</div><!-- c --><br/>{{ template }} ${var} %s %(x)d',
    "!@#$%^&*()_+-=[]{}|;':\",./<>?`~¡¿«»“”‘’…—–",
    "日本語のテキスト。カタカナ、ひらがな、漢字が混ざる。",
    "中文文本，没有空格。简体與繁體。𠀀𠮷",
    "한국어 텍스트입니다. 자모 ㄱㄴㄷ 조합",
    "ไทยไม่มีวรรค ភាសាខ្មែរ မြန်မာ ລາວ",
    "العربية نص من اليمين إلى اليسار مع تَشْكِيل \u202bembedding\u202c",
    "עברית עם נִקּוּד हिन्दी में लेख தமிழ் తెలుగు বাংলা",
    "Ελληνικά Русский Українська ქართული Հայերեն ᏣᎳᎩ ᚠᚢᚦ",
    "e\u0301 o\u0308 n\u0303 \u0041\u030a vs é ö ñ Å; stacked Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f",
    "ﬁ ﬂ ﬀ Ⅷ ㎏ ① ﷺ ǅ ß ẞ İ ı ſ K Å",
    "👍 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇯🇵 ☺️ ☺ 🫠🫡🫨🪿🩷🫩🫆",
    "𝕳𝖊𝖑𝖑𝖔 𝟙𝟚𝟛 \U0001d11e \U0001f9ff \U000e0041\U000e007f",
    "\u1c89\u1c8a \ua7cb \U00010d40 \U00016d40 \U0001ccd6 letters of Unicode 16",
    "\u0378\u0530\u2fe0 unassigned code points",
    "\u0300leading mark \u0903 \u20dd\u20e3 1\u20e3",
    "a\u0000b\u0000c",
    "mixed中English文123数字and日本語text",
    "The quick brown fox jumps over the lazy dog. " * 20,
    "x" * 10_000 + " " + "y" * 10_000,
    "<|endoftext|><|im_start|>user<|im_end|></s><s>[INST]<<SYS>><bos><eos><pad><unk>[MASK]",
    "<|endoftext|", "|endoftext|>", "<| endoftext |>", "<|ENDOFTEXT|>",
    *(
        piece * count
        for piece in "a \n\t=-0.*#_/中あ한ก\u0301😀\u200d\u00a0"
        for count in (2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 127, 129, 513)
    ),
    *(" " * count + "word" for count in range(1, 20)),
    *("\n" * count + " word" for count in range(1, 9)),
    *(f"{edge}{word}{edge}" for edge in SPACES for word in ("", "word", " ")),
    *(f"{mark}{mark}" for mark in "\u0340\u0341\u0343\u0344"), *"\x01\x0b\x1b\x1f\x7f\x8f\x9f",
    *(f"{space}{mark}" for space in ("", " ", "  ", "\n", "\t") for mark in "aA1.中é'😀"),
]  # fmt: skip
"""Texts that the fast encoder must encode like the reference before it is used."""
