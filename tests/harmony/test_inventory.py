import json
import re
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.harmony.columns import SCHEMA
from tokenmill.tasks.harmony.inventory import (
    MAX_NAME_LENGTH,
    MAX_NAMES,
    OTHER,
    Entry,
    bounded,
    coverage_markdown,
    coverage_of,
    fields_of,
    inventory,
    merged,
)

NAMES = st.sampled_from(["a", "b", "messages", "role", "é"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False), st.text(max_size=3))
MESSAGES = st.dictionaries(st.sampled_from(["role", "content", "name"]), SCALARS | st.just("user"), max_size=3)
VALUES = SCALARS | st.lists(MESSAGES | SCALARS, max_size=3) | st.dictionaries(NAMES, SCALARS, max_size=2)
RECORDS = st.lists(st.dictionaries(NAMES, VALUES, max_size=4), max_size=8)


def json_type(value):
    """The type as JSON text shows it, with whole numbers told from others."""
    text = json.dumps(value)
    if text[0] in '"{[tfn':
        return {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}[text[0]]
    return "number" if any(sign in text for sign in ".eN") or "Inf" in text else "integer"


def counted(objects):
    """Fields and types of objects, counted one by one."""
    found = Counter((name, json_type(value)) for each in objects for name, value in each.items())
    return {name: {kind: n for (of, kind), n in found.items() if of == name} for name, _ in found}


@given(RECORDS)
def test_every_field_of_every_record_is_counted_by_its_json_type(records):
    found = fields_of(records)
    assert found["records"] == len(records)
    assert found["fields"] == counted(records)
    lists = [record["messages"] for record in records if isinstance(record.get("messages"), list)]
    messages = [message for each in lists for message in each if isinstance(message, dict)]
    assert found.get("message_fields", {}) == counted(messages)
    roles = Counter(each["role"] if isinstance(each.get("role"), str) else OTHER for each in messages)
    assert found.get("roles", {}) == roles


def test_parquet_only_types_keep_their_names():
    assert fields_of([{"a": b"x"}])["fields"] == {"a": {"bytes": 1}}


def rows(**columns):
    length = max(map(len, columns.values()), default=0)
    filled = {name: columns.get(name, [None] * length) for name in SCHEMA.names}
    return pa.table(filled, SCHEMA)


@given(st.lists(st.none() | st.integers(0, 70) | st.integers(0, 2**31 - 1), max_size=20))
def test_lengths_are_counted_between_powers_of_two(lengths):
    found = coverage_of(rows(stats_token_len=lengths, stats_completion_tokens=lengths[::-1]))
    known = [length for length in lengths if length is not None]
    assert sum(found["tokens"].values()) == len(known)
    assert found["tokens"] == found["completion_tokens"]
    for bound, count in found["tokens"].items():
        low = int(bound)
        assert count == sum(low <= length < 2 * low or length == low for length in known)


def test_every_non_null_value_counts():
    table = rows(id=["x", None, ""], meta_correctness=[0.0, 1.0, None], source_used_in=[[], None, ["a"]])
    table = pa.concat_tables([table, table])
    found = coverage_of(table)
    assert found["rows"] == 6
    assert list(found["columns"]) == SCHEMA.names
    assert {name: n for name, n in found["columns"].items() if n} == {
        "id": 4,
        "meta_correctness": 4,
        "source_used_in": 4,
    }


def test_an_empty_table_and_no_records_count_nothing():
    found = coverage_of(SCHEMA.empty_table())
    assert (found["rows"], found["tokens"], set(found["columns"].values())) == (0, {}, {0})
    assert fields_of([]) == {"records": 0, "fields": {}}


@given(RECORDS, RECORDS, RECORDS)
def test_counts_add_up_in_any_order_and_grouping(one, two, three):
    a, b, c = fields_of(one), fields_of(two), fields_of(three)
    before = json.dumps([a, b, c])
    whole = fields_of([*one, *two, *three])
    assert merged(merged(a, b), c) == merged(a, merged(b, c)) == merged(merged(c, a), b) == whole
    assert merged({}, a) == merged(a, {}) == a
    assert json.dumps([a, b, c]) == before, "what was added up was changed"
    assert json.loads(json.dumps(whole)) == whole


@given(st.lists(st.integers(0, 300), max_size=10), st.integers(0, 10))
def test_tables_add_up_to_the_whole_table(lengths, cut):
    table = rows(stats_token_len=lengths, stats_completion_tokens=lengths, id=["x" if n % 2 else None for n in lengths])
    assert merged(coverage_of(table[:cut]), coverage_of(table[cut:])) == coverage_of(table)


def test_very_many_names_are_bounded_and_none_is_lost():
    many = fields_of([{f"id{number}": number, "text": "x"} for number in range(MAX_NAMES + 50)])
    few = bounded(many)
    assert len(few["fields"]) == MAX_NAMES + 1
    assert few["fields"]["text"] == {"string": MAX_NAMES + 50}
    assert few["fields"][OTHER] == {"integer": 51}
    assert few["records"] == many["records"]


def test_a_name_that_is_a_text_is_among_the_others():
    found = fields_of([{"messages": [{"role": "user"}, {"role": "x" * (MAX_NAME_LENGTH + 1)}, {"role": 7}]}])
    assert bounded(found)["roles"] == {"user": 1, OTHER: 2}


def test_small_values_are_not_bounded():
    found = fields_of([{"messages": [{"role": "user", "content": None}], "a": 1.5}])
    assert bounded(found) == found


def entry(dataset="math", split="high", rows_in=10, drops=None, lengths=(100, 200), **more):
    table = rows(
        stats_token_len=list(lengths), stats_completion_tokens=[1] * len(lengths), meta_correctness=[0.5, *[None] * 10][: len(lengths)]
    )  # fmt: skip
    drops = {"filtered": rows_in - len(lengths)} if drops is None else drops
    fields = fields_of([{"problem": "x", "messages": [{"role": "user", "content": "x"}]}] * rows_in)
    return Entry(dataset, split, rows_in, len(lengths), sum(lengths), drops, fields, coverage_of(table), **more)


def test_inventory_separates_splits_and_datasets():
    found = inventory([entry(), entry("chat", "train", 3, lengths=(5,)), entry(split="low"), entry(lengths=(3000,))])
    assert [(name, list(splits)) for name, splits in found.items()] == [("chat", ["train"]), ("math", ["high", "low"])]
    high = found["math"]["high"]
    assert (high["rows_in"], high["rows_out"], high["tokens"]) == (20, 3, 3300)
    assert high["drops"] == {"filtered": 17}
    assert high["source"]["fields"] == {"messages": {"array": 20}, "problem": {"string": 20}}
    assert high["source"]["roles"] == {"user": 20}
    assert high["metadata"] == {"meta_correctness": pytest.approx(2 / 3, abs=1e-6)}
    assert list(high["lengths"]["tokens"].items()) == [("64", 1), ("128", 1), ("2048", 1)]
    assert high["columns"]["stats_token_len"] == 3
    assert json.loads(json.dumps(found)) == found


def test_an_inventory_does_not_depend_on_the_order_of_shards():
    entries = [
        entry(lengths=(1, 2), drops={"x": 1}),
        entry(lengths=(900,), drops={"a": 1}),
        entry(split="b"),
        entry("a"),
    ]
    assert json.dumps(inventory(entries)) == json.dumps(inventory(entries[::-1]))


def test_shard_without_output_has_an_entry():
    found = inventory([Entry("a", "train", 4, 0, 0, {"empty": 4})])
    assert found["a"]["train"]["rows_in"] == 4
    assert found["a"]["train"]["metadata"] == {}
    assert "| a | train | 4 | 0 | 4 | 0 |" in coverage_markdown(found)


def test_coverage_table_has_every_number():
    text = coverage_markdown(inventory([entry(rows_in=2000), entry("chat", "train", 3, lengths=(5,))]))
    lines = text.splitlines()
    for line in [
        "| math | high | 2,000 | 2 | 1,998 | 300 |",
        "| chat | train | 3 | 1 | 2 | 5 |",
        "## math, high",
        "| problem | string 2,000 |",
        "| content | string 2,000 |",
        "| user | 2,000 |",
        "| filtered | 1,998 |",
        "| meta_correctness | 50.0% |",
        "| 1 | 0 | 2 |",
        "| 128 | 1 | 0 |",
    ]:
        assert line in lines, text


def test_lengths_go_up():
    text = coverage_markdown(inventory([entry(lengths=(100, 16, 2, 5, 1000))]))
    bounds = [line.split(" ")[1] for line in text.split("| tokens from |")[1].splitlines()[2:] if line]
    assert bounds == ["1", "2", "4", "16", "64", "512"]


@pytest.mark.parametrize("hostile", ["a|b", "a\n\n# b", "a\\|b", "a\r| x |", "<script>", "`a", "a\u2028b"])
def test_no_name_of_a_source_breaks_a_table(hostile):
    fields = fields_of([{hostile: 1}])
    lines = coverage_markdown(inventory([Entry("a", "train", 1, 0, 0, {}, fields)])).split("\n")
    start = lines.index("| field of the source | types |")
    row, end = lines[start + 2 : start + 4]
    assert re.fullmatch(r"\| (?:[^|\\`<\s]| )+ \| integer 1 \|", row), row
    assert end == ""
