"""Verdicts of Gopher's, C4's and FineWeb's rules about many texts at a time: comparisons of counts with thresholds.

Ratios, comparisons and their order match datatrove's filters; `tests/filter` compares the decisions on real text. They
differ in two cases, where datatrove fails: a ratio to nothing (an empty text) fails no rule, and texts with the word `IS_ALPHA`
are split like others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute

from .kernel import Wanted, default_line_ends, measure
from .settings import C4Quality, Family, FineWebQuality, GopherQuality, GopherRepetition

PHRASES = [
    *("lorem ipsum", "javascript"),
    *("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies"),
]
"""The phrases of C4; those from the third on are about policies."""

LINE_REASONS = ("long_word", "no_terminal_punctuation", "too_few_words", "javascript", "policy")
"""Why C4 fails lines, in the order of its rules."""

Counts = Mapping[str, np.ndarray]
Failing = tuple[str, np.ndarray]
"""A rule, and the texts that fail it, bool [n]."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The first rule that each of n texts fails (a string [n], empty for none), the texts after C4's removal of lines, and the
    lines that C4 failed or removed in kept texts, by reason.
    """

    reasons: np.ndarray
    texts: pa.LargeStringArray
    lines: Mapping[str, int]


def judge(texts: pa.LargeStringArray, families: Mapping[Family, Any]) -> Verdicts:
    """Return the verdicts of families of rules, by name and in this order, about texts."""
    reasons = np.full(len(texts), "", object)
    lines: dict[str, int] = {}
    for stage in _stages(families):
        measured = measure(texts, _wanted(stage))
        for family, settings in stage.items():
            # Rules in order, so that a text keeps the name of the first that it fails.
            with np.errstate(divide="ignore", invalid="ignore"):  # a ratio to nothing fails no rule
                for reason, failing in _RULES[family](measured.counts, settings):
                    reasons[failing & (reasons == "")] = reason
        if "c4" in stage and stage["c4"].remove_lines:
            stay = reasons == ""  # a dropped text is published nowhere
            texts = compute.call_function("if_else", [pa.array(stay), measured.cleaned, texts])
            lines = {name: int(measured.counts[name][stay].sum()) for name in LINE_REASONS}
    return Verdicts(reasons, texts, lines)


def _stages(families: Mapping[Family, Any]) -> Iterator[dict[Family, Any]]:
    """The families in groups that see the same texts."""
    stage: dict[Family, Any] = {}
    for family, settings in families.items():
        stage[family] = settings
        if isinstance(settings, C4Quality) and settings.remove_lines:  # later families see the lines that it keeps
            yield stage
            stage = {}
    if stage:
        yield stage


def _wanted(families: Mapping[Family, Any]) -> Wanted:
    """Return the counts that the kernel must make for these families."""
    quality: GopherQuality = families.get("gopher_quality", GopherQuality())
    repetition: GopherRepetition = families.get("gopher_repetition", GopherRepetition())
    c4: C4Quality = families.get("c4", C4Quality())
    fineweb: FineWebQuality = families.get("fineweb", FineWebQuality())
    limits = (
        *(fineweb.short_line_length, c4.max_word_length, c4.min_words_per_line, c4.remove_citations),
        *(c4.filter_no_terminal_punct, c4.filter_lorem_ipsum, c4.filter_javascript, c4.filter_curly_bracket),
        c4.filter_policy,
    )
    return Wanted(
        list(families),
        [int(limit) for limit in limits],
        _sizes(repetition.top_n_grams),
        _sizes(repetition.dup_n_grams),
        quality.stop_words,
        PHRASES,
        fineweb.stop_chars or default_line_ends(),
    )


def _sizes(ratios: Mapping[str, float]) -> list[int]:
    return sorted(map(int, ratios))


def _over(value: np.ndarray, threshold: float | None) -> np.ndarray:
    return np.zeros(len(value), np.bool_) if threshold is None else value > threshold


def _under(value: np.ndarray, threshold: float | None) -> np.ndarray:
    return np.zeros(len(value), np.bool_) if threshold is None else value < threshold


def _gopher_repetition(found: Counts, settings: GopherRepetition) -> Iterator[Failing]:
    characters = found["characters"]
    yield "dup_para_frac", _over(found["repeated_paragraphs"] / found["paragraphs"], settings.dup_para_frac)
    yield "dup_para_char_frac", _over(found["repeated_paragraph_characters"] / characters, settings.dup_para_char_frac)
    yield "dup_line_frac", _over(found["repeated_blocks"] / found["blocks"], settings.dup_line_frac)
    yield "dup_line_char_frac", _over(found["repeated_block_characters"] / characters, settings.dup_line_char_frac)
    for size in _sizes(settings.top_n_grams):
        yield f"top_{size}_gram", _over(found[f"top_{size}"] / characters, settings.top_n_grams[str(size)])
    for size in _sizes(settings.dup_n_grams):
        yield (
            f"duplicated_{size}_n_grams",
            _over(found[f"repeated_{size}"] / characters, settings.dup_n_grams[str(size)]),
        )


def _gopher_quality(found: Counts, settings: GopherQuality) -> Iterator[Failing]:
    words, lines = found["words"], found["lines"]
    length = found["plain_characters"] / found["plain_words"]
    yield "gopher_short_doc", _under(found["plain_words"], settings.min_doc_words)
    yield "gopher_long_doc", _over(found["plain_words"], settings.max_doc_words)
    yield "gopher_below_avg_threshold", _under(length, settings.min_avg_word_length)
    yield "gopher_above_avg_threshold", _over(length, settings.max_avg_word_length)
    yield "gopher_too_many_hashes", _over(found["hashes"] / words, settings.max_symbol_word_ratio)
    yield "gopher_too_many_ellipsis", _over(found["ellipses"] / words, settings.max_symbol_word_ratio)
    yield "gopher_too_many_bullets", _over(found["bullet_lines"] / lines, settings.max_bullet_lines_ratio)
    yield "gopher_too_many_end_ellipsis", _over(found["ellipsis_lines"] / lines, settings.max_ellipsis_lines_ratio)
    yield "gopher_below_alpha_threshold", _under(found["alphabetic_words"] / words, settings.max_non_alpha_words_ratio)
    yield "gopher_enough_stop_words", _under(found["stop_words"], settings.min_stop_words)


def _c4(found: Counts, settings: C4Quality) -> Iterator[Failing]:
    yield "lorem_ipsum", found["lorem_ipsum"] > 0
    yield "curly_bracket", found["curly_bracket"] > 0
    if settings.min_num_sentences >= 0:
        yield "too_few_sentences", found["sentences"] < settings.min_num_sentences


def _fineweb(found: Counts, settings: FineWebQuality) -> Iterator[Failing]:
    lines, ended = found["filled_lines"], found["ended_lines"]
    repeated = found["repeated_line_characters"] / (found["characters"] - found["new_lines"])
    yield "empty", lines == 0
    few = _under(ended / lines, settings.line_punct_thr)
    yield "line_punct_ratio", few & (ended > 0) if settings.line_punct_exclude_zero else few
    yield "short_line_ratio", _over(found["short_lines"] / lines, settings.short_line_thr)
    yield "char_dup_ratio", _over(repeated, settings.char_duplicates_ratio)
    yield "list_ratio", _over(found["new_lines"] / found["words"], settings.new_line_ratio)


_RULES: Mapping[str, Any] = {
    "gopher_repetition": _gopher_repetition,
    "gopher_quality": _gopher_quality,
    "c4": _c4,
    "fineweb": _fineweb,
}
