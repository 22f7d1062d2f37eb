r"""A sweep over Unicode for suspects: characters that the fast library and the reference treat differently.

Tokenizers normalize and split text by Unicode tables, and two libraries rarely ship the same version. Around a letter, digit or
mark that only one of them knows, they split text differently, and the ids differ if a neighbor would have merged. Which
neighbors merge depends on the vocabulary, so the sweep compares the pieces:

*   Both libraries get the tokenizer's own pre-tokenizer with an artificial vocabulary whose ids show the borders between
    pieces.
*   A pre-tokenizer knows a character only by the classes of its expressions (`\p{L}`, `\s`, `[^\r\n\p{L}\p{N}]`). So every
    alternative of an expression is written out with one character per class, and the character in question takes each
    place in turn; likewise at the border between the end of each alternative and the beginning of each other one.
*   The reference cuts one character of each Unicode class in all of these contexts. Two or three contexts are kept, which
    together distinguish all classes that any context distinguishes.
*   Both libraries cut every code point in use in the contexts that were kept. Where all pieces agree, both put the
    character into the same class, and so treat it alike in any context. The characters of the previous step check that
    both read the expressions alike.
*   Normal forms are compared as text: each character on its own, doubled and among marks, and letters and marks together
    with their block and with every mark that combines with some letter.

A tokenizer that does not split by expressions, such as SentencePiece's, is compared by its ids in a few contexts. So are all
characters beside an added token that strips whitespace or takes whole words only.

The sweep takes 2 CPU-seconds for a tiktoken encoding, 4 for a tokenizer.json, and 6 more if that normalizes.
"""

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from tokenizers import Regex, pre_tokenizers

from .encoders import Encoder
from .settings import Engine
from .splitting import NormalForm, Splitting
from .vocabulary import Vocabulary

SWEEP_VERSION = 2
"""Increase it when the sweep covers more; this invalidates cached results."""

SWEPT = (range(0x80, 0xD800), range(0xE000, 0x34000), range(0xE0000, 0xE0200))
"""Where Unicode 17 assigns characters beyond ASCII, without surrogates and its last two planes, which are private."""

CLASSES = (
    "ÀàǅʰªƻᎠ中あア가ا\u0301\u0903\u20dd\u0334٣Ⅷ½‿\u2013„⁆«»¡±£\u00b4©"
    "\u00a0\u1680\u2028\u2029\x85\x9f\u00ad\u200d\u06dd\ue000\u0378\ufffd\u017f\u212a"
)
"""Characters of every general category, and of scripts that expressions name; all of several bytes in UTF-8."""

GROUP = 256
"""Characters per text; only texts that differ are divided."""

LEADS, CONTINUATIONS = range(0xC2, 0xF5), range(0x80, 0xC0)
"""The first and the following bytes of characters of several bytes in UTF-8 (RFC 3629)."""

IDEOGRAPHS = 0x20000
"""From here on, planes hold ideographs, which combine with nothing."""

BLOCK = 128
"""New characters combine with characters in the same block, or with marks of older versions of Unicode."""

Writing = Callable[[str], str]
"""Writes a text around a character."""

Alike = Callable[[list[str]], Sequence[bool]]
"""Whether two libraries treat each of the texts alike."""

UNSPLIT: tuple[Writing, ...] = (
    " {0}{0}b".format,
    "{0}a\n".format,
    "1{0}1\n".format,
    "e{0}\u0334\n".format,
    "{0}\u0301\n".format,
    "\u200d{0}\n".format,
)
"""For tokenizers without expressions: between letters, between digits, and before, among and after marks."""

ALONE: Writing = "\n{0}{0}\n{0}\u0301\ne{0}\u0334\n\u0301{0}\n".format
"""Shows the normal form of a character and its combining class, beside marks of common classes."""

PIECES = re.compile(
    r"""\\[pP]\{[^}]*\} | \\x\{[^}]*\} | \\x[0-9A-Fa-f]{2} | \\.
    | \[ \^? \]? (?: \\. | \[ (?: \\. | [^\]\\] )* \] | [^\]\\] )* \]
    | \(\?<?[=!] | \(\?[a-zA-Z-]*: | \(\?> | \(\?[a-zA-Z-]+\) | \(
    | [)|] | [?*+][?+]? | \{\d*,?\d*\}[?+]? | .""",
    re.VERBOSE | re.DOTALL,
)
"""The parts of a regular expression: escapes, classes, beginnings of groups, operators, characters."""

PLAIN = [*"aA1! \n\r\t", *map(chr, range(0x21, 0x7F)), *"ǅʰª中あア가ا\u0301\u0903٣Ⅷ\u00a0\u2028\u00ad\x01"]
"""The first of these that a class matches represents it."""

OPTIONAL = re.compile(r"[?*]|\{0?,")
LOOKAROUND = re.compile(r"\(\?<?[=!]")
NOTHING = re.compile(r"[+{^$]|\\[AbBGzZ]|\(\?[a-zA-Z-]+\)")
"""Parts that don't match a character: repetitions, anchors and flags."""

END, BEGINNING = 3, 3
"""Characters of one alternative before a border, and of the next one after it."""

MOST_BORDERS = 4_000
"""If there are more contexts at borders than this, a fixed share of them is tried."""


@dataclass(frozen=True, slots=True, order=True)
class Context:
    """The text before and after a character."""

    before: str
    after: str

    def around(self, character: str) -> str:
        """Return the character in its context, on a separate line."""
        return f"\n{self.before}{character}{self.after}\n"


def suspect_characters(vocabulary: Vocabulary, engine: Engine) -> list[int]:
    """Return the code points of SWEPT that an engine and the reference treat differently, ascending.

    Raises ValueError if the engine does not support the vocabulary, or differs in ways not explained by single
    characters.
    """
    found: set[int] = set()
    if stripping := vocabulary.added.stripping():
        beside: list[Writing] = [lambda each, token=token: f"a{each}{token}{each}b\n" for token in stripping]
        found = found_in(beside, _same_ids(vocabulary.fast(engine, False), vocabulary.reference(False)))
    splitting = vocabulary.splitting(engine)
    # Without expressions a character is in no known context, so ids are compared in a few.
    if splitting is None:
        return sorted(found | found_in(UNSPLIT, _same_ids(vocabulary.fast(engine, True), vocabulary.reference(True))))
    found |= cut_differently(splitting)
    if splitting.normal_forms is not None:
        found |= normalized_differently(*splitting.normal_forms())
    return sorted(found)


def cut_differently(splitting: Splitting) -> set[int]:
    """Return the code points around which the fast encoder and the reference cut different pieces.

    Raises ValueError if they do so around one of CLASSES that they otherwise agree on.
    """
    candidates = contexts(splitting.patterns())
    ranks = showing_borders(candidates)
    fast, reference = splitting.encoders(ranks)
    plain = [context.around(character) for context in candidates for character in CLASSES]
    cut, expected = _encoded(fast, plain), _encoded(reference, plain)
    found = found_in(
        [each.around for each in distinguishing_contexts(candidates, expected, ranks)], _same_ids(fast, reference)
    )
    for text, character, one, other in zip(plain, itertools.cycle(CLASSES), cut, expected, strict=False):
        if ord(character) not in found and not np.array_equal(one, other):
            raise ValueError(f"cuts {text!r} into other pieces than the reference")
    return found


def normalized_differently(fast: NormalForm, reference: NormalForm) -> set[int]:
    """Return the code points that make the normal forms of a text differ.

    The normal form of assigned characters never changes (Unicode Standard Annex 15, stability), so only characters newer
    than the older of the two tables can differ. Each is tried with all that it may combine with.
    """

    def alike(texts: list[str]) -> Sequence[bool]:
        return [one == other for one, other in zip(fast(texts), reference(texts), strict=True)]

    found = found_in([ALONE], alike)
    # Marks that combine with a letter are second in its canonical decomposition.
    decompositions = (unicodedata.decomposition(chr(number)) for number in _swept() if number < IDEOGRAPHS)
    pairs = (each.split() for each in decompositions if each and not each.startswith("<"))
    combining = {int(pair[1], 16) for pair in pairs if len(pair) == 2}  # noqa: PLR2004 - one or two
    marks = "".join(map(chr, sorted(combining - found)))

    def in_all_contexts(character: str) -> str:
        number = ord(character)
        block = range(number, number - number % BLOCK + BLOCK)
        others = marks + "".join(chr(other) for other in block if other not in found)
        return f"{character}{character.join(others)}\n"

    # Letters and marks that may have been assigned after 2002; every table covers older ones.
    old = unicodedata.ucd_3_2_0.category
    young = [
        number for number in _swept()
        if number < IDEOGRAPHS and number not in found and old(chr(number)) == "Cn" and unicodedata.category(chr(number))[0] in "LMC"
    ]  # fmt: skip
    return found | set(differing(in_all_contexts, young, alike))


def found_in(writings: Iterable[Writing], alike: Alike) -> set[int]:
    """Return the code points of SWEPT that are treated differently in one of the texts written around them."""
    found: set[int] = set()
    for writing in writings:
        found.update(differing(writing, [number for number in _swept() if number not in found], alike))
    return found


def differing(writing: Writing, numbers: Sequence[int], alike: Alike) -> Iterator[int]:
    """Yield the code points among `numbers` that are treated differently in the text written around them."""
    groups = [numbers[start : start + GROUP] for start in range(0, len(numbers), GROUP)]
    # Few characters differ, so most groups are done after one comparison; the others are divided by four.
    while groups:
        same = alike(["".join(writing(chr(number)) for number in group) for group in groups])
        different = [group for group, each in zip(groups, same, strict=True) if not each]
        yield from (group[0] for group in different if len(group) == 1)
        groups = [
            group[start : start + max(1, len(group) // 4)]
            for group in different
            if len(group) > 1
            for start in range(0, len(group), max(1, len(group) // 4))
        ]


def _swept() -> Iterator[int]:
    return (number for planes in SWEPT for number in planes)


def _same_ids(fast: Encoder, reference: Encoder) -> Alike:
    def alike(texts: list[str]) -> Sequence[bool]:
        pairs = zip(_encoded(fast, texts), _encoded(reference, texts), strict=True)
        return [np.array_equal(one, other) for one, other in pairs]

    return alike


def _encoded(encoder: Encoder, texts: list[str]) -> list[np.ndarray]:
    tokens = encoder.encode(pa.array(texts, pa.large_string()))
    return np.split(tokens.ids, tokens.offsets[1:-1])


def showing_borders(candidates: Iterable[Context]) -> dict[bytes, int]:
    """Ranks by which a character of several bytes merges with its neighbors in the same piece.

    Its first byte merges with the ASCII before it, and its last byte with the ASCII after it or with the first byte of the
    next such character; ASCII merges first. So borders between pieces show in the ids, for any character.
    """
    # One or two adjacent characters of ASCII, also at the beginning and end of a line.
    lines = {f"\n{side}\n" for context in candidates for side in (context.before, context.after)}
    parts = {part for line in lines for part in (*line, *map("".join, itertools.pairwise(line)))}
    runs = {part.encode() for part in parts if part.isascii()}
    written = sorted(runs, key=lambda run: (len(run), run))
    singles = [bytes([byte]) for byte in range(256)]
    leads, continuations = ([singles[byte] for byte in edge] for edge in (LEADS, CONTINUATIONS))
    tokens = [
        *singles,
        *(run for run in written if len(run) > 1),
        *(last + first for last in continuations for first in leads),
        *(last + run for run in written for last in continuations),
        *(run + first for run in written for first in leads),
    ]
    return {token: rank for rank, token in enumerate(tokens)}


def distinguishing_contexts(
    candidates: Sequence[Context], documents: Sequence[np.ndarray], ranks: Mapping[bytes, int]
) -> list[Context]:
    """Return a few contexts that distinguish all of CLASSES that any of the candidates distinguishes.

    `documents` are the ids of each of CLASSES in each of the candidates, in order, by the reference with `ranks`.
    """
    lengths = np.array([len(token) for token in ranks], np.int64)
    starts = (len(f"\n{context.before}".encode()) for context in candidates for _ in CLASSES)
    sizes = [len(character.encode()) for character in CLASSES] * len(candidates)
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    numbers: list[int] = []
    for ids, start, size in zip(documents, starts, sizes, strict=True):
        # The ends of tokens before the character, and after it, counted from its end, show how a context is cut around it.
        ends = np.cumsum(lengths[ids])
        borders = tuple(ends[ends <= start].tolist()), tuple((ends[ends >= start + size] - size).tolist())
        numbers.append(known.setdefault(borders, len(known)))
    outcomes = np.array(numbers, np.int64).reshape(len(candidates), len(CLASSES))
    apart = outcomes[:, :, None] != outcomes[:, None, :]
    chosen: list[Context] = []
    # Greedy: the context that distinguishes the most pairs of classes that no earlier one does.
    while apart.any():
        best = int(apart.sum(axis=(1, 2)).argmax())
        chosen.append(candidates[best])
        apart &= ~apart[best]
    return chosen


def contexts(patterns: Iterable[str]) -> list[Context]:
    """Return the contexts of a pre-tokenizer that applies the regular expressions `patterns`."""
    words = examples(patterns)
    whole = {Context(word[:place], word[place + 1 :]) for word in words for place in range(len(word))}
    ends = {word[-END:] for word in words}
    beginnings = {word[:BEGINNING] for word in words}
    borders: set[Context] = set()
    for end, beginning in itertools.product(ends, beginnings):
        # The character comes between the two sides, or in the place of one of theirs.
        text = end + beginning
        borders.add(Context(end, beginning))
        borders.update(Context(text[:place], text[place + 1 :]) for place in range(len(text)))
    every = len(borders) // MOST_BORDERS + 1
    return sorted(whole | set(sorted(borders)[::every]))


def examples(patterns: Iterable[str]) -> list[str]:
    """Return a text for each alternative of the regular expressions, with and without optional parts; one character per class."""
    written: set[str] = set()
    for pattern in patterns:
        for parts in _alternatives(iter(PIECES.findall(pattern))):
            text = ""
            for part in parts:
                if len(part) == 1:
                    text += part
                    continue
                # The library's own expressions show what a class matches: that is removed. Some classes match none of these.
                left = pre_tokenizers.Split(Regex(part), "removed").pre_tokenize_str
                text += next((character for character in PLAIN if not left(character)), "")
            written.add(text)
    return sorted(written - {""})


def _alternatives(pieces: Iterator[str]) -> list[tuple[str, ...]]:
    """The sequences of classes and characters that a regular expression, or a group in one, can match."""
    done: list[tuple[str, ...]] = []
    now: list[tuple[str, ...]] = [()]
    # What is matched without the latest part, which an operator may make optional.
    without_last = now
    for piece in pieces:
        if piece == ")":
            break
        if piece == "|":
            done, now = done + now, [()]
        elif OPTIONAL.match(piece):
            now = list(dict.fromkeys(now + without_last))
        elif piece.startswith("(") and not NOTHING.match(piece):
            without_last, group = now, _alternatives(pieces)
            now = now if LOOKAROUND.match(piece) else [one + other for one in now for other in group]
        elif not NOTHING.match(piece):
            without_last, now = now, [(*one, piece) for one in now]
    return done + now
