"""Placeholders: a row that names a question elsewhere is made whole, nothing else of it changes, no other row does."""

import copy
import json
from itertools import count

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.rl.placeholders import placeholder_of, resolve_placeholders
from tokenmill.tasks.rl.tables import LookupColumn, LookupTable, TableSource, find_table, load_table
from tokenmill.tasks.sources.exact_json import compact
from tokenmill.tasks.sources.slices import ContentIndex

from tests.examples import max_examples
from tests.peers.placeholder_fill import fill, fill_question, read_rows

REMINDER = 'Remember to put your answer on its own line after "Answer:".'


def table(style, *pairs):
    """A table whose rows are `pairs` of question and answer."""
    questions, answers = zip(*pairs, strict=True)
    return LookupTable(style, column(questions), column(answers))


def column(texts):
    return LookupColumn([text or "" for text in texts], np.array([-1 if t is None else n for n, t in enumerate(texts)]))


def record(row=0, template=None, **fields):
    return {"dataset": "d", "_hf_placeholder": {"row": row, "question_template": template}, **fields}


def resolved(given, *pairs, style="dapo"):
    """What becomes of `given` with a table `d` of `pairs`, after a look that `given` is as it was."""
    before = copy.deepcopy(given)
    found = resolve_placeholders({"d": lambda: table(style, *pairs)})(given)
    assert given == before
    return found


def in_one_spelling(given):
    return orjson.dumps(given, option=orjson.OPT_SORT_KEYS)


def rejection(*arguments, **options):
    found = resolved(*arguments, **options)
    assert isinstance(found, Rejected)
    return found.reason, found.detail


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("34", "34"),
        (" 34\n", "34"),
        ("true", "true"),
        ("0.10", "0.10"),
        ('"34"', '"34"'),
        ("[34]", 34),
        ("[0.5]", 0.5),
        ("034", "034"),
        ("\\frac{1}{2}", "\\frac{1}{2}"),
        ("1, 2", "1, 2"),
        (" [1, 2]\n", 1),
        ('["\\\\frac{1}{2}", "0.5"]', "\\frac{1}{2}"),
        ("[[1, 2], 3]", [1, 2]),
        ("[false]", False),
        ("[0]", 0),
        ('{"b": "x", "a": "y"}', "x"),
        ('{"b": {"c": [1]}}', {"c": [1]}),
        ("[1, 2", "[1, 2"),
        ("(1, 2)", "(1, 2)"),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        ("1e999", "1e999"),
        ("[-Infinity, 1]", "[-Infinity, 1]"),
        ('{"a": [1, -1e400]}', '{"a": [1, -1e400]}'),
        ("[[null, 1]]", [None, 1]),
        ("[18446744073709551615]", 2**64 - 1),
        ("[18446744073709551616]", 2**64),
        ('"\\ud800"', '"\\ud800"'),
        ("[" * 300 + "]" * 300, "[" * 300 + "]" * 300),
        ("[" * 1010 + "]" * 1010, "[" * 1010 + "]" * 1010),
        ("[" * 3000 + "]" * 3000, "[" * 3000 + "]" * 3000),
    ],
)
def test_an_answer_is_the_first_value_of_json_and_else_the_text(text, answer):
    found = resolved(record(), ("q", text))["expected_answer"]
    assert (type(found), found) == (type(answer), answer)
    compact(found)


FIRST, LACKS = (
    ("p", "1"),
    "of the table has no answer; take the table that the row was made with, or leave the row out",
)
REJECTED = [
    *((record(1), ("q", text), "placeholder_without_answer", f"row 1 {LACKS}") for text in (None, "", "\n ", "[]", "{}", "[null]", '[""]', "[[]]", '{"a": null}')),
    (record(1), (None, "2"), "placeholder_without_question", "row 1 of the table has no question"),
    *((record(responses_create_params=given), ("q", "2"), "bad_request_params", "responses_create_params is a") for given in ([], "text", 5, True)),
    *((record(number), ("q", "2"), "placeholder_out_of_range", f"row is {number}, and the table has 2 rows") for number in (-1, 2, 3, 2**62, -(2**63))),
]  # fmt: skip


@pytest.mark.parametrize(("given", "pair", "reason", "said"), REJECTED)
def test_a_row_that_cannot_be_made_whole_is_rejected(given, pair, reason, said):
    found, detail = rejection(given, FIRST, pair)
    assert found == reason
    assert said in detail


@pytest.mark.parametrize(
    ("style", "template", "said"),
    [
        ("dapo", "{question}", "question_template is a string; make it an object with prefix or suffix"),
        ("dapo", ["a"], "question_template is an array"),
        ("dapo", {"prefix": 5}, "question_template.prefix is a number"),
        ("dapo", {"prefix": "a", "suffix": ["b"]}, "question_template.suffix is an array"),
        ("dapo", {"template": "{question}"}, "has 'template' instead of prefix or suffix; check the style"),
        ("skywork", 5, "question_template is a number; make it a text with {question}"),
        ("skywork", ["{question}"], "question_template is an array"),
        ("skywork", {"template": False}, "question_template.template is a boolean"),
        ("skywork", {"prefix": "a", "template": None}, "has 'prefix', 'template' instead of template"),
    ],
)
def test_a_template_that_the_style_cannot_fill_is_rejected(style, template, said):
    reason, detail = rejection(record(template=template), FIRST, style=style)
    assert reason == "malformed_placeholder"
    assert said in detail


FULL = record(
    1,
    {"prefix": "A"},
    id=7,
    question="old",
    agent_ref={"type": "responses_api_agents", "name": "math"},
    verifier_metadata={"a": [1, {"b": None}]},
    uuid="u",
    responses_create_params={
        "metadata": {"source": "x"},
        "input": [{"role": "system", "content": "old"}],
        "temperature": 0.7,
        "tools": [{"type": "function", "name": "f"}],
    },
)


def test_other_fields_of_a_row_are_unchanged():
    found = resolved(FULL, ("p", "1"), ("q", "2"))
    params = {**FULL["responses_create_params"], "input": [{"role": "user", "content": "A\n\nq"}]}
    kept = {name: value for name, value in FULL.items() if name != "_hf_placeholder"}
    assert found == {**kept, "question": "A\n\nq", "expected_answer": "2", "responses_create_params": params}
    names = [*kept]
    assert [*found] == [*names, "expected_answer"]
    assert [*found["responses_create_params"]] == ["metadata", "input", "temperature", "tools"]
    null = resolved(record(responses_create_params=None), ("q", "2"))
    assert null["responses_create_params"] == {"input": [{"role": "user", "content": "q"}]}


def unused():
    raise AssertionError("the table is not needed")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"messages": []},
        {"dataset": "elsewhere", "_hf_placeholder": None, "responses_create_params": 5},
        {"dataset": "d", "_hf_placeholder": {"row": None, "question_template": None}},
        {"dataset": "d", "_hf_placeholder": {"row": None, "question_template": {"prefix": None}}},
        {"dataset": "d", "_hf_placeholder": {}},
    ],
)
def test_row_without_placeholder_is_the_same_object(given):
    before = copy.deepcopy(given)
    assert resolve_placeholders({"d": unused})(given) is given
    assert given == before
    assert not placeholder_of(given)


@pytest.mark.parametrize(
    ("placeholder", "said"),
    [
        ({"row": True}, "_hf_placeholder.row is a boolean"),
        ({"row": "0"}, "_hf_placeholder.row is a string"),
        ({"row": 0.0}, "_hf_placeholder.row is a number"),
        ({"row": [0]}, "_hf_placeholder.row is an array"),
        ({"row": None, "question_template": "{question}"}, "_hf_placeholder.row is null"),
        ({"question_template": "{question}"}, "_hf_placeholder.row is null"),
        (0, "_hf_placeholder is a number; make it an object with row and question_template"),
        (False, "_hf_placeholder is a boolean"),
        ("", "_hf_placeholder is a string"),
        ([], "_hf_placeholder is an array"),
    ],
)
@pytest.mark.parametrize("style", ["dapo", "skywork"])
def test_placeholder_without_row_is_rejected(placeholder, said, style):
    given = {"dataset": "d", "_hf_placeholder": placeholder}
    assert placeholder_of(given)
    reason, detail = rejection(given, ("p", "1"), style=style)
    assert reason == "malformed_placeholder"
    assert said in detail


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ({"dataset": "nano_dapo18k"}, "dataset is 'nano_dapo18k', which isn't a table; did you mean 'nano_dapo17k'?"),
        ({"dataset": None}, "dataset is null, which isn't a table; known: nano_dapo17k, skywork"),
        ({"dataset": ["skywork"]}, "dataset is an array"),
        ({}, "dataset is null"),
    ],
)
def test_a_row_of_an_unknown_table_is_rejected(dataset, said):
    given = {"_hf_placeholder": {"row": 0}, **dataset}
    found = resolve_placeholders({"nano_dapo17k": unused, "skywork": unused})(given)
    assert found.reason == "unknown_placeholder_table"
    assert said in found.detail
    assert "give resolve_placeholders a table with that name" in found.detail


def test_each_table_is_called_for_once_and_only_when_it_is_needed():
    calls = []

    def load():
        calls.append("d")
        return table("dapo", ("q", "1"))

    resolve = resolve_placeholders({"d": load, "other": unused})
    assert resolve({}) == {}
    assert calls == []
    assert [resolve(record())["question"] for _ in range(3)] == ["q"] * 3
    assert calls == ["d"]


def test_rows_do_not_share_mutable_state():
    resolve = resolve_placeholders({"d": lambda: table("dapo", ("q", "[[1, [2]]]"))})
    first, second = resolve(record()), resolve(record())
    first["expected_answer"][1].append(3)
    first["responses_create_params"]["input"][0]["content"] = "changed"
    assert second["expected_answer"] == [1, [2]]
    assert second["responses_create_params"]["input"] == [{"role": "user", "content": "q"}]


QUESTION_PARTS = st.lists(st.sampled_from(["\n\n", "\n", "a", "{question}", "語", " "]), min_size=1, max_size=9)
TEXTS = st.one_of(st.none(), st.sampled_from(["", "A ", " Z", "A\n\n", "\n"]), st.text(max_size=4))
PLAIN = st.one_of(st.integers(-(2**63), 2**63), st.booleans(), st.text(min_size=1, max_size=5), st.floats(-1e9, 1e9))
ANSWERS = st.one_of(
    st.sampled_from(["34", "034", "\\sqrt{2}", '["3"]', "x, y", "[1", "{}x"]),
    PLAIN.map(json.dumps),
    st.lists(PLAIN, min_size=1, max_size=3).map(json.dumps),
    st.dictionaries(st.text(max_size=3), PLAIN, min_size=1, max_size=3).map(json.dumps),
)
TEMPLATES = {
    "dapo": st.one_of(st.none(), st.fixed_dictionaries({}, optional={"prefix": TEXTS, "suffix": TEXTS})),
    "skywork": st.one_of(
        TEXTS,
        st.lists(st.sampled_from(["{question}", "Q: ", "\n"]), max_size=3).map("".join),
        st.fixed_dictionaries({"template": st.sampled_from(["{question}", "<{question}>{question}", "none", None])}),
    ),
}
PARAMS = st.dictionaries(st.sampled_from(["input", "temperature", "tools", "metadata"]), st.just([1]), max_size=4)
FIELDS = st.fixed_dictionaries(
    {}, optional={"id": st.integers(-9, 9), "question": TEXTS, "responses_create_params": st.one_of(st.none(), PARAMS)}
)


def filled_rows(style):
    """A style, and some rows of it: question and answer in the table, template and fields of the row."""
    row = st.tuples(QUESTION_PARTS.map("".join), ANSWERS, TEMPLATES[style], FIELDS)
    return st.tuples(st.just(style), st.lists(row, min_size=1, max_size=6))


SCHEMA = pa.schema(
    {
        "prompt": pa.list_(pa.struct({"content": pa.string(), "role": pa.string()})),
        "reward_model": pa.struct({"ground_truth": pa.string(), "style": pa.string()}),
    }
)
numbered = count()


def stored(path, pairs):
    rows = [
        {
            "prompt": [{"content": question, "role": "user"}, {"content": "more", "role": "user"}],
            "reward_model": {"ground_truth": answer, "style": "rule"},
        }
        for question, answer in pairs
    ]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path, row_group_size=5)
    return path


@given(case=st.sampled_from(["dapo", "skywork"]).flatmap(filled_rows))
@example(case=("dapo", [("a\n\n\nb\n\nc", "0", {"prefix": "A"}, {})]))
@max_examples(150)
def test_random_rows_match_a_plain_fill(tmp_path_factory, case):
    style, rows = case
    path = tmp_path_factory.getbasetemp() / f"random{next(numbered)}.parquet"
    stored(path, [(question, answer) for question, answer, _, _ in rows])
    files = find_table(TableSource(path=str(path), style=style), "d", ContentIndex(), "mtime")
    loaded, peer = load_table(files), read_rows(path)
    path.unlink()
    resolve = resolve_placeholders({"d": lambda: loaded})
    for number, (_, answer, template, fields) in enumerate(rows):
        given = record(number, template, **fields)
        filled = resolve(given)
        if isinstance(filled, Rejected):
            assert (filled.reason, answer) == ("placeholder_without_answer", '""')
            continue
        # As bytes, because 1, 1.0 and true are equal to Python and different to whoever reads the file.
        assert in_one_spelling(filled) == in_one_spelling(fill(given, peer, style))


@given(given=st.dictionaries(st.sampled_from(["id", "dataset", "_hf_placeholder"]), st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(["row", "question_template", "prefix", "template"]), inner, max_size=3),
    ),
    max_leaves=6,
)), style=st.sampled_from(["dapo", "skywork"]))  # fmt: skip
@max_examples(300)
def test_any_row_is_returned_made_whole_or_rejected_with_a_sentence(given, style):
    given = {**given, "dataset": given.get("dataset") or "d"}
    found = resolved(given, ("q", "1"), style=style)
    if not placeholder_of(given):
        assert found is given
    elif isinstance(found, Rejected):
        assert found.detail
    else:
        assert found["expected_answer"] == "1"
        assert "_hf_placeholder" not in found


# Placeholders of Nemotron 3 Ultra and 3.5 Lightning.

DAPO, SKYWORK = ("BytedTsinghua-SIA/DAPO-Math-17k", "train"), ("Skywork/Skywork-OR1-RL-Data", "math")
DAPO_WRAPPED = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    f"(without quotes) where $Answer is the answer to the problem.\n\n%s\n\n{REMINDER}"
)


def masked(source, row=0, **placeholder):
    dataset, split = source
    asked = {"input": [{"role": "user", "content": "masked"}, {"role": "user", "content": "kept"}], "temperature": 1.0}
    placeholder = {"dataset": dataset, "split": split, "row": row, **placeholder}
    return {"id": 7, "dataset": "other", "_hf_question_placeholder": placeholder, "responses_create_params": asked}


def unmasked(given, dapo=(), skywork=()):
    before = copy.deepcopy(given)
    tables = {DAPO: table("dapo", *dapo) if dapo else None, SKYWORK: table("skywork", *skywork) if skywork else None}
    found = resolve_placeholders({"/".join(name): lambda held=held: held for name, held in tables.items()})(given)
    assert given == before
    return found


def test_masked_question_returns_to_its_position():
    """The row and what becomes of it are those of upstream's own test of this."""
    given = masked(DAPO, mode="canonical", lead="Work carefully:\n", trail="\nPut the result in a box.")
    given |= {"question": "masked", "expected_answer": "masked"}
    given["matched_sources"] = [{"expected_answer": "masked", "name": "dapo"}, {"name": "none"}]
    asked = "Work carefully:\nWhat is 40 + 2?\nPut the result in a box."
    assert unmasked(given, [(DAPO_WRAPPED % "What is 40 + 2?", "42")]) == {
        "id": 7,
        "dataset": "other",
        "question": asked,
        "expected_answer": "42",
        "responses_create_params": {
            "input": [{"role": "user", "content": asked}, {"role": "user", "content": "kept"}],
            "temperature": 1.0,
        },
        "matched_sources": [{"expected_answer": "42", "name": "dapo"}, {"name": "none"}],
    }


def test_masked_row_without_prompt_has_only_its_question():
    given = {"_hf_question_placeholder": masked(SKYWORK, prefix="[", suffix="]")["_hf_question_placeholder"]}
    assert unmasked(given, skywork=[("question", '["answer"]')]) == {
        "question": "[question]",
        "expected_answer": "answer",
    }


ENDS = st.sampled_from(["", " ", "\n\n", "x", "Answer:"])
ASKED = st.sampled_from(["1 + 1?", "é {1, 2}", f"a {REMINDER} b", DAPO_WRAPPED % "twice", " \n blanks \t"])
ANSWERED = st.sampled_from(
    ["42", " 7\n", '["5"]', "[5, 6]", "[1.50]", "[true]", "{1, 2}", '{"a": 1}', "[]", "[[1]]", "(0, 1]"]
)


@given(
    source=st.sampled_from([DAPO, SKYWORK]),
    question=ASKED,
    wrapped=st.booleans(),
    answer=ANSWERED,
    row=st.sampled_from([1, "1"]),
    mode=st.sampled_from([{}, {"mode": "canonical"}, {"mode": "wrapped"}]),
    ends=st.dictionaries(st.sampled_from(["lead", "trail", "prefix", "suffix"]), ENDS),
)
@max_examples(300)
def test_a_masked_question_is_filled_in_as_by_someone_else(source, question, wrapped, answer, row, mode, ends):
    question = DAPO_WRAPPED % question if wrapped else question
    given = masked(source, row, **mode, **ends) | {"matched_sources": [{"expected_answer": None}]}
    rows = [None, {"prompt": [{"content": question}], "reward_model": {"ground_truth": answer}}]
    pairs = [("unused", "1"), (question, answer)]
    found = unmasked(given, **{"dapo" if source is DAPO else "skywork": pairs})
    assert in_one_spelling(found) == in_one_spelling(fill_question(given, {source: rows}))


@pytest.mark.parametrize(
    ("placeholder", "pair", "reason", "said"),
    [
        ({"split": "test"}, ("q", "1"), "unknown_placeholder_table", "did you mean 'BytedTsinghua-SIA/DAPO-Math-17k/train'?"),
        ({"row": 1}, ("q", "1"), "placeholder_out_of_range", "_hf_question_placeholder.row is 1"),
        ({"row": "one"}, ("q", "1"), "malformed_placeholder", "_hf_question_placeholder.row is a string"),
        ({"row": True}, ("q", "1"), "malformed_placeholder", "_hf_question_placeholder.row is a boolean"),
        ({"prefix": 5}, ("q", "1"), "malformed_placeholder", "_hf_question_placeholder.prefix is a number"),
        ({}, ("q", None), "placeholder_without_answer", "row 0"),
        ({}, ("q", " "), "placeholder_without_answer", "row 0"),
        ({}, (" \n", "1"), "placeholder_without_question", "row 0"),
        ({}, (None, "1"), "placeholder_without_question", "row 0"),
    ],
)  # fmt: skip
def test_a_masked_question_that_is_nowhere_is_rejected(placeholder, pair, reason, said):
    found = unmasked(masked(DAPO, **placeholder), [pair])
    assert isinstance(found, Rejected)
    assert found.reason == reason
    assert said in found.detail


def test_a_row_whose_question_is_not_masked_is_returned_as_it_is():
    for placeholder in (None, {"dataset": None, "row": None}):
        given = {"_hf_question_placeholder": placeholder, "question": "q"}
        assert unmasked(given) is given
    for placeholder in (5, "x", []):
        found = unmasked({"_hf_question_placeholder": placeholder})
        assert found.reason == "malformed_placeholder"
        assert "make it an object with dataset, split and row" in found.detail
