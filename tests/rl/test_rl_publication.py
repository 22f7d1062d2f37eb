"""Publication of rows: a whole file per split with the rows of all shards in the order of the plan, and names that never lie."""

import json
import random
from pathlib import Path

import pytest
import zstandard
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.rl.kind import JsonLinesLayout
from tokenmill.tasks.shards.plan import Finished, PlannedShard
from tokenmill.tasks.shards.publication import publish_preparation
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.receipt import PartCount, shard_key
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.sources.files import Slice, SourceFile

from tests.preparing import blend_of
from tests.preparing_rl import lines_of, prepare, write_rows
from tests.rl.test_targets import A, B, ranks

ENDINGS = {"none": "jsonl", "zstd": "jsonl.zst"}
WEIGHTS = {("datasets", "math"): 3.0, ("datasets", "code"): 1.0, ("datasets", "chat"): 2.0}
COUNTS = {"math": [6, 5, 9], "code": [16], "chat": [4, 11, 8, 7]}


def rows_of(dataset, number, part, count):
    """The rows of a part of a shard: every row says where it belongs."""
    return [f'{{"of": "{dataset}/{number}/{part}/{row}"}}'.encode() for row in range(count)]


def shard(store, dataset, number, parts, split="datasets", compression="none", content=None):
    """A shard with so many rows in each of its parts, built and proven; equal `content` makes equal keys."""
    content = content or f"{dataset}/{number}"
    recipe = {"compression": compression, "holds": parts}
    identity = {"kind": "rl", "format_version": 1, "recipe": recipe, "source": {"content": content}}
    key, outputs = shard_key(identity), []
    for part, count in parts.items():
        data = b"".join(row + b"\n" for row in rows_of(*content.split("/"), part, count))
        packed = zstandard.compress(data) if compression == "zstd" else data
        outputs.append(publish_bytes(store.path(key, f"{part}.{ENDINGS[compression]}"), packed))
    counts = {part: PartCount(count, 0) for part, count in parts.items()}
    receipt = store.issue(identity, outputs=outputs, rows_in=sum(parts.values()), parts=counts, drops={})
    part = Slice(SourceFile(f"/{dataset}.jsonl", 10, "jsonl"), number, number + 1)
    return Finished(PlannedShard(dataset, split, part, identity), key, receipt)


def made(place, counts=COUNTS, parts=("train",), **choices):
    """A store with the shards of datasets of so many rows each."""
    store = Store(str(place), "rl")
    return store, [
        shard(store, dataset, number, dict.fromkeys(parts, count), **choices)
        for dataset, counted in counts.items()
        for number, count in enumerate(counted)
    ]


def publish(out, store, finished, weights=WEIGHTS, compression="none", batches=None):
    header, volatile = {"type": "rl", "blend": {}, "missing": []}, {"store": store.place}
    layout = JsonLinesLayout(weights, compression, batches)
    return publish_preparation(str(out), store, finished, layout, PreparationSettings(), header, volatile)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return made(tmp_path_factory.mktemp("store") / "shards")


def listed(out, split="train"):
    """The files of blend.json, with their weights."""
    entries = json.loads((Path(out) / "blend.json").read_bytes())[split] or []
    return dict(zip(entries[1::2], map(float, entries[0::2]), strict=True))


def problems(out):
    return verify(str(out), inspector_of(str(out))).problems


def test_manifest_and_blend_name_every_shard_uniquely(tmp_path, built):
    store, finished = built
    manifest = publish(tmp_path, store, finished)
    names = [name for entry in manifest["shards"] for name in entry["published"]["train"]]
    assert [str(tmp_path / name) for name in names] == list(listed(tmp_path))
    assert [lines_of(tmp_path / name) for name in names] == [
        rows_of(item.shard.dataset, item.shard.part.start, "train", item.receipt.rows_in) for item in finished
    ]
    assert sorted(names) == names
    assert len(set(names)) == len(finished) == 8
    assert all(key[:8] in name for name, key in zip(names, [item.key for item in finished], strict=True))
    assert {file["path"] for file in manifest["files"]} == {"blend.json", f"splits/{Path(manifest['train']).name}"}


def test_datasets_weigh_as_in_the_blend_and_shards_by_rows(tmp_path, built):
    store, finished = built
    publish(tmp_path, store, finished)
    weights = list(listed(tmp_path).values())
    counts = [(WEIGHTS["datasets", name] / sum(each), count) for name, each in COUNTS.items() for count in each]
    assert weights == pytest.approx([share * count for share, count in counts])
    manifest = publish(tmp_path, store, finished, weights={**WEIGHTS, ("datasets", "chat"): 0.0})
    assert (len(listed(tmp_path)), len(manifest["shards"])) == (4, 8)


def test_equal_shards_are_all_there(tmp_path):
    """A file that two datasets name, or two files with the same rows, are built once and count twice."""
    store = Store(str(tmp_path / "shards"), "rl")
    finished = [
        shard(store, name, number, {"train": 3}, content="same/0") for name in ("math", "chat") for number in range(2)
    ]
    manifest = publish(tmp_path, store, finished)
    assert lines_of(manifest["train"]) == rows_of("same", 0, "train", 3) * 4
    assert [len(entry["published"]["train"]) for entry in manifest["shards"]] == [1] * 4
    assert sum(listed(tmp_path).values()) == pytest.approx(5)
    assert len(listed(tmp_path)) == 4
    assert problems(tmp_path) == []


def test_single_shard_split_is_linked(tmp_path):
    store = Store(str(tmp_path / "shards"), "rl")
    manifest = publish(tmp_path, store, [shard(store, "math", 0, {"train": 5, "valid": 3})])
    described = {file["path"]: file["size"] for file in manifest["files"]}
    for split, key, count in (("train", "train", 5), ("valid", "val", 3)):
        (name,) = listed(tmp_path, split)
        assert Path(manifest[key]).samefile(name)
        assert lines_of(manifest[key]) == rows_of("math", 0, split, count)
        assert described[f"splits/{Path(manifest[key]).name}"] == Path(name).stat().st_size
    assert problems(tmp_path) == []


def test_empty_input_is_published_empty(tmp_path):
    manifest = publish(tmp_path, Store(str(tmp_path / "shards"), "rl"), [])
    assert [manifest[key] for key in ("train", "val", "test")] == ["", "", ""]
    assert json.loads((tmp_path / "blend.json").read_bytes()) == {"train": None, "valid": None, "test": None}


# From one publication to the next.


def files(out):
    """The names that publication makes, with their contents."""
    folders = ("train", "valid", "test", "splits")
    return {
        str(path.relative_to(out)): path.read_bytes()
        for folder in folders
        for path in sorted((Path(out) / folder).glob("*"))
    }


def test_stale_names_are_removed_and_foreign_ones_kept(tmp_path):
    store, finished = made(tmp_path / "shards", parts=("train", "valid", "test"))
    publish(tmp_path, store, finished)
    strangers = [
        tmp_path / name for name in ("train/notes.jsonl", "splits/train.jsonl", "splits/data_00000_12345678.jsonl")
    ]
    for path in strangers:
        path.write_text("not ours")
    _, packed = made(tmp_path / "shards", {"math": [7, 8]}, compression="zstd")
    manifest = publish(tmp_path, store, packed, compression="zstd")
    assert set(files(tmp_path)) == {
        *(str(path.relative_to(tmp_path)) for path in strangers),
        *(name for entry in manifest["shards"] for name in entry["published"]["train"]),
        f"splits/{Path(manifest['train']).name}",
    }
    assert not (tmp_path / "valid").exists()
    assert all(path.read_text() == "not ours" for path in strangers)


def test_a_name_never_means_other_rows_than_before(tmp_path, built):
    store, finished = built
    numbers, meant, hashes = random.Random(1), {}, {}
    for _ in range(25):
        some = [item for item in finished if numbers.random() < 0.8]
        numbers.shuffle(some)
        manifest = publish(tmp_path, store, some)
        for name, content in files(tmp_path).items():
            assert meant.setdefault(name, content) == content
        if some:
            told = hashes.setdefault(manifest["run_hash"], lines_of(manifest["train"]))
            assert told == lines_of(manifest["train"])
    assert len(hashes) > 15


def test_run_hash_covers_exactly_the_published_rows(tmp_path, built):
    store, finished = built
    first = publish(tmp_path / "one", store, finished)["run_hash"]
    assert first == publish(tmp_path / "other", store, finished, weights=dict.fromkeys(WEIGHTS, 1.0))["run_hash"]
    assert first != publish(tmp_path / "other", store, finished[:-1])["run_hash"]
    assert first != publish(tmp_path / "other", store, finished[::-1])["run_hash"]


# Whole preparations.


ROWS = [{"id": number, "text": f"text {number}"} for number in range(300)]


@pytest.mark.parametrize(
    ("chosen", "mode"),
    [
        ({}, "passthrough"),
        ({"val_holdout": 5}, "local_split"),
        ({"transforms": [{"select": ["id"]}]}, "transform"),
        ({"splits": "source"}, "passthrough"),
    ],
)
def test_manifest_explains_the_rows(tmp_path, chosen, mode):
    write_rows(tmp_path / "in/rows/some.jsonl", ROWS[:20])
    _, manifest = prepare(blend_of(tmp_path / "in"), tmp_path / "out", **chosen)
    assert manifest["type"] == "rl"
    assert manifest["mode"] == mode
    assert manifest["source_splits"] == (["train"] if "splits" in chosen else [])
    assert Path(manifest["train"]).is_file()
    assert len(manifest["run_hash"]) == 8
    stored = json.loads((tmp_path / "out/manifest.json").read_bytes())
    assert [stored[key] for key in ("train", "val", "test", "mode", "run_hash")] == [
        manifest[key] for key in ("train", "val", "test", "mode", "run_hash")
    ]


# A file that mixes two forms of rows is read as one table, half of it empty: such a split is refused.


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
