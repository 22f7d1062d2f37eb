"""A published choice: every embedded row once, with a reason that can be checked, and the same bytes each time."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.flows.cli import run
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.score import embed
from tokenmill.tasks.score.choice import ChoiceSettings, choose_rows
from tokenmill.tasks.score.embed import read_embeddings
from tokenmill.tasks.select.scores import score_folder
from tokenmill.tasks.shards.verify import verify
from xxhash import xxh3_128_hexdigest

from tests.examples import max_examples
from tests.publishing_scores import embeddings_table, nll_table, publish_scores
from tests.score.test_choose import around

REPOSITORY = Path(__file__).parents[2]
FILES = {"chosen.parquet", "rejected.parquet", "report.json", "report.md", "manifest.json"}


def publish(out, vectors, parts=3, **columns):
    """Vectors as a folder of embeddings in some parts; rows are called r0, r1 …"""
    ids = [f"r{number}" for number in range(len(vectors))]
    tables = [
        (
            f"candidates/part-{number:05d}-{number:08x}.parquet",
            embeddings_table([ids[row] for row in rows], vectors[rows]),
        )
        for number, rows in enumerate(np.array_split(np.arange(len(vectors)), parts))
    ]
    tables = [(name, with_columns(table, columns)) for name, table in tables]
    return publish_scores(out, "embeddings", tables)


def with_columns(table, columns):
    for name, value_of in columns.items():
        values = pa.array([value_of(int(each[1:])) for each in table["row_id"].to_pylist()])
        table = table.set_column(table.schema.get_field_index(name), name, values)
    return table


def chosen(out, **choices):
    """The choice and the tables it published."""
    manifest = choose_rows(choices.pop("place"), str(out), ChoiceSettings(**choices))
    return manifest, *(pq.read_table(out / f"{name}.parquet") for name in ("chosen", "rejected"))


@given(st.integers(0, 10_000), st.integers(1, 120), st.sampled_from([None, 1, 4]), st.sampled_from([0.6, 0.95, 1.1]))
@max_examples(15)
def test_every_row_is_chosen_or_excluded_for_a_reason(tmp_path_factory, seed, rows, quota, threshold):
    folder = tmp_path_factory.mktemp("choice")
    vectors, _ = around(np.random.default_rng(seed), [50, 30, 12], 8, spread=0.7)
    place = publish(folder / "in", vectors)
    manifest, taken, left = chosen(
        folder / "out", place=place, rows=rows, clusters=5, quota=quota, threshold=threshold, seed=seed
    )
    stored = read_embeddings(score_folder(place)).vectors.astype(np.float64)
    number = {f"r{each}": each for each in range(92)}
    assert sorted([*taken["row_id"].to_pylist(), *left["row_id"].to_pylist()]) == sorted(number)
    assert taken.num_rows <= rows
    if quota is not None:
        assert max(Counter(taken["cluster"].to_pylist()).values()) <= quota
    ids = {*taken["row_id"].to_pylist()}
    for row in left.to_pylist():
        if row["reason"] == "near_duplicate":
            assert row["witness"] in ids
            assert row["cosine"] >= threshold - 1e-6
            assert stored[number[row["row_id"]]] @ stored[number[row["witness"]]] == pytest.approx(
                row["cosine"], abs=1e-5
            )
        else:
            assert (row["reason"], row["witness"], row["cosine"]) == ("quota", None, None)
    if taken.num_rows < rows and quota is None:
        assert "quota" not in left["reason"].to_pylist()
    assert manifest["totals"] == {
        "rows": 92,
        "documents": taken.num_rows,
        "dropped": {name: left["reason"].to_pylist().count(name) for name in ("near_duplicate", "quota")},
    }


def test_rows_are_ordered_by_cluster_with_distance_and_place(tmp_path):
    vectors, groups = around(np.random.default_rng(1), [40, 25, 10], spread=0.5)
    _, taken, left = chosen(
        tmp_path / "out", place=publish(tmp_path / "in", vectors), rows=45, clusters=3, threshold=1.1
    )
    everything = pa.concat_tables(
        [taken.select(["row_id", "cluster", "distance"]), left.select(["row_id", "cluster", "distance"])]
    )
    rows = np.array([int(each[1:]) for each in everything["row_id"].to_pylist()])
    labels = everything["cluster"].to_numpy()
    assert len({*zip(groups[rows].tolist(), labels.tolist(), strict=True)}) == 3
    for cluster in range(3):
        members = vectors[rows[labels == cluster]]
        expected = np.linalg.norm(members - members.mean(axis=0), axis=1)
        np.testing.assert_allclose(everything["distance"].to_numpy()[labels == cluster], expected, atol=2e-3)
        mine = taken.filter(pa.array(taken["cluster"].to_numpy() == cluster))
        assert mine["place"].to_pylist() == list(range(1, mine.num_rows + 1))
        assert mine["distance"].to_pylist() == sorted(mine["distance"].to_pylist())
    assert taken["cluster"].to_pylist() == sorted(taken["cluster"].to_pylist())
    assert [int(each[1:]) for each in left["row_id"].to_pylist()] == sorted(
        int(e[1:]) for e in left["row_id"].to_pylist()
    )
    assert sorted(Counter(taken["cluster"].to_pylist()).values()) == [10, 17, 18]


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, pytest.param(4096, marks=pytest.mark.slow)])
def test_same_bytes_in_any_process_and_read_order(tmp_path, monkeypatch, size):
    vectors, _ = around(np.random.default_rng(4), [120, 80], 32, spread=1)
    publish(tmp_path / "in", vectors)
    command = ["choose", str(tmp_path / "in"), "rows=60", "--output-dir"]
    code = f"from tokenmill.flows.cli import run; raise SystemExit(run({[*command, str(tmp_path / 'there')]!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, capture_output=True)
    monkeypatch.setattr(embed, "READ_ROWS", size)
    assert run([*command, str(tmp_path / "here")]) == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    assert files.keys() == FILES
    for name in files.keys() - {"manifest.json"}:
        assert (tmp_path / "there" / name).read_bytes() == files[name], name
    here, there = (orjson.loads((tmp_path / name / "manifest.json").read_bytes()) for name in ("here", "there"))
    assert {**here, "volatile": None} == {**there, "volatile": None}


def test_new_seed_only_changes_the_choice(tmp_path):
    vectors, _ = around(np.random.default_rng(5), [120, 80], 32, spread=1)
    place = publish(tmp_path / "in", vectors)
    found = [
        {*chosen(tmp_path / f"out{seed}", place=place, rows=40, seed=seed)[1]["row_id"].to_pylist()}
        for seed in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2]
    assert [len(each) for each in found] == [40, 40, 40]


def test_report_explains_the_choice(tmp_path):
    vectors, groups = around(np.random.default_rng(6), [60, 25, 15], spread=0.2)
    twins = np.flatnonzero(groups == 2)[:2]
    vectors[twins[1]] = vectors[twins[0]]
    place = publish(tmp_path / "in", vectors, dataset=lambda row: f"of|{groups[row]}", split=lambda row: "s")
    manifest, *_ = chosen(tmp_path / "out", place=place, rows=60, clusters=3, threshold=0.99999)
    facts = json.loads((tmp_path / "out/report.json").read_bytes())
    assert (facts["rows"], facts["budget"], facts["chosen"], facts["left_out"]) == (
        100, 60, 60, {"near_duplicate": 1, "quota": 39},
    )  # fmt: skip
    clusters = [tuple(each[name] for name in ("rows", "chosen", "near_duplicates")) for each in facts["clusters"]]
    assert clusters == [(60, 23, 0), (25, 23, 0), (15, 14, 1)]
    assert sorted(each["quota"] for each in facts["clusters"]) == [15, 22, 23]
    for each, group in zip(facts["clusters"], range(3), strict=True):
        middle, typical = vectors[groups == group].mean(axis=0), vectors[int(each["typical_row"][1:])]
        nearest = vectors[((vectors - middle) ** 2).sum(axis=1).argmin()]
        assert typical @ middle == pytest.approx(nearest @ middle, abs=1e-5)
    assert [(each["dataset"], each["rows"], each["chosen"]) for each in facts["data_sets"]] == [
        ("of|0", 60, 23), ("of|1", 25, 23), ("of|2", 15, 14),
    ]  # fmt: skip
    (pair,) = facts["removed_pairs"]
    assert {pair["removed"], pair["kept"]} == {f"r{each}" for each in twins}
    assert pair["cosine"] == pytest.approx(1, abs=1e-6)
    text = (tmp_path / "out/report.md").read_text()
    assert text.startswith("# 60 of 100 rows\n")
    assert "| of&#124;2 | s | 15 | 14 | 93.3% |" in text
    assert f"| {pair['removed']} | {pair['kept']} | 1.0000 |" in text
    assert manifest["inputs"] == [verified_hash(path) for path in sorted((tmp_path / "in/embeddings").iterdir())]


def verified_hash(path):
    return xxh3_128_hexdigest(path.read_bytes())


def test_a_choice_is_verified_like_anything_published(tmp_path):
    out = tmp_path / "out"
    chosen(out, place=publish(tmp_path / "in", around(np.random.default_rng(7), [30])[0]), rows=5)
    assert verify(str(out), inspector_of(str(out))).problems == []
    (out / "rejected.parquet").write_bytes((out / "rejected.parquet").read_bytes()[:-1] + b"?")
    (problem,) = verify(str(out), inspector_of(str(out))).problems
    assert "rejected.parquet: content changed" in problem
    assert run(["verify", str(out)]) == 1


def test_singular_for_one_row_and_one_cluster(tmp_path, capsys):
    place = publish(tmp_path / "in", around(np.random.default_rng(9), [2], spread=1.0)[0], parts=1)
    assert run(["choose", place, "rows=1", "--output-dir", str(tmp_path / "out")]) == 0
    assert "1 row was asked for. The rows form 1 cluster, and" in (tmp_path / "out/report.md").read_text()
    assert "skipped 1 row: quota" in capsys.readouterr().err


def test_unusable_folders_are_rejected(tmp_path, capsys):
    vectors, _ = around(np.random.default_rng(8), [30])
    place = publish(tmp_path / "in", vectors)
    nll = publish_scores(tmp_path / "nll", "nll", [("a-00000000.parquet", nll_table([], []))])
    with pytest.raises(InputError, match="holds nll, not embeddings; make them with `tokenmill score embed`"):
        choose_rows(nll, str(tmp_path / "out"), ChoiceSettings())
    with pytest.raises(InputError, match="of type 'embeddings'; choose a different --output-dir"):
        choose_rows(place, place, ChoiceSettings())
    with pytest.raises(InputError, match="choose 10000 of 30 rows from 31 clusters"):
        choose_rows(place, str(tmp_path / "out"), ChoiceSettings(clusters=31))
    assert not (tmp_path / "out").exists()
    assert run(["choose", place, "row=5", "--output-dir", str(tmp_path / "out")]) == 2
    assert "row: unknown key; did you mean 'rows'?" in capsys.readouterr().err


def test_bad_vectors_and_repeated_rows_stop_the_choice(tmp_path):
    vectors = np.tile(np.float32([0.6, 0.8]), (8, 1))
    vectors[5] = np.nan
    with pytest.raises(RunError, match=r"part-00001-00000001\.parquet: row r5: the embedding is nan"):
        choose_rows(publish(tmp_path / "nan", vectors), str(tmp_path / "out"), ChoiceSettings())
    table = embeddings_table(["a", "b", "a"], np.eye(3, dtype=np.float32))
    twice = publish_scores(tmp_path / "twice", "embeddings", [("x-00000000.parquet", table)])
    with pytest.raises(RunError, match="row 'a' has 2 scores"):
        choose_rows(twice, str(tmp_path / "out"), ChoiceSettings())
    assert not (tmp_path / "out").exists()


def test_missing_gpu_is_rejected_before_reading(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="device=cuda: no GPU is visible on this machine; set device=cpu"):
        choose_rows(str(tmp_path / "nowhere"), str(tmp_path / "out"), ChoiceSettings(device="cuda"))
