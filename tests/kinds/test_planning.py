"""Plans of every kind ask for what changed, say why, and for nothing else; and bad rows end a run that is to be strict."""

import json
import os
import re
from pathlib import Path

import pytest
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.report.plan import pending_reasons
from tokenmill.tasks.shards.kinds import preparation

from tests.kinds.preparations import CHANGES_NO_BYTE, LONG_AGO
from tests.preparing import pending, tree
from tests.preparing_sft import CHATML

pytestmark = pytest.mark.slow


def owned(data, shard_size):
    """The lines that begin in each slice, by its start."""
    found, place = {}, 0
    for line in data.splitlines(keepends=True):
        found.setdefault(place // shard_size * shard_size, []).append(line)
        place += len(line)
    return found


def elsewhere(prepared, value):
    return json.loads(json.dumps(value).replace(f"{prepared.folder}/", f"{prepared.folder}-moved/"))


def test_a_plan_asks_for_everything_at_first_and_then_for_nothing(prepared):
    first = prepared.plan()
    assert pending_reasons(first) == {"new": len(first.plan.shards)}
    prepared.run()
    for name, value in [*CHANGES_NO_BYTE.items(), ("on_bad_row", "fail")]:
        assert pending(prepared.plan(**{name: value})) == [], name
    for path in prepared.folder.rglob("*.jsonl"):
        os.utime(path)
    assert pending(prepared.plan()) == []
    assert [shard.key for shard in prepared.plan(force=True).plan.pending] == [
        shard.key for shard in first.plan.pending
    ]


HELD_OUT = {"holdout": {"valid": 0.5, "test": 0}}
LOSS = {
    "loss_on": "last_turn", "loss_reasoning": False, "loss_empty_reasoning": False, "loss_tool_calls": False,
    "loss_end_of_turn": False,
}  # fmt: skip
REBUILDS = {
    "pretrain": {"special_tokens_in_text": "allow", "min_doc_chars": 3, "max_doc_tokens": 9, **HELD_OUT},
    "sft": {
        "special_tokens_in_text": "reject", "chat_template": f"{CHATML}\n", "template_variables": {"keep_reasoning": True},
        "split_turns": "never", **LOSS, **HELD_OUT,
    },
    "rl": {"target": "none", "compression": "zstd", **HELD_OUT},
    "harmony": {
        "effort": "high", "keep_reasoning": "keep_all", "parallel_calls": "grouped", "special_strings": "escape", "trailing": "reject",
        "disabled_rules": ["S18"], "min_completion_chars": 9, "cross_check": 0.5, "messages_json": True,
    },
    "dedup": {"near": False, "cap_by": "other", "id_field": "id"},
    "filter": {"rules": ["c4"], "gopher_quality": {"min_doc_words": 21}, "personal": {"emails": "mask"}},
    "nll": {"token_budget": 999, "precision": "bfloat16", "max_length": 99, **LOSS},
    "embeddings": {"dimensions": 8, "field": "text"},
}  # fmt: skip
"""Settings by kind, each with a value that its preparation does not have, which ask for every shard anew."""

LEAVES = {"chat_template": "template", "holdout": "holdout_valid", "gopher_quality": "rules", "field": "fields"}
"""What settings are called in recipes, where it is something else."""

KEEPS = {
    "pretrain": {"prefix_size": 5_000},
    "sft": {"pack_size": 300, "packing": "concatenative", "on_oversize": "truncate", "pad_seq_to_mult": 4, "sampling": "up", "seed": 43,
            "allow_text_markers": True},
    "rl": {"batch_size": 4, "seed": 43, "tokenizer": {"model": "/nowhere"}},
    "harmony": {"proofs": "both", "dedup": {"mode": "off"}, "selection": {"view": "none"}},
    "dedup": {"mode": "tag", "threshold": 0.9, "cap": 2},
    "filter": {"gopher_repetition": {"dup_line_frac": 0.5}, "c4": {"remove_lines": True}, "fineweb": {"line_punct_thr": 0.5}},
    "nll": {"device": "cpu"},
    "embeddings": {"device": "cpu", "token_budget": 999, "max_tokens": 99},
}  # fmt: skip
"""Those that ask for no shard anew, with all that the kind does without: rules that are off, a tokenizer that counts nothing."""

OF_THEIR_OWN = {
    "pretrain": {"tokenizer", "fim"},
    "sft": {"tokenizer"},
    "rl": {"transforms", "splits", "val_holdout", "max_tokens", "sampling", "curriculum"},
    "harmony": {"holdout"},
    "dedup": {"evaluations", "holdout"},
    "filter": {"language", "classifiers", "holdout"},
    "nll": {"model", "model_revision", "server", "concurrency", "engine", "chat_template", "tokenizer", "holdout"},
    "embeddings": {"model", "model_revision", "server", "concurrency", "precision", "engine", "pooling", "holdout"},
}
"""Those that concern some shards, need others beside them, or mean nothing to the kind: they have tests of their own."""

WHICH_ROWS_AND_WHERE = {"shard_size", "store", "change_detection", "scale", "sample", "force", "previous", "on_bad_row"}


def test_every_setting_is_known_to_change_bytes_or_not_to(prepared):
    kind = prepared.kind
    known = {*REBUILDS[kind], *KEEPS[kind], *CHANGES_NO_BYTE, *OF_THEIR_OWN[kind], *WHICH_ROWS_AND_WHERE}
    assert known == {*preparation(kind).settings.model_fields}
    prepared.run()
    for name, value in REBUILDS[kind].items():
        changed = prepared.plan(**{name: value})
        assert len(changed.plan.pending) == len(changed.plan.shards), name
        (reason,) = pending_reasons(changed)
        leaf = LEAVES.get(name, name).replace("_", "[_.]")
        assert re.search(rf"recipe\.(\w+\.)*{leaf}(\.\w+)* changed: .* -> ", reason)
    for name, value in KEEPS[kind].items():
        assert pending(prepared.plan(**{name: value})) == [], name
    keys = {*prepared.plan().plan.keys}
    prepared.run(force=True, **KEEPS[kind], **{**CHANGES_NO_BYTE, "cluster": "auto"})
    shards = {name for name in prepared.whole if keys & {*name.split("/")}}
    found = tree(prepared.out)
    assert shards
    assert {name for name in shards if found[name] != prepared.whole[name]} == set()


def test_moved_sources_build_nothing(prepared):
    prepared.run()
    moved = prepared.folder.with_name(f"{prepared.folder.name}-moved")
    blend, settings = prepared.blend, prepared.settings
    prepared.folder.rename(moved)
    try:
        prepared.blend, prepared.settings = elsewhere(prepared, blend), elsewhere(prepared, settings)
        prepared.out = moved / "out"
        assert pending(prepared.plan()) == []
    finally:
        moved.rename(prepared.folder)
        prepared.blend, prepared.settings, prepared.out = blend, settings, prepared.folder / "out"


@pytest.mark.parametrize("change", ["a row", "a row more", "rows more"])
def test_a_changed_file_costs_the_slices_that_changed(prepared, change):
    prepared.run(shard_size=prepared.slices)
    sources = [Path(shard.part.file.uri) for shard in prepared.plan().plan.shards]
    path = max((path for path in sources if path.suffix == ".jsonl"), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    *_, row = (line for line in content.splitlines(keepends=True) if b'": ' in line)
    middle = content.index(b'": ', len(content) // 2)
    more = {"a row": 0, "a row more": 1, "rows more": 3}[change]
    rows = [row.replace(b'": ', b'": ' + b" " * number, 1) for number in range(1, more + 1)]
    changed = content + b"".join(rows) if more else content[:middle] + b'":\t' + content[middle + 3 :]
    before, after = owned(content, prepared.slices), owned(changed, prepared.slices)
    path.write_bytes(changed)
    planned = prepared.plan(shard_size=prepared.slices)
    path.write_bytes(content)
    os.utime(path, LONG_AGO)
    assert len(before) > 1
    assert pending(planned) == [(path.name, start) for start in after if after[start] != before.get(start)]
    assert pending_reasons(planned).keys() <= {"source content changed", "new"}


@pytest.mark.parametrize("built", [False, True])
def test_a_strict_run_ends_at_a_bad_row(prepared, built):
    """Whether its shards are there from a run that set bad rows aside, or not yet."""
    reasons = "|".join(prepared.dropped)
    words = rf"{prepared.folder}/\S+\.jsonl:\d+: ({reasons}): .*on_bad_row=quarantine"
    if built:
        prepared.run()
        words = rf"rows are bad \(({reasons}) .*0 are allowed"
    before = tree(prepared.out)
    with pytest.raises(RunError, match=words):
        prepared.run(on_bad_row="fail")
    assert {name for name in before if tree(prepared.out)[name] != before[name]} <= {"manifest.json"}
    assert built or not (prepared.out / "blend.json").exists()
