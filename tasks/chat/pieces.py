"""A rendering cut into pieces: control tokens, and the text between them that is encoded as a whole.

Borders that matter fall on borders of tokens by construction where they can: at control tokens, which are ids of their
own, and where generation begins, because there the serving side ends its prompt and encodes it apart from what the
model goes on with. Any other border of the loss (say, between reasoning and answer) lies inside text that the model
generates in one go, so the text is encoded in one go; the part is then found by encoding it by itself as well, and where
the two disagree the tokens in question are left untrained and counted (see `encoding.py`).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from .controls import Controls
from .conversation import Role
from .loss import Range

ROLES: tuple[Literal["template", "padding"] | Role, ...] = (
    "template", "system", "developer", "user", "assistant", "tool", "padding",
)  # fmt: skip
"""Who wrote a token, as a number: the index in this tuple."""

ROLE_NUMBERS: dict[str, int] = {role: number for number, role in enumerate(ROLES)}


class Piece(NamedTuple):
    """A control token (`token` is its id, `text` None) or a text.

    `learned` says whether it is trained on; for a text with a border of the loss inside, the lengths of its parts in
    characters, beginning with an untrained one (of any length, also 0). `breaks`: never to be joined with the text
    before it.
    """

    text: str | None
    token: int
    role: int
    learned: bool | tuple[int, ...]
    breaks: bool = False


class Passage(NamedTuple):
    """Part of a rendering: where it ends (it begins where the one before ends), who wrote it, which characters of the
    rendering are trained on there, and where generation begins in it (-1: nowhere).
    """

    stop: int
    role: int
    learned: Sequence[Range] = ()
    generation: int = -1


def cut(text: str, passages: Sequence[Passage], controls: Controls) -> list[list[Piece]]:
    """The pieces of each passage of a rendering, in order; empty texts are left out. The last passage ends the text."""
    groups: list[list[Piece]] = [[] for _ in passages]
    number, passage, group = 0, passages[0], groups[0]
    place, is_control = 0, True
    for found in controls.pattern.split(text):
        is_control = not is_control  # texts and control tokens in turn, the first is a text
        end = place + len(found)
        while place < end:
            while place >= passage.stop:
                number += 1
                passage, group = passages[number], groups[number]
            if is_control:
                learned = bool(passage.learned) and _learned(passage.learned, place, end) is True
                group.append(_control(controls.ids[found], passage.role, learned))
                place = end
            else:
                stop = min(end, passage.stop)
                group += _cut_text(found if stop - place == len(found) else text[place:stop], place, passage)
                place = stop
    return groups


@lru_cache(maxsize=4096)
def _control(token: int, role: int, learned: bool) -> Piece:
    return Piece(None, token, role, learned)


@lru_cache(maxsize=16)
def _line_end(role: int) -> Piece:
    """What most templates write behind every message."""
    return Piece("\n", -1, role, False)


def _cut_text(text: str, place: int, passage: Passage) -> list[Piece]:
    """A text without control tokens, in two where generation begins inside it."""
    if not passage.learned and passage.generation < 0:
        return [_line_end(passage.role) if text == "\n" else Piece(text, -1, passage.role, False)]
    border = passage.generation - place
    if 0 < border < len(text):
        return [_text_piece(text[:border], place, passage), _text_piece(text[border:], passage.generation, passage)]
    return [_text_piece(text, place, passage)]


def _text_piece(text: str, place: int, passage: Passage) -> Piece:
    learned = _learned(passage.learned, place, place + len(text))
    return Piece(text, -1, passage.role, learned, place == passage.generation)


def _learned(ranges: Sequence[Range], start: int, stop: int) -> bool | tuple[int, ...]:
    """Whether the characters `[start, stop)` are learned, or which of them."""
    if len(ranges) == 1 and ranges[0][0] <= start and stop <= ranges[0][1]:
        return True
    inside = [(max(first, start), min(last, stop)) for first, last in ranges if first < stop and last > start]
    if not inside:
        return False
    if inside == [(start, stop)]:
        return True
    borders = [border for each in inside for border in each]
    if borders[-1] < stop:
        borders.append(stop)
    return tuple(border - before for before, border in zip([start, *borders], borders, strict=False))


def connected(passages: Sequence[Sequence[Piece]]) -> list[Piece]:
    """The pieces of consecutive passages; texts that meet are joined, for they are encoded as one."""
    pieces: list[Piece] = []
    for passage in passages:
        if passage and pieces and _meet(pieces[-1], passage[0]):
            pieces[-1] = _joined(pieces[-1], passage[0])
            pieces += passage[1:]
        else:
            pieces += passage
    return pieces


def _meet(left: Piece, right: Piece) -> bool:
    return left.text is not None and right.text is not None and not right.breaks


def _joined(left: Piece, right: Piece) -> Piece:
    one, other = left.text or "", right.text or ""
    if left.learned is right.learned:
        return left._replace(text=one + other)
    lengths = [*_lengths(left.learned, len(one))]
    for number, length in enumerate(_lengths(right.learned, len(other))):
        if number % 2 == (len(lengths) - 1) % 2:
            lengths[-1] += length
        else:
            lengths.append(length)
    return left._replace(text=one + other, learned=tuple(lengths))


def _lengths(learned: bool | tuple[int, ...], size: int) -> tuple[int, ...]:
    """The lengths of parts that are not trained, trained, not trained, …"""
    if isinstance(learned, tuple):
        return learned
    return (0, size) if learned else (size,)
