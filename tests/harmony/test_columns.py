"""Rows have the columns that readers of Harmony data know, in their order, and more after them."""

import hashlib
import io
import json
import math
import re

import pytest
from pyarrow import parquet
from tokenmill.tasks.harmony.columns import SCHEMA, Place, row, table
from tokenmill.tasks.harmony.compose import compose
from tokenmill.tasks.harmony.converters import CONVERTERS
from tokenmill.tasks.harmony.message import Policy, Source
from tokenmill.tasks.harmony.semantics import judged

from tests.harmony import rows

PUBLISHED = """
    id string, dataset string, split string, text string, loss_mode string, quality_valid_harmony bool,
    quality_completion_nonempty bool, quality_has_tool bool, quality_valid_tool_schema bool, stats_char_len int64,
    meta_domain string, meta_difficulty_bin string, source_uuid string, source_license string,
    source_used_in list<element: string>, source_data_source string, source_changed_answer_to_majority bool,
    source_capability_target string, source_reasoning string, source_tools_id string, source_tools_count int64,
    meta_correctness double, meta_eval_best_setting string, meta_pass_k int64, meta_correct_count int64,
    meta_correctness_low double, meta_correctness_medium double, meta_correctness_high double,
    meta_correctness_high_with_tool double, meta_correctness_high_no_tool double
"""
"""The columns of Harmony datasets that are published, with the types that their readers see."""

PLACE = Place("nvidia/Nemotron-Math-v2", "high_part00", "high.part_00.jsonl", 41)


def made(name="math_v2", given=rows.MATH, place=PLACE, *, structured=False):
    found = CONVERTERS[name](given, place.split)
    found = compose(found, Policy()) if isinstance(found, Source) else found
    valid, _ = judged(found, frozenset(), 1, None)
    return row(place, valid, found.facts, found.messages if structured else None)


def test_the_first_columns_are_those_that_are_known():
    published = re.findall(r"(\w+) ([^,]+?)(?:,|\n*$)", " ".join(PUBLISHED.split()))
    assert len(published) == 30
    file = io.BytesIO()
    parquet.write_table(table([made()]), file)
    read = parquet.read_schema(file)
    assert [(field.name, str(field.type)) for field in read][:30] == published
    assert all(field.nullable for field in read)


@pytest.mark.parametrize("name", sorted(rows.GOOD))
def test_every_row_round_trips_through_the_schema(name):
    made_rows = [made(name, given, Place("d", split, "f", 0)) for given, split in rows.GOOD[name]]
    assert all(list(each) == SCHEMA.names for each in made_rows)
    assert table(made_rows).to_pylist() == made_rows


@pytest.mark.parametrize(
    ("dataset", "domain"),
    [
        ("nvidia/Nemotron-Math-v2", "math"),
        ("nvidia/Nemotron-Math-Proofs-v1", "proof"),
        ("nvidia/Nemotron-Science-v1", "science"),
        ("nvidia/Nemotron-Agentic-v1", "agentic"),
        ("nvidia/Nemotron-Instruction-Following-Chat-v1", "chat_if"),
        ("radna0/nemotron-math-v2-harmony-tools", "math"),
        ("nvidia/Nemotron-SWE-v1", None),
    ],
)
def test_the_domain_is_in_the_name_of_the_dataset(dataset, domain):
    assert made(place=Place(dataset, "low", "f", 0))["meta_domain"] == domain


def test_equal_values_that_differ_keep_their_differences():
    rates = [0.0, -0.0, 0.0]
    found = table([made() | {"meta_correctness": rate} for rate in rates])
    assert found["meta_correctness"].to_pylist() == rates
    assert [math.copysign(1, rate) for rate in found["meta_correctness"].to_pylist()] == [1, -1, 1]


def test_a_row():
    found = made()
    text = found["text"]
    assert found["id"] == hashlib.sha1(text.encode()).hexdigest()
    assert found["prompt_id"] == hashlib.sha1(text[: text.index("<|start|>assistant")].encode()).hexdigest()
    assert (found["dataset"], found["split"]) == ("nvidia/Nemotron-Math-v2", "high_part00")
    assert (found["source_file"], found["source_row"]) == ("high.part_00.jsonl", 41)
    assert found["loss_mode"] == "assistant_all"
    assert found["stats_char_len"] == len(text)
    assert (found["meta_domain"], found["meta_difficulty_bin"], found["meta_effort"]) == ("math", "high", "high")
    assert (found["meta_correctness_own"], found["meta_difficulty"]) == (0.25, "hard")
    assert (found["num_messages"], found["num_tool_calls"], found["num_tool_results"]) == (8, 1, 1)
    assert found["quality_valid_harmony"] is True
    assert found["quality_is_duplicate"] is found["dup_of"] is found["messages_json"] is None


def test_an_id_is_the_text_s_and_a_row_id_the_row_s():
    one, two = made(), made(place=Place("d", "high", "high.part_00.jsonl", 42))
    assert one["id"] == two["id"]
    places = [
        PLACE,
        Place("d", *["high", "f", 1]),
        Place("d", "high", "f", 2),
        Place("d", "high", "g", 1),
        Place("e", "high", "f", 1),
    ]
    assert len({made(place=place)["row_id"] for place in places}) == len(places)


def test_rows_that_ask_the_same_have_one_prompt():
    other = {**rows.MATH_PLAIN, "messages": [rows.MATH["messages"][0], {"role": "assistant", "content": "\\boxed{2}"}]}
    assert made(given=rows.MATH_PLAIN)["prompt_id"] == made(given=other)["prompt_id"] != made()["prompt_id"]


def test_characters_are_counted_and_not_bytes():
    text = rows.HARMONY["text"].replace("Hello", "é👍")
    assert made("harmony_text", {"text": text})["stats_char_len"] == len(rows.HARMONY["text"]) - len("Hello") + 2


def test_messages_as_json():
    found = json.loads(made("harmony_text", rows.HARMONY, structured=True)["messages_json"])
    assert [each["body"] for each in found] == ["Reasoning: low", "Hi", "Hello"]
    assert found[2] == {"author": "assistant", "channel": "final", "body": "Hello", "terminator": "return"}


def test_unknown_columns_are_rejected():
    valid, _ = judged(CONVERTERS["harmony_text"](rows.HARMONY, ""), frozenset(), 1, None)
    with pytest.raises(KeyError, match="meta_colour"):
        row(PLACE, valid, {"meta_colour": "blue"})
