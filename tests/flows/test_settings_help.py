"""What `--help` says of groups of settings that are off until one of them is set."""

import pytest
from tokenmill.tasks.described import describe
from tokenmill.tasks.shards.kinds import preparation


@pytest.mark.parametrize(
    ("kind", "group", "required"),
    [
        ("pretrain", "fim", []),
        ("filter", "language", ["model", "keep"]),
        ("filter", "classifiers", ["model", "keep", "name"]),
    ],
)
def test_optional_groups_are_off_unless_set(kind, group, required):
    rows = {each.key: each for each in describe(preparation(kind).settings) if each.key.startswith(f"{group}.")}
    assert next(iter(rows.values())).meaning.endswith(f"{group} is off unless set.")
    assert not any(each.required for each in rows.values())
    assert {key.partition(".")[2] for key, each in rows.items() if "Required within" in each.meaning} == {*required}
    assert not any(
        "off unless set" in each.meaning
        for each in describe(preparation(kind).settings)
        if each.key.startswith("tokenizer.")
    )
