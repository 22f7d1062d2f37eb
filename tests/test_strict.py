"""Typed input and YAML: nothing that a person wrote is ignored, and every mistake is told in one line with its remedy."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.strict import Size, Strict, parse
from tokenmill.tasks.yaml_text import read_mapping


class Engine(Strict, frozen=True):
    power: float = Field(default=1.0, ge=0)
    fuel: str = "wind"


class Mill(Strict, frozen=True):
    name: str
    engine: Engine = Engine()
    stones: list[Engine] | None = None
    spare: Engine | None = None
    capacity: Size = 10


def mistakes(data, model=Mill):
    with pytest.raises(InputError) as refusal:
        parse(model, data, "mill.json")
    return str(refusal.value).splitlines()


@pytest.mark.parametrize(
    ("data", "mistake"),
    [
        ({"name": "a", "engin": {}}, "mill.json: engin: unknown key; did you mean 'engine'?"),
        ({"name": "a", "engine": {"powr": 1}}, "mill.json: engine.powr: unknown key; did you mean 'power'?"),
        ({"name": "a", "stones": [{}, {"feul": ""}]}, "mill.json: stones[1].feul: unknown key; did you mean 'fuel'?"),
        ({"name": "a", "spare": {"Power": 1}}, "mill.json: spare.Power: unknown key; did you mean 'power'?"),
        ({"name": "a", "engine": {"zzz": 1}}, "mill.json: engine.zzz: unknown key; known: fuel, power"),
        ({}, "mill.json: name: missing; give it a value"),
        ({"name": 5}, "mill.json: name: Input should be a valid string (got 5)"),
        ({"name": None}, "mill.json: name: Input should be a valid string (got None)"),
        ({"name": "a", "engine": {"power": -1}}, "mill.json: engine.power: Input should be greater than or equal to 0 (got -1)"),
        *(
            (
                {"name": "a", "engine": {"power": power}},
                f"mill.json: engine.power: Input should be a finite number (got {power})",
            )
            for power in (float("nan"), float("inf"), -float("inf"))
        ),
    ],
)  # fmt: skip
def test_mistake_names_location_value_and_remedy(data, mistake):
    assert mistakes(data) == [mistake]


def test_all_mistakes_are_reported_at_once():
    found = mistakes({"naem": "a", "engine": {"power": -1, "x": 1}, "stones": [{"fuel": 3}]})
    assert [line.split(": ")[1] for line in found] == ["name", "engine.power", "engine.x", "stones[0].fuel", "naem"]


@pytest.mark.parametrize("data", [None, [], "text", 5, [{}]])
def test_non_objects_are_rejected(data):
    (mistake,) = mistakes(data)
    assert mistake.startswith("mill.json: ")


@given(
    st.dictionaries(
        st.just("$schema") | st.text(max_size=8).map(lambda name: f"_{name}"), st.none() | st.integers() | st.text()
    )
)
def test_comments_are_dropped_at_any_level(comments):
    plain = {"name": "a", "engine": {"power": 2}, "stones": [{"fuel": "x"}]}
    commented = {**comments, "name": "a", "engine": {"power": 2, **comments}, "stones": [{**comments, "fuel": "x"}]}
    assert parse(Mill, commented, "mill.json") == parse(Mill, plain, "mill.json")


def test_the_schema_allows_comments_and_nothing_else_unknown():
    """Prefect's server checks parameters against the schema before our own checks run."""
    schema = Mill.model_json_schema()
    for part in (schema, schema["$defs"]["Engine"]):
        assert part["additionalProperties"] is False
        assert part["patternProperties"] == {r"^(_|\$schema$)": {}}
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize("spare", [2**64, -(2**63) - 1])
def test_integers_beyond_64_bits_are_rejected(spare):
    class Bin(Strict, frozen=True):
        grains: int | None = None

    (mistake,) = mistakes({"grains": spare}, Bin)
    assert mistake.startswith("mill.json: grains: more than 64 bits")
    assert parse(Bin, {"grains": 2**64 - 1}, "mill.json").grains == 2**64 - 1


def test_models_are_frozen():
    mill = parse(Mill, {"name": "a"}, "mill.json")
    with pytest.raises(ValueError, match="frozen"):
        mill.name = "b"


@pytest.mark.parametrize(
    ("written", "size"),
    [("256MB", 256_000_000), ("1GiB", 2**30), ("1.5 kB", 1500), ("7", 7), (1, 1), (2**40, 2**40), ("64mb", 64_000_000)],
)
def test_a_size_is_decimal_binary_or_plain_bytes(written, size):
    assert parse(Mill, {"name": "a", "capacity": written}, "mill.json").capacity == size


@pytest.mark.parametrize(
    "written",
    [
        *(0, -1, None, [], {}, float("nan")),
        *("0", "-5MB", "0.1", "many", "", "MB", "1,000MB", "64MB more", "1.5.3", "8 bit", "٣MB"),
    ],
)
def test_other_texts_are_not_sizes(written):
    (mistake,) = mistakes({"name": "a", "capacity": written})
    assert mistake.startswith("mill.json: capacity")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("a: 1\nb: 2\na: 3", "not valid YAML: the key 'a' is duplicated .*line 3"),
        ("a: {b: 1, b: 1}", "not valid YAML: the key 'b' is duplicated"),
        ("a: 2024-02-31", "not valid YAML: day is out of range for month"),
        ("a: 0x_", "not valid YAML: invalid literal"),
        ("a: !!int b", "not valid YAML: invalid literal"),
        ("a: !!bool b", "not valid YAML: 'b'"),
        ("a: !!timestamp b", "not valid YAML"),
        ("a: " + 3000 * "[", "not valid YAML: maximum recursion depth"),
        ("? [a]\n: b", "not valid YAML: .*unhashable key"),
        ("a: [", "not valid YAML"),
        (b"a: \xff", "not valid YAML"),
        ("", "must hold a mapping of stones"),
        ("- a", "must hold a mapping of stones"),
    ],
)
def test_yaml_mistakes_have_positions(text, mistake):
    with pytest.raises(InputError, match=f"mill.yaml: {mistake}") as refusal:
        read_mapping(text, "mill.yaml", "stones")
    assert "\n" not in str(refusal.value)


def test_times_are_text():
    text = "a: 12:30:00\nb: [1:30, -1:30, 1:30.5]\nc: 12\nd: 1.5\n1:30: e"
    assert read_mapping(text, "mill.yaml") == {
        "a": "12:30:00", "b": ["1:30", "-1:30", "1:30.5"], "c": 12, "d": 1.5, "1:30": "e"
    }  # fmt: skip


def test_merged_keys_are_not_duplicates():
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: [*b, *a], y: 3}\n1: e\n'1': f"
    assert read_mapping(text, "mill.yaml") == {
        "a": {"x": 1, "y": 1}, "b": {"x": 2, "y": 1}, "c": {"x": 2, "y": 3}, 1: "e", "1": "f"
    }  # fmt: skip
