"""A file that mixes two forms of rows is read as one table, half of it empty: such a split is refused."""

import pytest
from tokenmill.tasks.errors import RunError

from tests.preparing_rl import lines_of, prepare, write_rows
from tests.rl.test_targets import A, B, ranks

RANKED = [ranks([A], [B]) for _ in range(3)]
PAIRS = [{"prompt": f"q{number}", "chosen": "a", "rejected": "b"} for number in range(3)]
QUESTIONS = [{"input": f"q{number}", "output": "1"} for number in range(3)]
CHATS = [
    {"messages": [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": "1"}]}
    for number in range(3)
]


def sources(tmp_path, one, other, **keys):
    paths = {name: write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in (("one", one), ("other", other))}
    return [{"name": name, "path": str(path), **(keys if name == "one" else {})} for name, path in paths.items()]


@pytest.mark.parametrize(
    ("target", "one", "other"), [("nemo_rl_dpo", PAIRS, RANKED), ("nemo_rl_grpo_math", QUESTIONS, CHATS)]
)
def test_split_with_two_forms_is_rejected_with_both_places(tmp_path, target, one, other):
    with pytest.raises(RunError, match=r"rows of train have different forms.*'one'.*'other'|'other'.*'one'"):
        prepare({"datasets": sources(tmp_path, one, other)}, tmp_path / "out", target=target)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_forms_may_differ_between_splits_and_where_nothing_reads_them(tmp_path):
    one, other = sources(tmp_path, PAIRS, RANKED)
    _, manifest = prepare({"train": [one], "valid": [other]}, tmp_path / "split", target="nemo_rl_dpo")
    assert [len(lines_of(manifest[key])) for key in ("train", "val")] == [3, 3]
    _, manifest = prepare({"datasets": [one, other]}, tmp_path / "any")
    assert len(lines_of(manifest["train"])) == 6


def test_a_transform_brings_forms_together(tmp_path):
    blend = {"datasets": sources(tmp_path, PAIRS, RANKED, transforms=["preference"])}
    _, manifest = prepare(blend, tmp_path / "out", target="nemo_rl_dpo")
    assert len(lines_of(manifest["train"])) == 6
