"""Views and candidates: which text is embedded, which rows are asked, and that none is lost silently."""

import hashlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.blend.predicates import parse_predicate
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony.columns import SCHEMA as ROW_SCHEMA
from tokenmill.tasks.harmony.message import HarmonyMessage
from tokenmill.tasks.select.candidates import SCHEMA, Sample, candidates, sampled
from tokenmill.tasks.select.signature import behaviour_of, view_of

CALL = HarmonyMessage("assistant", "print()", recipient="python", channel="analysis", terminator="call")
ALL = Sample()
ANY_ROW = parse_predicate("true")


def by_assistant(body, channel):
    return HarmonyMessage("assistant", body, channel=channel)


TALK = [
    HarmonyMessage("system", "S"),
    HarmonyMessage("user", "  One?\n"),
    by_assistant("Think of one. ", "analysis"),
    CALL,
    HarmonyMessage("python", "out", recipient="assistant", channel="commentary"),
    by_assistant("Aside.", "commentary"),
    by_assistant("Answer one.", "final"),
    HarmonyMessage("user", " "),
    HarmonyMessage("user", "Two?"),
    by_assistant("Think of two.", "analysis"),
    by_assistant("Answer two.", "final"),
]


def test_prompt_is_all_user_text():
    assert view_of(TALK, "prompt") == "One?\n\nTwo?"
    assert view_of(TALK[:1], "prompt") == ""


def test_reasoning_is_thoughts_else_answers_else_anything_but_calls():
    assert view_of(TALK, "reasoning_excerpt") == "Think of one.\n\nThink of two."
    no_thoughts = [message for message in TALK if message.channel != "analysis" or message is CALL]
    assert view_of(no_thoughts, "reasoning_excerpt") == "Answer one.\n\nAnswer two."
    assert view_of([by_assistant(" ", "analysis"), by_assistant("A.", None)], "reasoning_excerpt") == "A."
    assert view_of(TALK[1:2] + TALK[3:6], "reasoning_excerpt") == "Aside."
    assert view_of([CALL], "reasoning_excerpt") == ""


def test_reasoning_ends_after_50_000_characters():
    long = [by_assistant("x" * 49_999, "analysis"), by_assistant("yz", "analysis")]
    assert view_of(long, "reasoning_excerpt") == "x" * 49_999 + "\n"


def test_behavior_is_the_trace():
    assert view_of(TALK, "behavior") == behaviour_of(TALK).trace


def harmony(question, answer="A."):
    return (
        f"<|start|>user<|message|>{question}<|end|><|start|>assistant<|channel|>final<|message|>{answer}<|return|>"
    )  # fmt: skip


ROWS = [
    {"id": "a", "text": harmony("One two?"), "split": "x", "meta_correctness": 0.5, "row_id": "r", "loss_mode": "m"},
    {"id": "b", "text": "<|start|>user<|message|>no end", "split": "x"},
    {"id": "c", "text": harmony(" "), "split": "x"},
    {"id": "d", "text": None, "split": "x"},
    {"id": "e", "text": harmony("Three?"), "split": "y"},
    {"id": "f", "text": "text", "split": None},
]
TABLE = pa.Table.from_pylist(ROWS, ROW_SCHEMA)


def test_rows_that_cannot_be_shown_are_dropped_by_reason():
    found = candidates(TABLE, "prompt", ANY_ROW, ALL)
    assert found.rows.schema == SCHEMA
    assert found.rows.select(["id", "embed_text", "stats_embed_word_count"]).to_pylist() == [
        {"id": "a", "embed_text": "One two?", "stats_embed_word_count": 2},
        {"id": "e", "embed_text": "Three?", "stats_embed_word_count": 1},
    ]
    assert found.drops == {
        "invalid_harmony:E04": 1,
        "empty_view": 1,
        "invalid_harmony:E13": 1,
        "invalid_harmony:E02": 1,
    }


def test_rows_that_are_not_asked_for_are_not_looked_at():
    found = candidates(TABLE, "prompt", parse_predicate("split == 'y'"), ALL)
    assert found.rows.column("id").to_pylist() == ["e"]
    assert found.drops == {"not_required": 5}
    nothing = candidates(TABLE, "prompt", parse_predicate("split == 'z'"), ALL)
    assert nothing.rows.schema == SCHEMA
    assert (nothing.rows.num_rows, nothing.drops) == (0, {"not_required": 6})


def test_columns_are_carried_along_and_null_where_there_are_none():
    first = candidates(TABLE, "behavior", ANY_ROW, ALL).rows.to_pylist()[0]
    assert {name: first[name] for name in ("split", "meta_correctness", "row_id", "loss_mode", "dataset")} == {
        "split": "x", "meta_correctness": 0.5, "row_id": "r", "loss_mode": "m", "dataset": None,
    }  # fmt: skip
    bare = pa.table({"id": pa.array(["a"], pa.large_string()), "text": [ROWS[0]["text"]]})
    found = candidates(bare, "prompt", parse_predicate("split is null"), ALL, known=["split"]).rows
    assert found.schema == SCHEMA
    assert found.select(SCHEMA.names[3:]).to_pylist() == [dict.fromkeys(SCHEMA.names[3:])]


def test_unknown_column_is_rejected():
    with pytest.raises(InputError, match="unknown field 'splitt'; did you mean 'split'"):
        candidates(TABLE, "prompt", parse_predicate("splitt == 'x'"), ALL)


def in_sample(name, modulus, keep):
    """The rule as others know it: the first eight hexadecimal digits of the SHA-1 of the id in lower case."""
    return int(hashlib.sha1(name.lower().encode()).hexdigest()[:8], 16) % modulus < keep


@given(st.lists(st.text(max_size=5)), st.integers(1, 20), st.data())
def test_a_sample_is_taken_by_the_hash_of_the_id(ids, modulus, data):
    keep = data.draw(st.integers(1, modulus))
    found = sampled(ids, Sample(modulus, keep))
    assert found.dtype == bool
    assert found.tolist() == [in_sample(each, modulus, keep) for each in ids]


@given(st.lists(st.sampled_from(range(len(ROWS))), max_size=30), st.integers(0, 30), st.integers(1, 4))
def test_parts_give_the_rows_of_the_whole_in_order_and_every_row_is_accounted_for(chosen, cut, keep):
    table = pa.Table.from_pylist([ROWS[number] | {"id": str(place)} for place, number in enumerate(chosen)], ROW_SCHEMA)
    require, sample = parse_predicate("split == 'x'"), Sample(4, keep)
    whole = candidates(table, "prompt", require, sample)
    parts = [candidates(part, "prompt", require, sample) for part in (table.slice(0, cut), table.slice(cut))]
    assert pa.concat_tables([part.rows for part in parts]).to_pylist() == whole.rows.to_pylist()
    assert parts[0].drops + parts[1].drops == whole.drops
    assert whole.rows.num_rows + whole.drops.total() == len(chosen)
    names = [str(place) for place, number in enumerate(chosen) if number == 0 and in_sample(str(place), 4, keep)]
    assert whole.rows.column("id").to_pylist() == names
