"""The verdicts of datatrove's own filters, by the names that tokenmill gives the families."""

from datatrove.data import Document
from datatrove.pipeline.filters.c4_filters import C4QualityFilter
from datatrove.pipeline.filters.fineweb_quality_filter import FineWebQualityFilter
from datatrove.pipeline.filters.gopher_quality_filter import GopherQualityFilter
from datatrove.pipeline.filters.gopher_repetition_filter import GopherRepetitionFilter

FILTERS = {
    "gopher_repetition": GopherRepetitionFilter,
    "gopher_quality": GopherQualityFilter,
    "c4": C4QualityFilter,
    "fineweb": FineWebQualityFilter,
}
RATIOS = {"top_n_grams", "dup_n_grams"}


def peer(family, **settings):
    """A filter with these settings."""
    return FILTERS[family](**{name: _given(name, value) for name, value in settings.items()})


def _given(name, value):
    if name in RATIOS:
        return tuple((int(size), ratio) for size, ratio in value.items())
    return tuple(value) if name == "stop_chars" and value else value


def verdict(chosen, text):
    """The reason for dropping a text, empty if it stays, and the text that is left of it."""
    document = Document(text=text, id="")
    found = chosen.filter(document)
    return ("", document.text) if found is True else (found[1], text)
