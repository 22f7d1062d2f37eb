r"""Strings in which the classes of a character show, made from a pre-tokenizer's own regular expressions.

A pre-tokenizer knows a character by the classes of its expressions alone: `\p{L}`, `\s`, `[^\r\n\p{L}\p{N}]`. Two
libraries whose tables differ cut a text differently where one alternative takes the character and the other library's
does not, or at the border between two alternatives. So every alternative is written out with a plain character for each
of its classes, the character in question stands in each place of it in turn, and the same is done with the end of each
alternative before the beginning of each other one.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

PIECES = re.compile(
    r"""\\[pP]\{[^}]*\} | \\x\{[^}]*\} | \\x[0-9A-Fa-f]{2} | \\.
    | \[ \^? \]? (?: \\. | \[ (?: \\. | [^\]\\] )* \] | [^\]\\] )* \]
    | \(\?<?[=!] | \(\?[a-zA-Z-]*: | \(\?> | \(\?[a-zA-Z-]+\) | \(
    | [)|] | [?*+][?+]? | \{\d*,?\d*\}[?+]? | .""",
    re.VERBOSE | re.DOTALL,
)
"""What a regular expression is made of: escapes, classes, beginnings of groups, other signs of its own, characters."""

PLAIN = [*"aA1! \n\r\t", *map(chr, range(0x21, 0x7F)), *"ǅʰª中あア가ا\u0301\u0903٣Ⅷ\u00a0\u2028\u00ad\x01"]
"""The first of these that a class takes stands for it."""

OPTIONAL = re.compile(r"[?*]|\{0?,")
LOOKAROUND = re.compile(r"\(\?<?[=!]")
NOTHING = re.compile(r"[+{^$]|\\[AbBGzZ]|\(\?[a-zA-Z-]+\)")
"""Pieces that take no character of their own: repetitions, anchors and flags."""

END, BEGINNING = 3, 3
"""Characters of one alternative before a border, and of the next one behind it."""

MOST_BORDERS = 4_000
"""Of more contexts at borders than this, a share is tried, the same on every machine."""


@dataclass(frozen=True, slots=True, order=True)
class Context:
    """What stands before and behind a character."""

    before: str
    behind: str

    def around(self, character: str) -> str:
        """The character in its context, on a line of its own."""
        return f"\n{self.before}{character}{self.behind}\n"


def contexts(patterns: Iterable[str]) -> list[Context]:
    """The contexts of a pre-tokenizer that applies the regular expressions `patterns`."""
    words = examples(patterns)
    whole = {Context(word[:place], word[place + 1 :]) for word in words for place in range(len(word))}
    ends = {word[-END:] for word in words}
    beginnings = {word[:BEGINNING] for word in words}
    borders = {context for end in ends for beginning in beginnings for context in _places(end, beginning)}
    every = len(borders) // MOST_BORDERS + 1
    return sorted(whole | set(sorted(borders)[::every]))


def examples(patterns: Iterable[str]) -> list[str]:
    """A text for each alternative of the regular expressions, one character per class; optional parts come and go."""
    written = {_example(parts) for pattern in patterns for parts in _alternatives(iter(PIECES.findall(pattern)))}
    return sorted(written - {""})


def _places(end: str, beginning: str) -> Iterator[Context]:
    """The character in the place of each of a border's characters, and between the two sides."""
    text = end + beginning
    yield Context(end, beginning)
    yield from (Context(text[:place], text[place + 1 :]) for place in range(len(text)))


def _alternatives(pieces: Iterator[str]) -> list[tuple[str, ...]]:
    """The sequences of classes and characters that a regular expression, or a group of one, can begin to match."""
    done: list[tuple[str, ...]] = []
    now: list[tuple[str, ...]] = [()]
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


def _example(parts: Sequence[str]) -> str:
    return "".join(part if len(part) == 1 else _member(part) for part in parts)


def _member(part: str) -> str:
    """A character that the class takes, or none."""
    splitter = pre_tokenizers.Split(Regex(part), "removed")
    return next((character for character in PLAIN if not splitter.pre_tokenize_str(character)), "")
