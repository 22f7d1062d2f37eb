"""Pools: each row is where its columns say, the file is checked whole, and the books add up."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony.columns import SCHEMA
from tokenmill.tasks.select.pools import Assignment, added, assign, load_pools, manifest, tally

SOUND = {"quality_valid_harmony": True, "quality_completion_nonempty": True, "quality_valid_tool_schema": True}

ROWS = [
    (
        {"meta_domain": "math", "meta_difficulty_bin": "high", "meta_correctness_high": 0.875, "meta_correctness": 0.875,
         "meta_correctness_own": 0.875, "source_changed_answer_to_majority": False, "quality_has_tool": False,
         "stats_token_len": 16384},
        "math_high_verified_correct anchor long_context high_correctness has_correctness_meta no_tool",
    ),
    (
        {"meta_domain": "math", "meta_difficulty_bin": "high", "meta_correctness_high": 0.874, "meta_correctness": 0.874,
         "meta_correctness_own": 0.25, "stats_completion_tokens": 4096, "quality_has_tool": True,
         "stats_token_len": 16383},
        "challenge hard_solvable tool_use mid_correctness has_correctness_meta",
    ),
    (
        {"meta_domain": "math", "meta_difficulty_bin": "medium", "meta_correctness_high": 1.0, "meta_correctness": 0.25,
         "meta_correctness_own": 0.0, "stats_completion_tokens": 5000},
        "challenge low_correctness has_correctness_meta",
    ),
    ({"meta_correctness_own": 0.125, "stats_completion_tokens": 4095}, "hard_solvable missing_correctness_meta"),
    (
        {"meta_correctness_own": 0.9, "source_changed_answer_to_majority": True, "meta_correctness": 0.2500001},
        "mid_correctness has_correctness_meta",
    ),
    ({"meta_correctness_own": 0.9}, "anchor missing_correctness_meta"),
    (
        {"meta_domain": "agentic", "num_tool_calls": 3, "quality_has_tool": True},
        "agentic_multi_call tool_use missing_correctness_meta",
    ),
    ({"meta_domain": "agentic", "num_tool_calls": 2}, "missing_correctness_meta"),
    ({"meta_domain": "math", "num_tool_calls": 9}, "missing_correctness_meta"),
    ({"split": "structured_outputs"}, "structured_outputs missing_correctness_meta"),
    (
        {"source_capability_target": "structured_outputs", "source_reasoning": "off"},
        "capability_structured_outputs reasoning_off missing_correctness_meta",
    ),
    (
        {"source_capability_target": "chat", "source_reasoning": "on"},
        "capability_chat reasoning_on missing_correctness_meta",
    ),
    ({"meta_domain": "proof"}, "proof missing_correctness_meta"),
    ({"meta_correctness": 1.0, "quality_valid_harmony": False}, ""),
    ({"meta_correctness": 1.0, "quality_completion_nonempty": None}, ""),
    ({"meta_correctness": 1.0, "quality_valid_tool_schema": False}, ""),
]  # fmt: skip
"""What differs from a sound row, and the pools it is in, in their order."""

TABLE = pa.Table.from_pylist([SOUND | row for row, _ in ROWS], SCHEMA)
WANTED = [names.split() for _, names in ROWS]


def rows_of(assignment, pool):
    return assignment.pools[assignment.names.index(pool)]


def pools_of(found, row):
    return [name for name in found.names if rows_of(found, name)[row]]


def test_every_bundled_pool_takes_the_rows_it_describes():
    pools = load_pools()
    found = assign(TABLE, pools)
    listed = [sorted(names, key=pools.names.index) for names in WANTED]
    assert [pools_of(found, row) for row in range(len(ROWS))] == listed
    assert found.base.tolist() == [bool(names) for names in WANTED]
    assert {name for names in WANTED for name in names} == set(pools.names)


def test_columns_that_a_file_has_not_are_null_in_pools_and_not_asked_in_the_base():
    small = TABLE.select(["quality_valid_harmony", "meta_domain", "split"])
    found = assign(small, load_pools(), SCHEMA.names)
    missing = [row != 13 for row in range(len(ROWS))]
    assert found.base.tolist() == missing
    assert rows_of(found, "missing_correctness_meta").tolist() == missing
    assert not rows_of(found, "has_correctness_meta").any()
    assert not rows_of(found, "no_tool").any()
    assert np.flatnonzero(rows_of(found, "proof")).tolist() == [12]
    with pytest.raises(InputError, match=r"pools\.yaml: base\[1\]: .*unknown field 'quality_completion_nonempty'"):
        assign(small, load_pools())


def test_a_table_without_rows_has_empty_masks():
    pools = load_pools()
    found = assign(TABLE.slice(0, 0), pools).unique()
    assert found.pools.shape == (len(pools.pools), 0)
    assert not found.overlap().any()


def written(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    return str(tmp_path / "mine.yaml")


def pool(name="a", predicate="b", more=""):
    return f"- {{name: {name}, description: d, predicate: {predicate}{more}}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pools:\n" + pool(predicate="b and"), r"mine\.yaml: pool 'a': at its end: expected a field"),
        ("base: ['b =']\npools:\n" + pool(), r"mine\.yaml: base\[0\]: character 3, before '=': .*write =="),
        ("pools:\n" + pool() + pool("A"), "two pools are called 'a' and 'A'"),
        ("pools:\n" + pool() + pool(), "two pools are called 'a' and 'a'"),
        ("pools:\n" + pool("../a"), r"pools\[0\]\.name: not a safe name"),
        ("pools:\n" + pool(more=", predicates: c"), r"pools\[0\]\.predicates: unknown key; did you mean 'predicate'"),
        ("pools:\n" + pool(predicate="true"), r"pools\[0\]\.predicate: .*string.*got True"),
        ("pools: []", "pools: .*at least 1"),
        ("base: [b]", "pools: missing"),
        ("pool:\n" + pool(), "pool: unknown key; did you mean 'pools'"),
        ("- a", "must be a mapping with `base` and `pools`"),
        ("", "must be a mapping"),
        ("pools: [", "invalid YAML: .*line 1"),
        ("pools: !!python/object/apply:os.getcwd []", "invalid YAML: could not determine a constructor"),
        ("pools:\n- name: a\n  description: d\n  predicate: b\n  name: c\n  predicate: d",
         "invalid YAML: the key 'name' is duplicated.*line 5"),
        ("pools:\n" + pool() + "pools:\n" + pool(), "the key 'pools' is duplicated.*line 3"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_found_before_any_row_is_read(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load_pools(written(tmp_path, text))


def test_missing_pools_file_is_reported(tmp_path):
    with pytest.raises(InputError, match=r"gone\.yaml: no such file; check the path of the pools"):
        load_pools(str(tmp_path / "gone.yaml"))
    with pytest.raises(InputError, match="cannot read the pools"):
        load_pools(str(tmp_path))


many = st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=40)


@given(many)
def test_pools_of_one_row_each_are_the_first_and_overlaps_are_counted(rows):
    inside = np.array(rows, bool).reshape(-1, 3).T
    found = Assignment(("a", "b", "c"), np.ones(len(rows), bool), inside)
    pairs = [[sum(row[one] and row[other] for row in rows) for other in range(3)] for one in range(3)]
    assert found.overlap().tolist() == pairs
    alone = found.unique()
    firsts = [next((place for place, inner in enumerate(row) if inner), -1) for row in rows]
    assert alone.pools.T.tolist() == [[number == first for number in range(3)] for first in firsts]
    assert np.array_equal(alone.unique().pools, alone.pools)


def books(table, pools, *, unique):
    found = assign(table, pools)
    return tally(table, found, found.unique() if unique else found)


@given(st.integers(0, len(ROWS)), st.booleans())
def test_counts_of_parts_add_up(cut, unique):
    pools = load_pools()
    parts = [books(part, pools, unique=unique) for part in (TABLE.slice(0, cut), TABLE.slice(cut))]
    whole = manifest(pools, books(TABLE, pools, unique=unique), {})
    assert manifest(pools, added(parts, len(pools.pools)), {}) == whole
    assert whole["base_rows"] == sum(map(bool, WANTED))
    if unique:
        counted = sum(each["rows"] for each in whole["pools"].values())
        assert counted + whole["rows_in_no_pool"] == whole["base_rows"]


def test_missing_token_counts_are_reported():
    pools = load_pools()
    table = TABLE.drop_columns(["stats_token_len"])
    found = assign(table, pools, SCHEMA.names)
    proof = manifest(pools, tally(table, found, found), {})["pools"]["proof"]
    assert (proof["rows"], proof["tokens"], proof["rows_without_tokens"]) == (1, 0, 1)
