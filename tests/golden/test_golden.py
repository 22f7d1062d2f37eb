"""Keys, receipts, manifests and published bytes of the tiny blends are those recorded in `recorded.json.xz`.

A change that is meant to alter none of them leaves this green. Otherwise, say so in the commit and record anew:

    .venv/bin/python -m tests.golden.test_golden

Every path begins with /proc/self/cwd, the folder that a process works in, so no record depends on where it was made. Not recorded:
what receipts and manifests declare volatile, memories of a store (its index and gates), pages and cards, and the bytes of scores,
whose sums depend on the processor.
"""

import json
import lzma
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from tokenmill.tasks.score.choice import ChoiceSettings, choose_rows
from xxhash import xxh3_128_hexdigest

from tests.building import prepare_here

HERE = "/proc/self/cwd"
REPOSITORY = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("recorded.json.xz")
SLOW = pytest.mark.slow
TINY = f"{HERE}/blends/tiny.json"
TALK = f"{HERE}/blends/tiny-sft.json"
OLD = "77edf30"
HELD_OUT = {"holdout": {"valid": 0.2, "test": 0.1}}
HOLES = {
    "rate": 0.5,
    **{f"{part}_token": f"<|reserved_20000{n}|>" for n, part in enumerate(("prefix", "middle"))},
    "suffix_token": "<|reserved_200004|>",
}
PIECES = {"shard_size": 4_000, **HELD_OUT}
SUMS = {"name": "sums", "path": f"{HERE}/blends/tiny/sums.jsonl.gz", "text_field": "body.text"}
PHASED = {
    "datasets": [{"name": "paragraphs", "path": f"{HERE}/blends/tiny/paragraphs.jsonl"}, SUMS],
    "tokens": 6_000,
    "phases": [{"name": "main", "share": 0.7, "mix": {"sums": 1}}, {"name": "end", "share": 0.3}],
}

CASES = {
    "pretrain": ("pretrain", TINY, {}, SLOW),
    "pretrain in pieces": ("pretrain", TINY, {**PIECES, "prefix_size": 4_000}, SLOW),
    "pretrain with holes": ("pretrain", TINY, {"fim": HOLES, "max_doc_tokens": 40}, SLOW),
    "pretrain in phases": ("pretrain", PHASED, HELD_OUT, SLOW),
    "sft": ("sft", TALK, {}, SLOW),
    "sft in pieces": ("sft", TALK, {**PIECES, "pack_size": 256, "sampling": "down"}, SLOW),
    "sft of last answers": ("sft", TALK, {"loss_on": "last_turn", "pad_seq_to_mult": 8, "sampling": "up"}, SLOW),
    "rl": ("rl", f"{HERE}/blends/tiny-rl.json", {"target": "nemo_gym", **PIECES}),
    "rl of preferences": ("rl", f"{HERE}/blends/tiny-dpo.json", {"target": "nemo_rl_dpo"}),
    "harmony": ("harmony", f"{HERE}/blends/tiny-harmony.json", {}, SLOW),
    "harmony in pieces": ("harmony", f"{HERE}/blends/tiny-harmony.json", {"shard_size": 4_000}, SLOW),
    "dedup": ("dedup", TINY, {}),
    "dedup that tags": ("dedup", TINY, {"mode": "tag", "shard_size": 4_000}),
    "filter": (
        "filter",
        TINY,
        {"shard_size": 4_000, "rules": ["gopher_quality"], "gopher_quality": {"min_doc_words": 30}},
    ),
    "embeddings": ("embeddings", f"{HERE}/blends/tiny/candidates.jsonl", {"dimensions": 16, "shard_size": 1_000}),
    "nll": ("nll", f"{HERE}/old/data/scored.jsonl", {"model": f"{HERE}/old/model", "shard_size": 1_000}, SLOW),
    "choose": ("choose", f"{HERE}/embeddings", {"rows": 6}),
}
"""A preparation by name: its kind, the blend or file, settings, and marks."""

FLOATS = ("embeddings", "nll", "choose")
"""Kinds whose published bytes depend on the processor's sums."""

OLD_STORES = {
    "pretrain": (f"{HERE}/blends/pretrain/tiny.json", "out", {}),
    "dedup": (f"{HERE}/blends/pretrain/tiny.json", "dedup", {"mode": "tag"}),
}
"""The kinds whose shards an earlier version wrote in today's format: a blend, the folder of the store, and settings."""

CASE_MARKS = [pytest.param(name, marks=case[3:]) for name, case in CASES.items()]


def write_sources():
    """The bundled blends and the sources of an earlier version, in the working folder."""
    shutil.copytree(REPOSITORY / "blends", "blends")
    with tarfile.open(REPOSITORY / f"tests/upgrades/{OLD}.tar.xz") as archive:
        archive.extractall("old", filter="data")


def prepare(name):
    """Prepare a case into a folder of its name; the folder's record: of each file its fields, or size and hash."""
    kind, blend, settings, *_ = CASES[name]
    out = Path(name.replace(" ", "-"))
    if kind == "choose":
        prepare("embeddings")
        choose_rows(blend, f"{HERE}/{out}", ChoiceSettings(**settings))
    else:
        prepare_here(kind, blend, f"{HERE}/{out}", **settings)
    return {str(path.relative_to(out)): content(path, kind) for path in sorted(out.rglob("*")) if counts(path)}


def counts(path):
    return path.is_file() and path.name not in {"index.json", "tables.json"} and path.parent.name != "gates"


def content(path, kind):
    """A receipt or manifest without its volatile part; of other files the size and hash."""
    data = path.read_bytes()
    if path.name not in {"receipt.json", "manifest.json"}:
        return {} if kind in FLOATS else {"size": len(data), "xxh3_128": xxh3_128_hexdigest(data)}
    fields = json.loads(data)
    fields.pop("volatile")
    for file in fields.get("outputs", []) + fields.get("files", []) if kind in FLOATS else []:
        file.update(size="?", xxh3_128="?")
    return fields


def leaves(value, place=""):
    """The plain values in JSON as Python spells them, by place."""
    if isinstance(value, (dict, list)) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {
            at: leaf for name, each in pairs for at, leaf in leaves(each, f"{place}: {name}" if place else name).items()
        }
    return {place: repr(value)}


def differences(recorded, found):
    """What differs, a line each: `FILE: FIELD: recorded VALUE, now VALUE`."""
    old, new = leaves(recorded), leaves(found)
    places = [place for place in {**old, **new} if old.get(place) != new.get(place)]
    order = [] if places or list(old) == list(new) else ["the order of fields"]
    return order or [f"{each}: recorded {old.get(each, 'nothing')}, now {new.get(each, 'nothing')}" for each in places]


@pytest.fixture(scope="module")
def recorded():
    return json.loads(lzma.decompress(RECORDED.read_bytes()))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_sources()
    return folder


@pytest.mark.parametrize("name", CASE_MARKS)
def test_everything_published_is_as_recorded(name, recorded, sources, monkeypatch):
    if recorded["pyarrow"] != pa.__version__:
        pytest.skip(f"recorded with pyarrow {recorded['pyarrow']}, which writes other Parquet files")
    monkeypatch.chdir(sources)
    found = differences(recorded[name], prepare(name))
    assert not found, f"{name} has {len(found)} differences:\n" + "\n".join(found[:40])


@pytest.mark.slow
@pytest.mark.parametrize("kind", OLD_STORES)
def test_shards_of_an_earlier_version_are_reused(kind, sources, monkeypatch):
    monkeypatch.chdir(sources / "old")
    blend, folder, settings = OLD_STORES[kind]
    planned, _ = prepare_here(
        kind, blend, f"{HERE}/again-{kind}", unbuildable, store=f"{HERE}/{folder}/shards", **settings
    )
    assert planned.plan.shards


def unbuildable(step, pending, *_, **__):
    """Stands for the building of shards; there must be none to build."""
    assert list(pending) == [], step
    return ()


DAMAGES = {
    "a key": lambda record: record["manifest.json"]["shards"][0].update(key="0" * 32),
    "a file that is gone": lambda record: record.pop("train/data.bin"),
    "a number with a different type": lambda record: record["train/data.bin"].update(size=1.0),
    "the order of fields": lambda record: record.update({"manifest.json": record.pop("manifest.json")}),
    "a list that is longer": lambda record: record["manifest.json"]["shards"].append({}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_differences_are_found(damage):
    before, after = (
        {"manifest.json": {"shards": [{"key": "1"}], "totals": {}}, "train/data.bin": {"size": 1, "xxh3_128": "2"}}
        for _ in range(2)
    )
    assert differences(before, after) == []
    DAMAGES[damage](after)
    assert differences(before, after)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_sources()
        record = {"pyarrow": pa.__version__, **{name: prepare(name) for name in CASES}}
    RECORDED.write_bytes(lzma.compress(json.dumps(record).encode(), preset=9))
