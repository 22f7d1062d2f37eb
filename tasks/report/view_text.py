"""Descriptions of a view."""

from .view import Pack, Passage, SubSequence
from .visible import visible_line


def describe_pack(pack: Pack) -> str:
    """One line about a row: its dataset, its location, and how full it is."""
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
