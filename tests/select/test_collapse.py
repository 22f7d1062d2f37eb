"""The collapse report: what it counts, when it fails, and that parts add up."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.harmony.grammar import parse
from tokenmill.tasks.harmony.inventory import merged
from tokenmill.tasks.select.collapse import Limits, Survey, collapse

ANSWER = "<|start|>assistant<|channel|>final<|message|>{}<|return|>"
THOUGHT = "<|start|>assistant<|channel|>analysis<|message|>{}<|end|>"
CALL = '<|start|>assistant to=functions.{}<|channel|>commentary <|constrain|>json<|message|>{{"k":1}}<|call|>'
RESULT = "<|start|>functions.{} to=assistant<|channel|>commentary<|message|>{}<|end|>"
ASK = "<|start|>user<|message|>?<|end|>"


def plain(plan="Hm.", answer="Well."):
    return ASK + THOUGHT.format(plan) + ANSWER.format(answer)


def with_tool(*results, tool="f"):
    return ASK + "".join(CALL.format(tool) + RESULT.format(tool, each) for each in results) + ANSWER.format("Well.")


def unanswered(tool="f"):
    return ASK + CALL.format(tool) + ANSWER.format("Well.")


TEXTS = [
    plain(), plain(), plain("Another plan."), plain(answer="4"),
    with_tool('{"a":1}', '{"b":1}'), with_tool('{"a":2}'), with_tool("[]"), unanswered(), "no Harmony", None,
]  # fmt: skip


def survey(texts):
    found = Survey()
    found.add_all(map(parse, texts))
    return json.loads(json.dumps(found.record()))


def test_the_report_counts_what_there_is():
    facts = collapse(survey(TEXTS), Limits()).facts
    assert json.loads(json.dumps(facts)) == {
        "rows": 10,
        "share_empty": 0.2,
        "distinct_traces": 7,
        "distinct_structures": 6,
        "share_distinct_structures": 0.6,
        "share_with_calls": 0.4,
        "distinct_tool_sequences": 2,
        "share_with_keysets": 0.2,
        "distinct_keysets": 2,
        "calls_per_row": {"p50": 0, "p90": 2, "p99": 2},
        "words_per_trace": facts["words_per_trace"],
        "answers": {"text": 7, "numeric": 1},
        "tool_sequences": {"f": 3, "f -> f": 1},
        "keysets": {"a": 2, "b": 1},
        "authors": {"functions.f": 4},
    }


def test_missing_results_lack_keysets():
    facts = collapse(survey([unanswered(), with_tool("[]"), with_tool("text"), with_tool("{}")]), Limits()).facts
    assert (facts["share_with_keysets"], facts["distinct_keysets"], facts["keysets"]) == (0.0, 0, {})
    assert facts["authors"] == {"functions.f": 3}


def test_words_are_separated_by_whitespace():
    trace_words = 2 * 8 + 2
    assert collapse(survey([plain("Hm.")]), Limits()).facts["words_per_trace"]["p99"] == trace_words
    assert collapse(survey([plain("Hm. Well then.")]), Limits()).facts["words_per_trace"]["p99"] == trace_words + 2


@pytest.mark.parametrize(
    ("texts", "limits", "problems"),
    [
        ([plain()] * 100, Limits(), []),
        ([plain()] * 101, Limits(), ["1 distinct structures in 101 rows are 0.990%, below the limit of 1.000%"]),
        ([plain(f"{number}") for number in range(101)], Limits(), ["1 distinct structures in 101 rows"]),
        ([plain()] * 101, Limits(structures=0), []),
        ([plain()] * 50 + [None] * 51, Limits(), ["1 distinct structures in 101 rows"]),
        ([plain(), with_tool("x")], Limits(calls=0.5), []),
        ([plain(), plain(), with_tool("x")], Limits(calls=0.5), ["33.333% of rows call a tool, below the limit of 50.000%"]),
        ([plain()] * 200, Limits(calls=0.1), ["1 distinct structures", "0.000% of rows call a tool"]),
        ([], Limits(structures=0), ["the selection doesn't contain rows to survey"]),
        ([None], Limits(), ["0 distinct structures in 1 rows are 0.000%"]),
    ],
)  # fmt: skip
def test_every_violated_limit_is_a_problem_and_no_other(texts, limits, problems):
    found = collapse(survey(texts), limits)
    assert len(found.problems) == len(problems)
    assert all(found.problems[place].startswith(problem) for place, problem in enumerate(problems))
    for problem in problems:
        assert f"**Collapsed:** {problem}" in found.markdown
    assert ("No collapse" in found.markdown) == (not problems)


@given(st.lists(st.sampled_from(TEXTS), max_size=30), st.integers(0, 30))
def test_surveys_add_up(texts, cut):
    whole, parts = survey(texts), merged(survey(texts[cut:]), survey(texts[:cut]))
    assert parts == whole
    one, other = collapse(whole, Limits()), collapse(parts, Limits())
    assert json.dumps(one.facts) == json.dumps(other.facts)
    assert one.markdown == other.markdown


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_percentiles_match_numpy_without_interpolation(numbers):
    found = survey([with_tool(*["x"] * number) for number in numbers])
    wanted = {f"p{each}": np.percentile(numbers, each, method="inverted_cdf") for each in (50, 90, 99)}
    assert collapse(found, Limits()).facts["calls_per_row"] == wanted


def test_most_frequent_first_then_alphabetical():
    tools = [f"t{number:02}" for number in range(25)]
    texts = [unanswered(tool) for tool in reversed(tools)] + [unanswered("t24")]
    facts = collapse(survey(texts), Limits()).facts
    assert list(facts["tool_sequences"].items()) == [("t24", 2), *((tool, 1) for tool in tools[:19])]
    assert facts["distinct_tool_sequences"] == 25


def test_data_text_is_confined_to_its_cell():
    assert "| a&#124;b&#95;&#42;c | 1 |" in collapse(survey([unanswered("a|b_*c")]), Limits()).markdown


def test_without_rows_there_is_a_report_as_well():
    found = collapse(survey([]), Limits())
    assert found.facts["calls_per_row"] == {}
    assert "| share empty | 0.0000 |" in found.markdown
