"""Publication: a trainer finds all of it or none of it, under names that never meant anything else."""

import json
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.plan import Finished, PlannedShard
from tokenmill.tasks.shards.publication import Published, check_bad_rows, publish_preparation
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.receipt import PartCount, Receipt, shard_key
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.tokenize.kind import PRETRAIN, PairLayout

from tests import preparing_rl
from tests.building import plan_here, publish_here
from tests.faults.injection import count_operations, killed_at
from tests.forking import in_processes
from tests.preparing import blend_of, build_pending, prepare, tree, write_lines
from tests.shards.damage import flip

TEXTS = [f"document {number} says hello to the {number * 7919 % 1000}th world" for number in range(200)]
NO_HOLDOUT = {"valid": 0, "test": 0}


@pytest.fixture
def chosen(vocabulary):
    return {"tokenizer": {"model": str(vocabulary)}, "shard_size": 2000}


planned = partial(plan_here, "pretrain")


def read_blend(out):
    return json.loads((out / "blend.json").read_bytes())


def published(out):
    """The names that a trainer may see."""
    return {str(path.relative_to(out)) for split in ("train", "valid", "test") for path in (out / split).glob("*")}


def visible(out):
    """Everything that is published, with its content, less what is declared volatile."""
    files = {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and "shards" not in path.parts
    }
    manifest = json.loads(files["manifest.json"])
    manifest.pop("volatile")
    return {**files, "manifest.json": json.dumps(manifest, sort_keys=True)}


@pytest.mark.parametrize("nothing", [b"", ""], ids=["blank line", "empty document"])
def test_shards_without_documents_are_not_published(tmp_path, chosen, nothing):
    path = write_lines(tmp_path / "a.jsonl", [nothing] * 3000 + ["one document"])
    prepare(blend_of(path), tmp_path / "out", holdout=NO_HOLDOUT, **chosen)
    (_, prefix) = read_blend(tmp_path / "out")["train"]
    assert published(tmp_path / "out") == {f"train/{Path(prefix).name}.{ending}" for ending in ("bin", "idx")}


def finished(dataset, number, parts, split="datasets"):
    """A shard as if it was built; `parts` are tokens by part."""
    identity = {"kind": "pretrain", "recipe": {}, "source": {"content": f"{dataset}{number}"}}
    key = shard_key(identity)
    counts = {part: PartCount(1, tokens) for part, tokens in parts.items()}
    receipt = Receipt(key, identity, [], len(counts), counts, {}, 0, 0)
    file = SourceFile(f"/{dataset}.jsonl", 10, "jsonl")
    return Finished(PlannedShard(dataset, split, Slice(file, number, number + 1), identity), key, receipt)


tokens = st.dictionaries(st.sampled_from(["train", "valid", "test"]), st.integers(0, 10**12), max_size=3)
datasets = st.lists(st.tuples(st.lists(tokens, max_size=5), st.floats(1e-6, 1e6)), min_size=1, max_size=4)


@given(datasets)
def test_the_shards_of_a_dataset_share_its_weight_in_proportion_to_their_tokens(datasets):
    shards = {
        f"set{place}": [finished(f"set{place}", number, parts) for number, parts in enumerate(built)]
        for place, (built, _) in enumerate(datasets)
    }
    weights = {("datasets", f"set{place}"): weight for place, (_, weight) in enumerate(datasets)}
    items = [item for built in shards.values() for item in built]
    blend = json.loads(PairLayout(items, weights).lay_out("memory://out", Store("memory://s", "pretrain"), []).blend)
    assert list(blend) == ["train", "valid", "test"]
    for split, entries in blend.items():
        given_weight = dict(zip((entries or [])[1::2], map(float, (entries or [])[0::2]), strict=True))
        expected = {}
        for name, built in shards.items():
            counts = {item.key: item.receipt.parts[split].tokens for item in built if split in item.receipt.parts}
            total = sum(counts.values())
            expected |= {
                f"memory://s/prefix/{key}/{split}": weights["datasets", name] * count / total
                for key, count in counts.items()
                if count
            }
            if total:
                mine = [given_weight[f"memory://s/prefix/{key}/{split}"] for key, count in counts.items() if count]
                assert math.isclose(sum(mine), weights["datasets", name], rel_tol=1e-9)
        assert given_weight == pytest.approx(expected, rel=1e-9)
        assert (entries is None) == (not expected)


def test_a_dataset_of_weight_zero_is_prepared_and_excluded(tmp_path, chosen):
    paths = [write_lines(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", TEXTS[:50]), ("b", TEXTS[50:]))]
    _, manifest = prepare(blend_of(*paths, b=0), tmp_path / "out", holdout=NO_HOLDOUT, **chosen)
    listed = {str(Path(prefix).relative_to(tmp_path / "out")) for prefix in read_blend(tmp_path / "out")["train"][1::2]}
    by_name = {}
    for entry in manifest["derived"]["shards"]:
        by_name.setdefault(entry["dataset"], set()).update(*entry["published"].values())
    assert listed == by_name["a"]
    assert by_name["b"]


def lose(plan, number):
    """Take the proof of one shard away."""
    plan.plan.store.withdraw(plan.plan.keys[number])
    return plan.plan.shards[number]


def test_gap_is_rejected_and_the_old_publication_kept(tmp_path, chosen):
    blend, out = blend_of(write_lines(tmp_path / "a.jsonl", TEXTS)), tmp_path / "out"
    prepare(blend, out, **chosen)
    before = visible(out)
    plan = planned(blend, out, **chosen | {"shard_size": 900})
    build_pending(plan)
    gone = lose(plan, 1)
    words = rf"1 of {len(plan.plan.shards)} .*datasets/a/{tmp_path}/a\.jsonl@{gone.part.start}.*allow_partial"
    with pytest.raises(RunError, match=words):
        publish_here("pretrain", plan)
    assert visible(out) == before


def test_other_kind_replaces_everything_even_after_a_kill(tmp_path, chosen):
    path, out = write_lines(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    preparing_rl.prepare(blend_of(path), tmp_path / "clean")
    prepare(blend_of(path), out, **chosen)
    replaced = visible(out)
    preparing_rl.prepare(blend_of(path), out)
    assert visible(out).keys() == visible(tmp_path / "clean").keys()
    prepare(blend_of(path), out, **chosen)
    with count_operations() as log:  # nothing is to be built any more, as in the run that is killed
        preparing_rl.prepare(blend_of(path), out)
    prepare(blend_of(path), out, **chosen)
    assert visible(out).keys() == replaced.keys()
    assert killed_at(len(log.operations), lambda: preparing_rl.prepare(blend_of(path), out))
    assert replaced.keys() & visible(out).keys() - visible(tmp_path / "clean").keys(), "killed before they were removed"
    preparing_rl.prepare(blend_of(path), out)
    assert visible(out).keys() == visible(tmp_path / "clean").keys()


def test_partial_output_on_request_lists_missing_shards(tmp_path, chosen):
    chosen |= {"allow_partial": True, "holdout": NO_HOLDOUT, "prefix_size": 1}
    plan = planned(blend_of(write_lines(tmp_path / "a.jsonl", TEXTS)), tmp_path / "out", **chosen)
    build_pending(plan)
    gone = lose(plan, 1)
    manifest = publish_here("pretrain", plan)
    assert manifest["missing"] == [gone.place]
    assert gone.place not in {entry["place"] for entry in manifest["shards"]}
    blend = read_blend(tmp_path / "out")
    assert len(blend["train"]) == 2 * (len(plan.plan.shards) - 1)
    assert math.isclose(sum(map(float, blend["train"][0::2])), 1)
    (problem,) = verify(str(tmp_path / "out"), PRETRAIN.inspect).problems
    assert gone.place in problem


@pytest.mark.slow
def test_a_name_never_means_other_data_than_before(tmp_path, chosen):
    """Megatron caches its indexes of documents by path, so an old name with new content would train on garbage."""
    random, meant = np.random.default_rng(1), {}
    for _ in range(12):
        rows = [TEXTS[number] for number in random.integers(0, 200, random.integers(20, 120))]
        path = write_lines(tmp_path / "a.jsonl", rows)
        settings = chosen | {"shard_size": int(random.integers(800, 3000)), "max_shrink_fraction": 1.0}
        prepare(blend_of(path), tmp_path / "out", min_doc_chars=int(random.integers(1, 45)), **settings)
        for name in published(tmp_path / "out"):
            content = (tmp_path / "out" / name).read_bytes()
            assert meant.setdefault(name, content) == content


class Folders:
    """A layout that puts a shard into folders, and made from it another, beside reports of these names."""

    def __init__(self, folders, derived=(), reports=()):
        self.folders, self.derived, self.reports = folders, derived, reports

    @property
    def own(self):
        return {folder: re.compile(r"part-\d\.txt") for folder in self.folders}

    def lay_out(self, output_dir, store, items):
        names = [
            {item.shard.place: self.written(output_dir, of) for item in items} for of in (self.folders, self.derived)
        ]
        reports = [replace(publish_bytes(f"{output_dir}/{name}", b"report"), path=name) for name in self.reports]
        derived = items if self.derived else ()
        return Published(names[0], b"{}", reports, {}, derived, names[1])

    def written(self, output_dir, folders):
        return {folder: [publish_bytes(f"{output_dir}/{folder}/part-0.txt", b"rows").path] for folder in folders}


def publish_folders(out, store, item, *layout):
    header = {"blend": {}, "missing": []}
    publish_preparation(str(out), store, [item], Folders(*layout), PreparationSettings(), header, {})


def test_earlier_outputs_elsewhere_are_removed(tmp_path):
    out, store = tmp_path / "out", Store(str(tmp_path / "store"), "pretrain")

    def publish_as(*layout):
        publish_folders(out, store, finished("a", 0, {"train": 1}), *layout)
        return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and path.suffix != ".json"}

    before = publish_as(["data/x", "data/y"], ["pools/a.b", "pools/c"], ["hits.txt", "deep/report.txt"])
    parts = {f"{folder}/part-0.txt" for folder in ("data/x", "data/y", "pools/a.b", "pools/c")}
    assert before == {*parts, "hits.txt", "deep/report.txt"}
    strangers = ["pools/c/notes.txt", "pools/cxtxt", "hits.txt.bak", "pools/a.b.txt", "hitsxtxt"]
    for name in strangers:
        (out / name).write_text("not ours")
    fewer = {"data/x/part-0.txt", "pools/c/part-0.txt", "hits.txt", *strangers}
    assert publish_as(["data/x"], ["pools/c"], ["hits.txt"]) == fewer
    assert publish_as(["data/x"]) == {"data/x/part-0.txt", *strangers}
    assert {path.name for path in out.rglob("*") if path.is_dir()} == {"data", "x", "pools", "c"}
    assert json.loads((out / "manifest.json").read_bytes()).get("derived") is None


@pytest.mark.parametrize("damage", [b"", b"{}", b"no JSON"])
def test_damaged_old_manifest_is_ignored(tmp_path, damage):
    out, store, item = tmp_path / "out", Store(str(tmp_path / "store"), "pretrain"), finished("a", 0, {"train": 1})
    publish_folders(out, store, item, ["data"], ["pools/a"])
    whole = visible(out)
    (out / "manifest.json").write_bytes(damage)
    publish_folders(out, store, item, ["data"], ["pools/a"])
    assert visible(out) == whole


def publish_again_and_again(plan):
    for _ in range(10):
        publish_here("pretrain", plan)


@pytest.mark.slow
def test_of_two_publications_at_once_exactly_one_wins_whole(tmp_path, chosen):
    out = tmp_path / "out"
    rows = {"a": TEXTS[:100], "b": [*TEXTS[100:], b"broken", b"{}"], "c": [*TEXTS[50:150], b"[]"]}
    paths = {name: write_lines(tmp_path / f"{name}.jsonl", texts) for name, texts in rows.items()}
    plans, alone = [], []
    for names in ("ab", "bc"):
        plan, _ = prepare(blend_of(*(paths[name] for name in names)), out, **chosen)
        plans.append(plan)
        alone.append(visible(out))
    assert alone[0] != alone[1]
    for _ in range(3):
        for _ in in_processes(*(partial(publish_again_and_again, plan) for plan in plans)):
            pass
        assert visible(out) in alone


def quarantined(out, name="a"):
    lines = (out / "quarantine" / f"{name}.jsonl").read_bytes().splitlines()
    return [(row["file"], row["line"], row["reason"]) for row in map(json.loads, lines)]


BAD = {5: b"broken", 60: b'{"text": null}', 61: b"\xff\xfe", 199: b"[]"}


@pytest.fixture
def damaged(tmp_path):
    """A file with four bad lines, and where they are, counted as an editor counts."""
    rows = [BAD.get(number, text) for number, text in enumerate(TEXTS)]
    rows[100] = "an enormous row " * 1000
    rows.insert(30, b"")
    path = write_lines(tmp_path / "a.jsonl", rows)
    return path, [number for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line in BAD.values()]


@pytest.mark.parametrize("shard_size", [200, 2000, 10**6])
def test_bad_rows_are_published_with_file_and_line_for_any_cut(tmp_path, chosen, damaged, shard_size):
    path, lines = damaged
    prepare(blend_of(path), tmp_path / "out", **chosen | {"shard_size": shard_size})
    assert [(file, line) for file, line, _ in quarantined(tmp_path / "out")] == [(str(path), line) for line in lines]


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_lines_are_right_even_when_slices_before_them_are_missing(tmp_path, chosen, damaged, gone):
    path, lines = damaged
    plan = planned(blend_of(path), tmp_path / "out", allow_partial=True, **chosen | {"shard_size": 1000})
    build_pending(plan)
    lost = lose(plan, gone)
    publish_here("pretrain", plan)
    content = path.read_bytes()
    begins = {line: sum(len(row) + 1 for row in content.split(b"\n")[: line - 1]) for line in lines}
    kept = [line for line, begin in begins.items() if not lost.part.start <= begin < lost.part.stop]
    assert [line for _, line, _ in quarantined(tmp_path / "out")] == kept


def test_quarantine_of_repaired_data_is_removed(tmp_path, chosen, damaged):
    path, _ = damaged
    prepare(blend_of(path), tmp_path / "out", **chosen)
    write_lines(path, TEXTS)
    prepare(blend_of(path), tmp_path / "out", **chosen)
    assert not (tmp_path / "out" / "quarantine").exists()


def test_a_flipped_bit_in_the_bad_rows_of_a_shard_is_not_published(tmp_path, chosen, damaged):
    path, _ = damaged
    prepare(blend_of(path), tmp_path / "out", **chosen)
    expected = tree(tmp_path / "out")
    stored = next(iter(sorted(tmp_path.glob("out/shards/pretrain/*/quarantine.jsonl"))))
    flip(stored, stored.read_bytes().index(b'"detail":"') + 10)
    with pytest.raises(RunError, match="damaged since it was built"):
        prepare(blend_of(path), tmp_path / "out", **chosen)
    prepare(blend_of(path), tmp_path / "out", **chosen)
    assert tree(tmp_path / "out") == expected


def with_bad_rows(rows_in, bad):
    item = finished("a", 0, {"train": 1})
    choices = {"blank_line": 1, "filtered": 3, "oversize": 2}
    counts = {"train": PartCount(rows_in - bad - sum(choices.values()), 1)}
    drops = {"malformed_json": bad - bad // 2, "null_text": bad // 2, **choices}
    return Finished(
        item.shard, item.key, replace(item.receipt, rows_in=rows_in, parts=counts, drops=drops, quarantined=bad)
    )


@pytest.mark.parametrize(
    ("rows", "bad", "tolerate", "refused"),
    [
        (20, 10, True, None),
        (20, 11, True, "malformed_json 6, null_text 5), 10 are allowed"),
        (100_000, 100, True, None),
        (100_000, 101, True, "malformed_json 51, null_text 50), 100 are allowed"),
        (10**6, 1000, True, None),
        (100, 0, False, None),
        (100_000, 2, False, "malformed_json 1, null_text 1), 0 are allowed"),
    ],
)
def test_a_dataset_may_have_ten_bad_rows_or_a_thousandth_or_none(tmp_path, rows, bad, tolerate, refused):
    words = re.escape(f"'a': {bad:,} of {rows:,} rows are bad ({refused}")
    with pytest.raises(RunError, match=words) if refused else nullcontext():
        check_bad_rows([with_bad_rows(rows, bad)], Store(str(tmp_path), "pretrain"), 0.001, tolerate=tolerate)


@pytest.mark.parametrize("out", ["memory://bucket/out", "local"])
@pytest.mark.parametrize("store", [None, "memory://bucket/store"])
def test_outside_a_local_disk_blend_json_points_into_the_store(tmp_path, chosen, memory, out, store):
    out = str(tmp_path / "out") if out == "local" else out
    memory.pipe_file("/bucket/in/a.jsonl", write_lines(tmp_path / "a.jsonl", TEXTS).read_bytes())
    blend = {"datasets": [{"name": "a", "path": "memory://bucket/in"}]}
    prepare(blend, out, store=store, prefix_size=1, **chosen)
    with fsspec.open(f"{out}/blend.json", "rb") as stream:
        entries = json.load(stream)["train"]
    assert len(entries) > 2
    for prefix in entries[1::2]:
        if "memory" in out + str(store):
            assert prefix.startswith(f"{store or out + '/shards'}/prefix/")
        for ending in ("bin", "idx"):
            system, path = fsspec.url_to_fs(f"{prefix}.{ending}")
            assert system.size(path) > 0
    assert verify(out, PRETRAIN.inspect).problems == []
    assert planned(blend, out, store=store, prefix_size=1, **chosen).plan.pending == []
