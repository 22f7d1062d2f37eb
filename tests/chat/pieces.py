"""The text of the pieces of a sequence, and which of it is trained on."""

import itertools


def words_of(piece, vocabulary):
    """The text of a piece; that of a control token is its name."""
    names = {number: name for name, number in vocabulary.controls.items()}
    return names[piece.token] if piece.text is None else piece.text


def text(pieces, vocabulary):
    return "".join(words_of(piece, vocabulary) for piece in pieces)


def learned(pieces, vocabulary):
    """The characters that are trained on."""
    found = ""
    for piece in pieces:
        words, flags = words_of(piece, vocabulary), piece.learned
        lengths = flags if isinstance(flags, tuple) else (0, len(words)) if flags else (len(words),)
        ends = list(itertools.accumulate(lengths, initial=0))
        found += "".join(words[start:stop] for start, stop in list(itertools.pairwise(ends))[1::2])
    return found
