"""Verdicts equal those of datatrove's filters: on real text in many languages, by every rule alone, and on nasty text."""

from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.filter.rules import judge
from tokenmill.tasks.filter.settings import C4Quality, FineWebQuality, GopherQuality, GopherRepetition

from tests.filter import english_words, texts
from tests.peers.datatrove_filters import FILTERS, peer, verdict

MODELS = {
    "gopher_repetition": GopherRepetition,
    "gopher_quality": GopherQuality,
    "c4": C4Quality,
    "fineweb": FineWebQuality,
}
FRACTIONS = ["dup_line_frac", "dup_para_frac", "dup_line_char_frac", "dup_para_char_frac"]
OFF = {
    "gopher_repetition": {**dict.fromkeys(FRACTIONS), "top_n_grams": {}, "dup_n_grams": {}},
    "gopher_quality": dict.fromkeys(name for name in GopherQuality.model_fields if name != "stop_words"),
}
"""Settings of a family of which every rule is off."""

RULES = [
    ("gopher_repetition", {"dup_line_frac": 0.1}),
    ("gopher_repetition", {"dup_para_frac": 0.05}),
    ("gopher_repetition", {"dup_line_char_frac": 0.05}),
    ("gopher_repetition", {"dup_para_char_frac": 0.01}),
    *(("gopher_repetition", {"top_n_grams": {str(size): 0.05}}) for size in (1, 2, 3, 4)),
    *(("gopher_repetition", {"dup_n_grams": {str(size): 0.02}}) for size in (1, 2, 5, 7, 10)),
    ("gopher_quality", {"min_doc_words": 80}),
    ("gopher_quality", {"max_doc_words": 80}),
    ("gopher_quality", {"min_avg_word_length": 5.0}),
    ("gopher_quality", {"max_avg_word_length": 6.0}),
    ("gopher_quality", {"max_symbol_word_ratio": 0.01}),
    ("gopher_quality", {"max_bullet_lines_ratio": 0.05}),
    ("gopher_quality", {"max_ellipsis_lines_ratio": 0.01}),
    ("gopher_quality", {"max_non_alpha_words_ratio": 0.6}),
    ("gopher_quality", {"min_stop_words": 3, "stop_words": ["the", "import", "die", "."]}),
    *(("c4", {"filter_no_terminal_punct": False, "min_num_sentences": least}) for least in (-1, 2, 3, 8, 20)),
    ("c4", {"min_words_per_line": -1, "filter_curly_bracket": False, "max_word_length": 12}),
    (
        "c4",
        dict.fromkeys(("filter_no_terminal_punct", "remove_citations", "filter_javascript", "filter_policy"), False),
    ),
    ("fineweb", {"line_punct_thr": 0.3, "line_punct_exclude_zero": True}),
    ("fineweb", {"short_line_length": 40, "short_line_thr": 0.9}),
    ("fineweb", {"line_punct_thr": 0.0, "short_line_thr": 1.0, "char_duplicates_ratio": 0.2, "new_line_ratio": 0.1}),
    ("fineweb", {"stop_chars": ":;", "char_duplicates_ratio": 1.0}),
]
"""Every rule alone, or with few others, at a threshold that some real texts pass and others fail."""


def verdicts(family, settings, found):
    """Reasons, and the texts that C4 leaves."""
    settings = {**settings, "remove_lines": True} if family == "c4" else settings
    judged = judge(pa.array(found, pa.large_string()), {family: MODELS[family](**settings)})
    return list(zip(judged.reasons.tolist(), judged.texts.to_pylist(), strict=True))


def peers(family, settings, found):
    chosen = peer(family, **settings)
    return [verdict(chosen, text) for text in found]


def real(count, longest):
    """Texts that datatrove can judge: none is empty."""
    return [text for text in texts.documents(count, longest) if text]


@pytest.mark.slow
@pytest.mark.parametrize("family", FILTERS)
def test_default_verdicts_on_many_real_texts_equal_the_peers(family):
    found = real(800, 2000)
    ours = [verdicts(family, {}, found[start:stop]) for start, stop in pairwise(range(0, len(found) + 500, 500))]
    expected = peers(family, {}, found)
    assert [each for batch in ours for each in batch] == expected
    assert len({reason for reason, _ in expected}) > 2


@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings"), RULES, ids=str)
def test_each_rule_agrees_with_the_peer_on_real_text(family, settings):
    found = real(60, 2000)
    settings = {**OFF.get(family, {}), **settings}
    assert verdicts(family, settings, found) == peers(family, settings, found)


def nasty():
    return st.lists(st.sampled_from(texts.pieces()), min_size=1, max_size=40).map("".join)


@pytest.mark.parametrize("family", FILTERS)
@given(st.lists(nasty(), min_size=1, max_size=6))
def test_nasty_text_gets_the_verdicts_of_the_peers(family, found):
    repeated = {"top_n_grams": {"1": 0.2, "2": 0.2, "3": 0.2}, "dup_n_grams": {"1": 0.3, "2": 0.1, "3": 0.05}}
    settings = {
        "gopher_repetition": repeated,
        "gopher_quality": {"min_doc_words": 1, "min_avg_word_length": 1.5, "min_stop_words": 1},
        "c4": {"min_num_sentences": 2, "min_words_per_line": 1, "filter_no_terminal_punct": False},
        "fineweb": {},
    }[family]
    assert verdicts(family, settings, found) == peers(family, settings, found)


def test_the_first_failing_rule_of_the_first_failing_family_is_the_reason():
    text = pa.array(["- a\n- a\n- a\n", "word " * 60], pa.large_string())
    families = {name: model() for name, model in MODELS.items()}
    assert judge(text, families).reasons.tolist() == ["dup_line_frac", "top_2_gram"]
    backwards = dict(reversed(families.items()))
    assert judge(text, backwards).reasons.tolist() == ["line_punct_ratio", "line_punct_ratio"]


def test_families_after_c4_see_the_lines_that_it_keeps():
    sentence = "The quick dog jumps over it. "
    text = pa.array(["\n".join([sentence * 6, "Use cookies here.", "menu"])], pa.large_string())
    families = {"c4": C4Quality(remove_lines=True), "fineweb": FineWebQuality(line_punct_thr=0.5)}
    judged = judge(text, families)
    assert judged.reasons.tolist() == [""]
    assert judged.texts.to_pylist() == [(sentence * 6).strip()]
    counts = dict.fromkeys(["long_word", "no_terminal_punctuation", "too_few_words", "javascript", "policy"], 0)
    assert judged.lines == counts | {"no_terminal_punctuation": 1, "policy": 1}
    assert judge(text, {**families, "c4": C4Quality()}).texts == text


def test_texts_that_make_the_peer_fail_get_a_verdict():
    with pytest.raises(ZeroDivisionError):
        verdict(peer("gopher_repetition"), "")
    assert verdicts("gopher_repetition", {}, [""]) == [("", "")]
    assert verdicts("gopher_quality", {}, [""]) == [("gopher_short_doc", "")]
    with pytest.raises(ZeroDivisionError):
        verdict(peer("gopher_quality", min_doc_words=None), " ")
    assert verdicts("gopher_quality", {"min_doc_words": None, "min_stop_words": None}, [" "]) == [("", " ")]


@pytest.mark.parametrize("text", ["a-" * 500_000, "a" * 1_000_000, "." * 1_000_000, "a.@" * 300_000, "[1" * 500_000])
def test_long_texts_take_linear_time(text):
    families = {name: model() for name, model in MODELS.items()}
    assert judge(pa.array([text], pa.large_string()), families).reasons[0]


def test_verdicts_do_not_depend_on_the_other_texts_of_a_batch():
    found = texts.documents(300, 2000)
    families = {name: model() for name, model in MODELS.items()}
    together = judge(pa.array(found, pa.large_string()), families).reasons.tolist()
    alone = [judge(pa.array([text], pa.large_string()), families).reasons[0] for text in found[:40]]
    assert alone == together[:40]
    assert judge(pa.array([*found, "x"], pa.large_string())[100:300], families).reasons.tolist() == together[100:]
    assert len(judge(pa.array([], pa.large_string()), families).reasons) == 0


@pytest.mark.slow
def test_word_data_match_the_libraries():
    stale = "english.json is stale; run python -m tests.filter.english_words"
    assert english_words.FILE.read_bytes() == english_words.english_words(), stale
