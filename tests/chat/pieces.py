"""The text of the segments of a sequence, and which of it is trained on."""


def words_of(segment, vocabulary):
    """The text of a segment; that of a control token is its name."""
    names = {number: name for name, number in vocabulary.controls.items()}
    return names[segment.token] if segment.text is None else segment.text


def text(segments, vocabulary):
    return "".join(words_of(segment, vocabulary) for segment in segments)


def learned(segments, vocabulary):
    """The characters that are trained on."""
    return "".join(words_of(segment, vocabulary) for segment in segments if segment.trained)
