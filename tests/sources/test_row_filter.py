"""Row filters: which rows are kept, and that one wish has one spelling."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.sources.row_filter import RowFilter, row_filter


def kept(record, used_in=None, **filters):
    return row_filter(DataSource(name="a", path="/a", used_in=used_in, filters=filters)).keeps(record)


MATCHES = [
    ("nano_v3", ["nano_v3", "super_v3,nano_v3", " super_v3 ,\tnano_v3\n", ["super_v3", "nano_v3"]]),
    ("a,b", ["a,b"]), ("", [""]), (3, [3, 3.0, [1, 3]]), (True, [True]), (["off", "on"], ["on"]), ("on", [["on", None]]),
    (["x", "b"], ["a, b", ["a", "b"]]), (["x", 1, True], [1, True]),
]  # fmt: skip
DIFFERS = [
    ("nano_v3", ["super_v3;nano_v3", ["super_v3,nano_v3"], [["nano_v3"]], [], None, {"nano_v3": 1}]),
    ("nano", ["nano_v3"]), ("nano_v3.1", ["nano_v3"]), ("NANO_V3", ["nano_v3"]), ("a,b", ["a, b"]), ("a", [""]),
    (3, [3.5, "3", "3,4"]), ("3", [3]), (True, [False, 1, [1], "true"]), (1, [True]), (False, [0]),
    (["off", "auto"], ["on"]), (["1", True], [1]),
]  # fmt: skip
"""Wanted values, and fields that match them, or don't."""


@pytest.mark.parametrize(("table", "matches"), [(MATCHES, True), (DIFFERS, False)])
def test_values_match_filters(table, matches):
    for wanted, fields in table:
        for found in fields:
            assert kept({"field": found}, field=wanted) == matches, (found, wanted)


def test_a_row_without_the_field_is_not_kept():
    assert not kept({}, field="a")
    assert not kept({"fields": "a"}, field="a")


def test_all_filters_must_match():
    wanted = {"reasoning": "on", "level": [1, 2]}
    assert kept({"reasoning": "on", "level": 2}, **wanted)
    assert not kept({"reasoning": "on", "level": 3}, **wanted)
    assert not kept({"reasoning": "off", "level": 2}, **wanted)
    assert not kept({"level": 2}, **wanted)


def test_used_in_is_a_filter_on_the_field_of_that_name():
    assert kept({"used_in": ["super_v3", "nano_v3"]}, used_in="nano_v3")
    assert not kept({"used_in": ["super_v3"]}, used_in="nano_v3")
    assert not kept({}, used_in="nano_v3")
    assert not kept({"used_in": ["nano_v3"], "level": 2}, used_in="nano_v3", level=1)
    assert not kept({"used_in": ["super_v3"], "level": 1}, used_in="nano_v3", level=1)


def test_dots_lead_into_objects():
    values = ["a", ["b", "a"], "b"]
    assert [kept({"meta": {"source": {"name": each}}}, **{"meta.source.name": "a"}) for each in values] == [
        True,
        True,
        False,
    ]
    for meta in ({"source": "a"}, {"source": None}, [{"source": {"name": "a"}}], None):
        assert not kept({"meta": meta}, **{"meta.source.name": "a"})
    assert not kept({"meta.source.name": "a"}, **{"meta.source.name": "a"})


def test_the_fields_are_those_that_deciding_needs():
    source = DataSource(name="a", path="/a", used_in="x", filters={"meta.level": 1, "on": True})
    assert sorted(row_filter(source).fields) == ["meta.level", "on", "used_in"]


values = st.lists(st.one_of(st.booleans(), st.integers(-2, 2), st.sampled_from(["", "a", "1", "True"])), min_size=1)


@given(st.dictionaries(st.sampled_from("abc"), values), st.randoms())
def test_one_wish_has_one_spelling(filters, random):
    """It is part of a shard's identity: as JSON the same however the wish was written, and itself again from JSON."""
    shuffled = {field: random.sample(wanted * 2, 2 * len(wanted)) for field, wanted in filters.items()}
    turned = dict(reversed(shuffled.items()))
    one, other = (row_filter(DataSource(name="a", path="/a", filters=each)) for each in (filters, turned))
    text = json.dumps(asdict(one), sort_keys=True)
    assert text == json.dumps(asdict(other), sort_keys=True)
    assert RowFilter(**json.loads(text)) == one
    assert one.wanted.keys() == filters.keys()
    for field, wanted in filters.items():
        assert {repr(value) for value in one.wanted[field]} == {repr(value) for value in wanted}
