"""Duplicates among normalized conversations: marked or left out, every row accounted for, nothing decided twice."""

import json
import random
from collections import Counter

import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.report.summary import warnings

from tests.building import build_here
from tests.dedup.scripts import jaccard
from tests.dedup.test_near import edited, prose
from tests.dedup.test_shingles import shingled
from tests.harmony.test_harmony_shard import published
from tests.preparing_harmony import build, finish, left_behind, plan, prepare
from tests.preparing_rl import write_rows

MARKS = ("dedup_outcome", "dup_of", "dup_jaccard", "quality_is_duplicate")
BAD = [b"{broken", {"messages": "none"}]


def talk(uuid, question, answer, **fields):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"uuid": uuid, "messages": messages, **fields}


def talks(seed, names):
    """Conversations that nothing is alike in."""
    generator = random.Random(seed)
    return {name: talk(name, prose(generator, 15), prose(generator, 150)) for name in names}


def copy(row, name, edits=0):
    """The row under another name, its answer with as many words replaced."""
    question, answer = (message["content"] for message in row["messages"])
    return talk(name, question, edited(random.Random(name), answer, edits))


def data_set(name, path, **keys):
    return {"name": name, "path": str(path), "converter": "openai_messages", **keys}


def planted(folder):
    """A blend in several slices, with copies (`=`) and edited copies (`~`) within and across datasets and splits; rows
    that are bad, filtered, and datasets of which nothing is left. Names say of which row a row is a copy.
    """
    own = talks(0, [f"t{number}" for number in range(12)] + ["v0", "v1", "b0", "b1"])
    train = [own[f"t{number}"] for number in range(12)]
    train[4:4] = [copy(own["t0"], "t0=1"), *BAD, copy(own["t1"], "t1~1", 2)]
    write_rows(folder / "one/train.jsonl", train)
    write_rows(
        folder / "one/validation.jsonl", [own["v0"], copy(own["t2"], "t2=1"), copy(own["t3"], "t3~1", 1), own["v1"]]
    )
    kept = [own["b0"], copy(own["t4"], "t4=1"), copy(own["v0"], "v0~1", 3), copy(own["t2"], "t2=2"), own["b1"]]
    filtered = [{**copy(own["t5"], "t5=9"), "license": "none"} for _ in range(3)]
    write_rows(folder / "two/train.jsonl", [*({**row, "license": "mit"} for row in kept), *filtered, b""])
    write_rows(folder / "echo/train.jsonl", [copy(own["t6"], "t6=1"), copy(own["t7"], "t7=1")])
    write_rows(folder / "bad/train.jsonl", BAD * 2)
    keys = {"two": {"filters": {"license": "mit"}}}
    return {"datasets": [data_set(n, folder / n, **keys.get(n, {})) for n in ("one", "two", "echo", "bad")]}


DROPS = {
    ("one", "train"): {"malformed_json": 1, "no_messages": 1},
    ("two", "train"): {"filtered": 3, "blank_line": 1},
    ("bad", "train"): {"malformed_json": 2, "no_messages": 2},
}
EXACT, NEAR = {"t0=1", "t2=1", "t2=2", "t4=1", "t6=1", "t7=1"}, 3
"""Of copies the first stays, of edited copies the longest."""


@pytest.fixture(scope="module")
def normalized(tmp_path_factory):
    """The same data in each mode: the folder, the plan and the manifest."""
    folder = tmp_path_factory.mktemp("planted")
    blend, found = planted(folder / "in"), {}
    for mode in ("tag", "drop", "off"):
        choices = {"shard_size": 6000, "dedup": {"mode": mode}, "store": str(folder / "store")}
        found[mode] = (folder / mode, *prepare(blend, folder / mode, **choices))
    assert len(found["off"][1].plan.shards) > 6
    return found


def rows_of(out):
    return [row for rows in published(out).values() for row in rows]


def by_name(out):
    found = rows_of(out)
    named = {row["source_uuid"]: row for row in found}
    assert len(named) == len(found)
    return named


def words(row):
    """The runs of five words of what the user and the assistant of a row say."""
    return {*shingled(" ".join(part.split("<|message|>")[1].split("<|")[0] for part in said(row)), 5)}


def said(row):
    return [part for part in row["text"].split("<|start|>")[1:] if not part.startswith(("system", "developer"))]


@pytest.mark.slow
def test_copies_are_marked_with_the_kept_row(normalized):
    rows, groups = by_name(normalized["tag"][0]), {}
    for name, row in rows.items():
        groups.setdefault(name.replace("~", "=").partition("=")[0], []).append(row)
    assert sum(len(group) > 1 for group in groups.values()) == 8
    assert {name for name, row in rows.items() if row["dedup_outcome"] == "exact_duplicate"} == EXACT
    assert sum(row["dedup_outcome"] == "near_duplicate" for row in rows.values()) == NEAR
    for group in groups.values():
        (kept,) = (row for row in group if row["dedup_outcome"] == "kept")
        assert [kept[name] for name in MARKS] == ["kept", None, None, False]
        for row in group:
            if row is kept:
                continue
            similarity = jaccard(words(row), words(kept))
            assert row["dup_of"] == kept["row_id"]
            assert row["dup_jaccard"] == pytest.approx(similarity)
            assert row["dedup_outcome"] == ("exact_duplicate" if row["text"] == kept["text"] else "near_duplicate")
            assert row["quality_is_duplicate"] is True
            assert (row["text"] == kept["text"]) == (similarity == 1)
            assert len(row["text"].encode()) <= len(kept["text"].encode())


@pytest.mark.slow
def test_edges_name_dropped_and_kept_rows(normalized):
    out, _, manifest = normalized["tag"]
    edges = pq.read_table(out / "edges.parquet").to_pylist()
    rows = rows_of(out)
    assert sorted((edge["dropped"], edge["kept"], edge["jaccard"], edge["reason"]) for edge in edges) == sorted(
        (row["row_id"], row["dup_of"], row["dup_jaccard"], row["dedup_outcome"]) for row in rows if row["dup_of"]
    )
    assert left_behind(manifest) == {"exact_duplicate": len(EXACT), "near_duplicate": NEAR}
    assert {edge["group"] for edge in edges} <= {row["row_id"] for row in rows}
    assert (out / "edges.parquet").read_bytes() == (normalized["drop"][0] / "edges.parquet").read_bytes()


@pytest.mark.slow
def test_dropped_rows_are_the_marked_ones(normalized):
    marked, left = published(normalized["tag"][0]), published(normalized["drop"][0])
    assert left == {split: [row for row in rows if row["dedup_outcome"] == "kept"] for split, rows in marked.items()}
    assert sum(map(len, marked.values())) - sum(map(len, left.values())) == len(EXACT) + NEAR


@pytest.mark.slow
def test_mode_off_keeps_normalized_rows(normalized):
    out, plan, manifest = normalized["off"]
    marked, alone = published(normalized["tag"][0]), published(out)
    unmarked = {split: [row | dict.fromkeys(MARKS) for row in rows] for split, rows in marked.items()}
    assert alone == unmarked
    for entry, key in zip(manifest["shards"], plan.plan.keys, strict=True):
        assert entry["key"] == key
        for name in entry["published"].get("all", []):
            assert (out / name).samefile(plan.plan.store.path(key, "all.parquet"))
    assert not (out / "edges.parquet").exists()
    assert left_behind(manifest) == {}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tag", pytest.param("drop", marks=pytest.mark.slow)])
def test_rows_are_marked_alike_in_any_number_of_groups(normalized, monkeypatch, tmp_path, mode):
    monkeypatch.setattr("tokenmill.tasks.sources.json_lines.BLOCK_BYTES", 2_000)
    monkeypatch.setattr("tokenmill.tasks.harmony.shard.GROUP_CHARACTERS", 1)
    blend = planted(tmp_path / "in")
    prepare(blend, tmp_path / "out", shard_size="1MB", dedup={"mode": mode})
    files = list((tmp_path / "out/data").rglob("*.parquet"))
    assert max(pq.ParquetFile(file).num_row_groups for file in files) > 5
    whole, cut = by_name(normalized[mode][0]), by_name(tmp_path / "out")
    own = {row["row_id"]: name for found in (whole, cut) for name, row in found.items()}
    marks = [
        {
            name: (row["text"], row["dedup_outcome"], own.get(row["dup_of"]), row["dup_jaccard"])
            for name, row in found.items()
        }
        for found in (whole, cut)
    ]
    assert marks[0] == marks[1]


@pytest.mark.parametrize("mode", ["tag", "drop", "off"])
def test_every_row_is_accounted_for_in_each_split(normalized, mode):
    out, _, manifest = normalized[mode]
    told = json.loads((out / "inventory.json").read_bytes())
    rows, total = rows_of(out), 0
    marked = rows_of(normalized["tag"][0]) if mode == "drop" else []
    went = Counter((row["dataset"], row["split"], row["dedup_outcome"]) for row in marked)
    for dataset, splits in told.items():
        for split, books in splits.items():
            lines = (out.parent / f"in/{dataset}/{split}.jsonl").read_bytes().count(b"\n")
            here = [row for row in rows if (row["dataset"], row["split"]) == (dataset, split)]
            duplicates = {
                what: n for (name, of, what), n in went.items() if (name, of) == (dataset, split) and what != "kept"
            }
            assert books["drops"] == DROPS.get((dataset, split), {}) | duplicates
            assert lines == books["rows_in"] == books["rows_out"] + sum(books["drops"].values())
            assert books["rows_out"] == len(here)
            total += lines
            assert books["tokens"] == sum(row["stats_token_len"] for row in here)
    totals = manifest["totals"]
    assert {name.removeprefix("datasets/"): each["documents"] for name, each in totals["datasets"].items()} == {
        dataset: sum(row["dataset"] == dataset for row in rows) for dataset in told
    }
    assert totals["documents"] == len(rows)
    assert totals["rows"] == totals["documents"] + sum(totals["dropped"].values()) == total
    assert manifest["splits"] == {
        split: {"rows": len(of), "tokens": sum(row["stats_token_len"] for row in of)}
        for split, of in published(out).items()
    }


def test_a_shard_of_which_nothing_is_left_is_accounted_for_and_not_published(normalized):
    _, _, manifest = normalized["drop"]
    (echo,) = (entry for entry in manifest["shards"] if entry["dataset"] == "echo")
    assert (echo["rows"], echo["documents"], echo["drops"], echo["published"]) == (2, {}, {"exact_duplicate": 2}, {})


def exam(folder, *texts):
    path = write_rows(folder / "exam.jsonl", [{"text": text} for text in texts])
    return {"datasets": [{"name": "exam", "path": str(path)}]}


def test_contaminated_rows_are_marked_with_hits(tmp_path):
    rows, generator = talks(6, ["innocent", "guilty"]), random.Random(7)
    question = prose(generator, 20)
    row = rows["guilty"]
    row["messages"][1]["content"] += f" {question} {prose(generator, 5)}"
    boilerplate = talk("told", *(message["content"] for message in talks(8, "x")["x"]["messages"]))
    boilerplate["messages"].insert(0, {"role": "system", "content": question})
    path = write_rows(tmp_path / "a.jsonl", [rows["innocent"], row, boilerplate])
    blend = {"datasets": [data_set("a", path)]}
    dedup = {"evaluations": exam(tmp_path, "too short", prose(generator, 30), question)}
    prepare(blend, tmp_path / "out", dedup=dedup)
    found = {name: row["dedup_outcome"] for name, row in by_name(tmp_path / "out").items()}
    assert found == {"innocent": "kept", "guilty": "contaminated", "told": "kept"}
    (hit,) = pq.read_table(tmp_path / "out/hits.parquet").to_pylist()
    assert hit["document"] == by_name(tmp_path / "out")["guilty"]["row_id"]
    assert (hit["evaluation"], hit["row"], hit["runs"]) == ("exam/exam.jsonl", 2, 8)
    assert hit["words"] == " ".join(question.split()[:13])
    assert by_name(tmp_path / "out")["guilty"]["quality_is_duplicate"] is False
    _, manifest = prepare(blend, tmp_path / "out", dedup=dedup | {"mode": "drop"})
    assert manifest["totals"]["dropped"] == {"contaminated": 1}
    assert warnings(manifest) == [
        "evaluation exam/exam.jsonl: 1 of 3 rows have fewer than 3 words and are not searched for"
    ]
    assert {row["source_uuid"] for row in rows_of(tmp_path / "out")} == {"innocent", "told"}
    assert (tmp_path / "out/hits.parquet").exists()


def test_reports_that_nobody_asks_for_any_more_disappear(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", talks(0, "ab").values())
    blend, reports = {"datasets": [data_set("a", path)]}, []
    for dedup in ({"evaluations": exam(tmp_path, prose(random.Random(0), 20))}, {}, {"mode": "off"}):
        _, manifest = prepare(blend, tmp_path / "out", dedup=dedup)
        here = {file.name for file in (tmp_path / "out").glob("*.parquet")}
        assert here == {file["path"] for file in manifest["files"] if file["path"].endswith(".parquet")}
        reports.append(here)
    assert reports == [{"edges.parquet", "hits.parquet"}, {"edges.parquet"}, set()]


def built_by(blend, out, **choices):
    """What a normalization builds after normalizing: for each task, the datasets of its shards."""
    planned, built = plan(blend, out, **choices), Counter()
    build(planned, planned.plan.pending)

    def counting(step, pending, store, arguments, *, rebuild):
        built.update((step.name, shard.dataset) for shard in pending)
        return build_here(step, pending, store, arguments, rebuild=rebuild)

    finish(planned, counting)
    return built


def proofs(out):
    """The receipts of the store, as they were written."""
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.glob("shards/*/*/receipt.json")}


def test_unrelated_shards_are_not_rebuilt_for_new_datasets(tmp_path):
    paths = {
        name: write_rows(tmp_path / f"{name}.jsonl", talks(name, [f"{name}{n}" for n in range(5)]).values())
        for name in "abc"
    }
    blend = {"datasets": [data_set(name, path) for name, path in paths.items()]}
    first = {"datasets": blend["datasets"][:2]}
    assert built_by(first, tmp_path / "out")["mark-shards", "a"] == 1
    before = proofs(tmp_path / "out")
    assert built_by(first, tmp_path / "out") == {}
    built = built_by(blend, tmp_path / "out")
    assert {place for place in built if "dedup" not in place[0]} == {("mark-shards", "c"), ("select-rows", "c")}
    assert built["dedup-sign", "all"] == 1
    assert proofs(tmp_path / "out").items() >= before.items()
    assert built_by(first, tmp_path / "out") == {}


def test_a_better_copy_elsewhere_marks_anew_the_shard_it_concerns(tmp_path):
    rows = {name: talks(name, [f"{name}{n}" for n in range(5)]) for name in "ab"}
    question, answer = (message["content"] for message in rows["a"]["a0"]["messages"])
    rows["c"] = {"c0": talk("c0", question, f"{answer} indeed")}
    paths = {name: write_rows(tmp_path / f"{name}.jsonl", of.values()) for name, of in rows.items()}
    blend = {"datasets": [data_set(name, path) for name, path in paths.items()]}
    built_by({"datasets": blend["datasets"][:2]}, tmp_path / "out")
    built = built_by(blend, tmp_path / "out")
    assert {dataset for task, dataset in built if task == "mark-shards"} == {"a", "c"}
    found = by_name(tmp_path / "out")
    assert {name for name, row in found.items() if row["dedup_outcome"] != "kept"} == {"a0"}
    assert found["a0"]["dup_of"] == found["c0"]["row_id"]


def test_store_paths_are_not_published(normalized):
    out, _, manifest = normalized["tag"]
    for entry in [*manifest["shards"], *manifest["derived"]["shards"]]:
        assert entry["file"].startswith(str(out.parent / "in"))
    text = json.dumps({**manifest, "volatile": None})
    assert str(out.parent / "store") not in text
    assert str(out) not in text
    for path in out.rglob("*.*"):
        if path.name not in {"manifest.json", "blend.json"} and path.parent.name != "quarantine":
            assert str(out.parent).encode() not in path.read_bytes(), path
