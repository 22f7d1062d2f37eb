"""What a person wrote in YAML is read whole, or refused in one line."""

import pytest
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.yaml_text import read_mapping


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
