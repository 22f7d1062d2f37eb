"""The page of scores: the numbers that its charts show, the same bytes each time, and names that stay text."""

import re
from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.flows.cli import run
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.kit import charts
from tokenmill.tasks.report import score_page

from tests.dedup.test_harmony_duplicates import data_set
from tests.examples import max_examples
from tests.harmony.rows import MATH_PLAIN, block
from tests.peers.conversations import talk, thinking, user
from tests.preparing_harmony import prepare
from tests.preparing_rl import write_rows
from tests.publishing_scores import embeddings_table, nll_table, publish_scores


@given(st.integers(0, 10_000), st.sampled_from([7, 1000]))
@max_examples(20)
def test_plane_has_the_largest_singular_values(seed, size):
    generator = np.random.default_rng(seed)
    vectors = (generator.normal(size=(60, 5)) * [9, 5, 2, 1, 1] + 3).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_page, "PROJECTED", size)
        found, share = score_page.principal_plane(vectors)
    centred = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    _, values, directions = np.linalg.svd(centred, full_matrices=False)
    expected, variance = centred @ directions[:2].T, (values[:2] ** 2).sum() / (values**2).sum()
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-4)
    assert share == pytest.approx(variance, abs=1e-6)


@given(st.integers(0, 10_000))
@max_examples(20)
def test_the_largest_weight_of_a_direction_is_positive_in_any_order_of_rows(seed):
    vectors = np.random.default_rng(seed).normal(size=(50, 6)) * [5, 3, 1, 1, 1, 1]
    found, _ = score_page.principal_plane(vectors.astype(np.float32))
    weights = (vectors - vectors.mean(axis=0)).T @ found  # in proportion to those of each direction
    assert (weights[np.abs(weights).argmax(axis=0), [0, 1]] > 0).all()
    other, _ = score_page.principal_plane(vectors[::-1].astype(np.float32))
    np.testing.assert_allclose(found, other[::-1], atol=1e-4)


@pytest.mark.parametrize("places", [np.ones((5, 2)), np.ones((1, 2)), np.tile([[0.6, 0.8]], (9, 1))])
def test_points_in_one_place(places):
    (chart,) = charts.cloud("map", {"a": places}, ("x", "y"))
    assert [mark.attributes["d"].count("M") for mark in chart.marks if mark.tag == "path"] == [len(places)]
    assert "nan" not in str(chart.marks)


def test_points_are_to_scale_and_later_groups_lie_below():
    corners = {"most": np.array([[0.0, 0.0], [2.0, 4.0]]), "all others": np.array([[1.0, 2.0]])}
    (chart,) = charts.cloud("map", corners, ("x", "y"))
    others, most = (mark.attributes["d"] for mark in chart.marks if mark.tag == "path")
    assert (others, most) == ("M180.0 194.0h0", "M4.0 370.0h0M356.0 18.0h0")
    assert chart.series == ["most (2)", "all others (1)"]


def test_many_points_are_counted_in_cells(monkeypatch):
    monkeypatch.setattr(charts, "MAX_POINTS", 100)
    groups = {"a": np.random.default_rng(3).normal(size=(60, 2)), "b": np.random.default_rng(4).normal(size=(41, 2))}
    drawn = charts.cloud("map", groups, ("x", "y"))
    assert [chart.title for chart in drawn] == ["map: a (60)", "map: b (41)"]
    counts = [sum(int(mark.title.split()[0]) for mark in chart.marks if mark.tag == "rect") for chart in drawn]
    assert counts == [60, 41]
    assert len(charts.cloud("map", {"a": groups["a"]}, ("x", "y"))) == 1


POOLS = {"easy": "meta_correctness_own >= 0.5", "hard": "meta_correctness_own < 0.7", "nobody": 'dataset == "nobody"'}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A normalization of rated problems, its NLL and its embeddings, and its rows in the order of the files."""
    folder = tmp_path_factory.mktemp("published")
    rates = [None, 0.0, 0.25, 0.5, 0.625, 1.0] * 4
    rows = []
    for number, rate in enumerate(rates):
        asked, rated = f"What is {number} and {number}?", None if rate is None else block(rate)
        said = talk(user(asked), thinking("So.", f"It is {number * 7919}."))
        more = {"uuid": f"u{number}", "problem": asked, "metadata": {"reason_high_no_tool": rated}}
        rows.append({**MATH_PLAIN, **said, **more})
    write_rows(folder / "in/high.jsonl", rows)
    pools = [{"name": name, "description": name, "predicate": predicate} for name, predicate in POOLS.items()]
    (folder / "pools.yaml").write_text(yaml.safe_dump({"pools": pools}))
    blend = {"datasets": [{**data_set("math", folder / "in"), "converter": "math_v2"}]}
    prepare(blend, folder / "out", dedup={"mode": "off"}, selection={"pools": str(folder / "pools.yaml")})
    (path,) = (folder / "out/data/high").iterdir()
    found = pq.read_table(path).to_pylist()
    assert len(found) == 24
    nll = [None if number % 6 == 5 else 0.1 * number for number in range(24)]
    publish_scores(folder / "nll", "nll", [(path, nll_table(found, nll))])
    vectors = np.random.default_rng(8).normal(size=(24, 5))
    table = embeddings_table([row["row_id"] for row in found], vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    publish_scores(folder / "vectors", "embeddings", [("candidates/part-00000-00000000.parquet", table)])
    return folder, found


def report(capfd, *arguments):
    """The page that a report writes, by the titles of its sections."""
    assert run(["report", *map(str, arguments)]) == 0
    record = orjson.loads(capfd.readouterr().out)["report"]
    page = Path(record["page"]).read_text()
    parts = re.findall(r"<section.*?</section>", page, re.DOTALL)
    assert len(parts) == len(record["plots"])
    return record, page, dict(zip(record["plots"], parts, strict=True))


def test_a_report_of_rows_and_scores_shows_all_of_them_on_one_page(published, capfd):
    folder, rows = published
    scores = ("--scores", folder / "nll", "--scores", folder / "vectors")
    record, page, parts = report(capfd, folder / "out", *scores, "--html", folder / "page.html")
    assert record["page"] == str(folder / "page.html")
    assert [title.partition(":")[0] for title in parts] == [
        f"Pools of {folder / 'out'}", "NLL, by dataset and split", "NLL against correctness", "Map of embeddings",
    ]  # fmt: skip
    pools, histogram, correctness, scatter = parts.values()
    rated = [row["meta_correctness_own"] for row in rows if row["meta_correctness_own"] is not None]
    assert (sum(rate >= 0.5 for rate in rated), sum(rate < 0.7 for rate in rated)) == (12, 16)
    assert 'aria-label="Rows: easy 12; hard 16"' in pools
    nll = [0.1 * number for number in range(24) if number % 6 != 5]
    assert f"math/high: 20 rows, median {np.median(nll):.3f}" in histogram
    edges = np.histogram_bin_edges(nll, 40)
    counted = [int(count) for count in re.findall(r"<title>[^<:]+: (\d+)</title>", histogram)]
    assert counted == np.histogram(nll, edges)[0].tolist()
    assert re.search(r'<path d="([^"]+)"', correctness)[1].count("M") == 16
    solved = [0.1 * number for number, row in enumerate(rows) if row["meta_correctness_own"] == 0.5]
    assert (
        f'<th scope="row">0.5</th><td class="number">4</td><td class="number">{np.median(solved):.3f}</td>'
        in correctness
    )
    assert all(f" {name}</span>" in scatter for name in ("easy (12)", "hard (8)", "all others (4)"))
    assert "20 rows of 24 have a mean NLL, in nats per token." in histogram
    assert "16 rows of 24 have both." in correctness
    assert not re.findall(r'(?:href|src)="(?!#)', page)
    assert not re.findall("<(?:script|img|link|iframe|object|image|foreignobject)", page, re.IGNORECASE)


def test_scores_without_rows_are_plotted(published, capfd):
    folder, _ = published
    record, page, _ = report(capfd, folder / "nll", "--scores", folder / "nll")
    assert record["page"] == f"{folder}/nll/scores.html"
    assert "math/high" in page
    assert "a/a (24)" in report(capfd, folder / "vectors", "--scores", folder / "vectors")[1]
    assert "hard 16" in report(capfd, folder / "out", "--scores", folder / "out")[1]


def test_datasets_and_folders_keep_their_names_and_their_rows(tmp_path, capfd, monkeypatch):
    names = [("z", "train"), ("a<i>", "train"), ("z", "valid"), ("m\x1b", "train")]
    counts = {"z/train": 5, "a<i>/train": 9, "z/valid": 2, "m\x1b/train": 7}
    rows = [
        {"row_id": f"{dataset}{split}{number}", "id": "x", "dataset": dataset, "split": split}
        for dataset, split in names
        for number in range(counts[f"{dataset}/{split}"])
    ]
    nll = [float("zam".index(row["dataset"][0])) + len(row["split"]) for row in rows]
    publish_scores(tmp_path / "<b>nll", "nll", [("data/part-00000-00000000.parquet", nll_table(rows, nll))])
    record, page, _ = report(
        capfd, tmp_path / "<b>nll", "--scores", tmp_path / "<b>nll", "--html", tmp_path / "page.html"
    )
    found = re.findall(r"<figcaption>(\S+): (\d+) rows, median (\d\.\d+)", page)
    assert [" ".join(each) for each in found] == [
        "a&lt;i&gt;/train 9 6.000", "m␛/train 7 7.000", "z/train 5 5.000", "z/valid 2 5.000",
    ]  # fmt: skip
    assert "<b>" in record["plots"][0]
    assert "<b>" not in page
    monkeypatch.setattr(score_page, "MAX_HISTOGRAMS", 2)
    _, *drawn = next(iter(score_page.report_page([str(tmp_path / "<b>nll")]).values()))
    assert [chart.title.partition(":")[0] for chart in drawn] == ["a<i>/train", "m\x1b/train"], "the largest groups"


def test_the_same_report_is_the_same_bytes(published):
    folder, _ = published
    places = [str(folder / name) for name in ("out", "nll", "vectors")]
    written = [
        score_page.publish_page(places, score_page.report_page(places), str(folder / name)) for name in ("one", "two")
    ]
    assert written[0].xxh3_128 == written[1].xxh3_128


def test_unplottable_folders_are_rejected(published, tmp_path):
    folder, _ = published
    empty, other = (publish_scores(tmp_path / kind, kind, []) for kind in ("nll", "sft"))
    for places, words in (
        ([tmp_path], r"no manifest\.json here"),
        ([folder / "out", folder / "out"], "name only one row folder"),
        ([empty], "no scores to plot; name a score folder"),
        ([other], "holds 'sft'; a report shows harmony, nll, embeddings"),
    ):
        with pytest.raises(InputError, match=words):
            score_page.report_page(list(map(str, places)))
