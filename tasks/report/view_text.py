r"""Descriptions of a view, and untrusted text made safe to print: it cannot control a terminal or reorder a line.

Control codes become their symbols (␛). Other invisible code points (bidi overrides, zero-width characters, line separators,
unassigned code points) become escapes (\u202e). A line break becomes ↵ and a line break. Each code point is looked up once;
text then passes at some 15 MB/s.
"""

import unicodedata

from .view import Pack, Passage, SubSequence

UNSAFE = {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"}
"""Unicode categories of code points that are invisible, control the display, or are unassigned."""

PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {ord("\x7f"): "␡", ord("\n"): "↵\n"}


class _Shown(dict[int, str]):
    """The replacement of each code point, filled on first use."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        unsafe = unicodedata.category(character) in UNSAFE
        self[code] = character.encode("unicode_escape").decode() if unsafe else character
        return self[code]


_SHOWN = _Shown(PICTURES)


def visible(text: str) -> str:
    """The text with everything unsafe escaped. Its only control codes are line breaks, each after a ↵."""
    return text.translate(_SHOWN)


def visible_line(text: str) -> str:
    """The same on one line, for names and paths."""
    return visible(text).replace("\n", "")


def describe_pack(pack: Pack) -> str:
    """One line about a row: its data set, its location, and how full it is."""
    sample = "" if pack.sample is None else f"sample {pack.sample}, "
    place = visible_line(f"{sample}{pack.dataset}: row {pack.row} of {pack.file}")
    if pack.fill is None:
        return f"{place}: {pack.tokens:,} tokens"
    return f"{place}: {pack.tokens:,} of {pack.pack_size:,} tokens ({pack.fill:.1%}), {pack.padding:,} of them padding"


def describe_sequence(sequence: SubSequence) -> str:
    """One line about a sub-sequence: its source and its share of trained tokens."""
    place = f"{sequence.tokens:,} tokens" + (f" from token {sequence.offset:,} on" if sequence.offset else "")
    return f"{visible_line(_source(sequence))}: {place}, {sequence.trained:,} trained on"


def _source(sequence: SubSequence) -> str:
    """The file and line, or the file and slice."""
    if sequence.line is not None:
        origin = f", from {sequence.origin}" if sequence.origin else ""
        return f"{sequence.file}:{sequence.line}{origin}"
    return f"{sequence.file}, slice {sequence.start:,} to {sequence.stop:,}"


def describe_padding(passage: Passage) -> str:
    """The label of padding."""
    return f"{passage.tokens:,} tokens"
