"""What is published of a selection: whole, healed when damaged, gone when nobody asks for it, and honest about collapse."""

import json
import os
from collections import Counter

import fsspec
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.select.kind import HARMONY
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import verify

from tests.dedup.test_harmony_duplicates import exam, rows_of, talks
from tests.harmony import rows as sources
from tests.harmony.test_harmony_shard import rows_of_messages, source
from tests.preparing import tree
from tests.preparing_harmony import prepare
from tests.select.test_select_shard import POOLS, folder_of, mixed, predicates, write_pools
from tests.shards.damage import DAMAGES


def folders(out):
    """The published folders, and how many files are in each."""
    places = [path.relative_to(out).parent for path in out.rglob("*.*") if "shards" not in path.parts]
    assert {path.relative_to(out) for path in out.rglob("*") if path.is_dir() and "shards" not in path.parts} == {
        folder for place in places for folder in (place, *place.parents) if str(folder) != "."
    }
    return Counter(str(place) for place in places)


@pytest.mark.slow
def test_removed_pools_are_deleted_and_foreign_files_kept(tmp_path):
    blend, out = mixed(tmp_path / "in"), tmp_path / "out"
    fewer = {name: predicate for name, predicate in predicates().items() if name != "tools"}
    files = {"all": write_pools(tmp_path / "all.yaml", predicates()), "few": write_pools(tmp_path / "few.yaml", fewer)}
    prepare(blend, out, selection={"pools": files["all"]})
    assert "pools/tools" in folders(out)
    prepare(blend, out, selection={"pools": "none"})
    assert not (out / "pools").exists()
    prepare(blend, out, selection={"pools": files["all"]})
    (out / "pools/long/notes.txt").write_text("not ours")
    prepare(blend, out, selection={"pools": files["few"]})
    assert "pools/tools" not in folders(out)
    assert "pools/rated.v2" in folders(out)
    _, manifest = prepare(blend, out, selection={"pools": "none", "view": "none"})
    assert {path.name for path in out.iterdir()} == {
        "behaviours.json", "behaviours.md", "blend.json", "coverage.md", "data", "edges.parquet",
        "inventory.json", "manifest.json", "pools", "quarantine", "shards", "tools",
    }  # fmt: skip
    assert [path.name for path in (out / "pools").rglob("*.*")] == ["notes.txt"]
    assert manifest["selection"] | {"pools": {}, "candidates": 0} == manifest["selection"]
    assert check(out).problems == []


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A normalization with something of everything that is published, to be repeated at will."""
    folder = tmp_path_factory.mktemp("prepared")
    blend, pools = mixed(folder / "in"), write_pools(folder / "pools.yaml", {"tools": POOLS["tools"][0]})
    for path in (folder / "in").rglob("*.jsonl"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    guilty = talks(1, [f"t{number}" for number in range(8)])["t5"]["messages"][1]["content"]
    chosen = {"dedup": {"evaluations": exam(folder, guilty)}, "selection": {"pools": pools}}

    def again():
        return prepare(blend, folder / "out", **chosen)[0]

    again()
    return folder / "out", again, tree(folder / "out")


def check(out):
    return verify(str(out), inspector_of(str(out)))


def entries_of(out):
    """The shards that the manifest names, final ones and those of the selection, by key."""
    manifest = json.loads((out / "manifest.json").read_bytes())
    return {entry["key"]: entry for entry in [*manifest["shards"], *manifest["derived"]["shards"]]}


def test_there_is_something_of_everything(prepared):
    out, _, _ = prepared
    assert check(out).problems == []
    assert set(folders(out)) == {
        ".", "candidates", "data/high", "data/tool_calling", "data/train", "data/validation", "pools/tools", "quarantine",
        "tools",
    }  # fmt: skip
    assert (out / "hits.parquet").exists()
    assert check(out).shards == len(entries_of(out)) == 8


@pytest.mark.parametrize("damage", ["a byte flipped", "deleted"])
def test_damage_below_a_damaged_shard_is_repaired(prepared, damage):
    out, again, whole = prepared
    files = list(out.glob("shards/harmony/*/all.parquet"))
    below = [path for path in files if path.parent.name not in entries_of(out)]
    normalized = below[0]
    assert len(below) == 4
    final = next(
        path for path in files
        if path not in below and pq.read_table(path)["row_id"] == pq.read_table(normalized)["row_id"]
    )  # fmt: skip
    DAMAGES[damage](normalized)
    assert check(out).problems == []
    DAMAGES[damage](final)
    assert check(out).withdrawn == [final.parent.name]
    if damage == "a byte flipped":  # of which planning knows nothing
        with pytest.raises(
            RunError, match=f"{normalized.parent.name}/all.parquet: damaged since it was built; its receipt"
        ):
            again()
    again()
    assert tree(out) == whole


@pytest.mark.parametrize("change", ["fewer", "none"])
@pytest.mark.parametrize("part", ["candidates", "pool-000"])
def test_a_file_of_a_selection_that_holds_other_rows_than_its_books_is_named(prepared, part, change):
    out, _, _ = prepared
    inspect = inspector_of(str(out))
    store, place = Store(str(out / "shards"), "harmony"), min(out.glob(f"shards/harmony/*/{part}.parquet"))
    receipt = store.receipt(place.parent.name)
    whole = place.read_bytes()
    assert inspect(store, receipt) == []
    if change == "none":
        place.write_bytes(b"no Parquet")
    else:
        pq.write_table(pq.read_table(place).slice(1), place)
    (problem,) = inspect(store, receipt)
    assert problem.startswith(str(place))
    assert ("its receipt records" if change == "fewer" else "cannot be read as Parquet") in problem
    place.write_bytes(whole)


ALIKE = rows_of_messages(1000)


@pytest.mark.parametrize(
    ("choices", "collapsed"),
    [
        ({"view": "behavior"}, "2 distinct structures in 1000 rows are 0.200%, below the limit of 1.000%"),
        ({"view": "behavior", "min_distinct_behaviors": 0.002}, None),
        ({"view": "prompt"}, None),
        ({"view": "prompt", "min_tool_call_fraction": 0.5}, "0.000% of rows call a tool, below the limit of 50.000%"),
    ],
)
def test_behaviors_that_have_collapsed_are_published_and_then_fail(tmp_path, choices, collapsed):
    rows = [
        *ALIKE[:999],
        rows_of_messages(1)[0]
        | {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "```\nx\n```"}]},
    ]
    blend = {"datasets": [source(tmp_path, "alike", "openai_messages", *rows)]}
    _, manifest = prepare(blend, tmp_path / "out", cross_check=0, selection=choices)
    told = json.loads((tmp_path / "out/behaviours.json").read_bytes())
    assert (told["rows"], told["distinct_structures"]) == (1000, 2)
    assert len(folder_of(tmp_path / "out", "candidates")) == 1000
    assert check(tmp_path / "out").problems == []
    assert told["problems"] == manifest["selection"]["collapsed"]
    if collapsed is None:
        HARMONY.accept(manifest, str(tmp_path / "out"))
        return
    assert collapsed in (tmp_path / "out/behaviours.md").read_text()
    with pytest.raises(RunError, match=f"out: published, but behaviors have collapsed: {collapsed}"):
        HARMONY.accept(manifest, str(tmp_path / "out"))


def test_the_inventory_and_the_coverage_agree_with_the_data(prepared):
    out, _, _ = prepared
    told, rows = json.loads((out / "inventory.json").read_bytes()), rows_of(out)
    coverage = (out / "coverage.md").read_text()
    for dataset, splits in told.items():
        for split, books in splits.items():
            here = [row for row in rows if (row["dataset"], row["split"]) == (dataset, split)]
            present = {name: sum(row[name] is not None for row in here) for name in here[0]}
            assert books["columns"] == present
            assert books["metadata"] == {
                name: pytest.approx(count / len(here), abs=1e-6)
                for name, count in present.items()
                if name.startswith(("meta_", "source_")) and count
            }
            for name, column in {"tokens": "stats_token_len", "completion_tokens": "stats_completion_tokens"}.items():
                lengths = Counter(1 << (row[column].bit_length() - 1) for row in here)
                assert books["lengths"][name] == {str(least): count for least, count in sorted(lengths.items())}
            lines = (out.parent / f"in/{dataset}/{split}.jsonl").read_bytes().splitlines()
            records = [json.loads(line) for line in lines if line != b"{broken"]
            assert books["source"]["records"] == len(records)
            for name, types in books["source"]["fields"].items():
                assert sum(types.values()) == sum(name in record for record in records)
            assert books["source"]["roles"] == Counter(
                message["role"] for record in records for message in record["messages"]
            )
            cells = [dataset, split, len(lines), len(here), sum(books["drops"].values()), books["tokens"]]
            assert f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else cell for cell in cells)} |" in coverage
            assert f"## {dataset}, {split}" in coverage
    assert sum(books["rows_out"] for splits in told.values() for books in splits.values()) == len(rows)


def test_summary_counts_marked_and_selected_rows(prepared):
    out, _, _ = prepared
    manifest, rows = json.loads((out / "manifest.json").read_bytes()), rows_of(out)
    outcomes = Counter(row["dedup_outcome"] for row in rows)
    assert outcomes["contaminated"] == 1
    lines = list(HARMONY.summary(manifest))
    for outcome, count in outcomes.items():
        assert (f"{outcome.replace('_', ' ')}: {count} row{'s' * (count != 1)}" in lines) == (outcome != "kept")
    assert f"candidates to embed: {outcomes['kept']}" in lines
    assert f"pools: tools {sum(row['quality_has_tool'] for row in rows)}" in lines


def test_pools_that_are_gone_leave_nothing_on_an_object_store(tmp_path):
    system, out = fsspec.filesystem("memory"), "memory://bucket/out"
    system.store.clear()
    blend = {"datasets": [source(tmp_path, "agents", "agentic", sources.AGENTIC, split="tool_calling")]}
    for pools, there in (({}, True), ({"pools": "none"}, False), ({}, True)):
        prepare(blend, out, selection=pools)
        assert any("/pools" in path for path in system.find("/bucket/out") if "/shards/" not in path) == there
    assert check(out).problems == []
    system.store.clear()


def test_only_bad_rows_give_an_empty_publication(tmp_path):
    blend = {"datasets": [source(tmp_path, "bad", "openai_messages", b"{broken", {"messages": 3})]}
    for mode in ("tag", "off"):
        _, manifest = prepare(blend, tmp_path / "out", dedup={"mode": mode}, allow_shrink=["bad"])
        assert manifest["totals"]["documents"] == 0
        assert manifest["selection"]["candidates"] == 0
        assert not any((tmp_path / "out").glob("*/**/*.parquet"))
        assert check(tmp_path / "out").problems == []
