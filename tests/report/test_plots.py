"""Plots of scores: the numbers they show, the same bytes each time, and names that stay text."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tokenmill.flows.cli import run
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report import plots, score_page

from tests.dedup.test_harmony_duplicates import data_set
from tests.examples import max_examples
from tests.harmony.rows import MATH_PLAIN, block
from tests.peers.conversations import talk, thinking, user
from tests.preparing_harmony import prepare
from tests.preparing_rl import write_rows
from tests.publishing_scores import embeddings_table, nll_table, publish_scores

REPOSITORY = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["$a_b$", "<script>alert(1)</script>", "_hidden", "two\nlines\x1b[0m", "n" * 60]
SHOWN = ["$a_b$", "<script>alert(1)</script>", "_hidden", "two↵lines␛[0m", "n" * 31 + "…"]


def texts(svg):
    return ["".join(each.itertext()) for each in ET.fromstring(svg).iter(f"{SVG}text")]


def points(svg):
    """The points of each collection of them."""
    groups = [each for each in ET.fromstring(svg).iter(f"{SVG}g") if each.get("id", "").startswith("PathCollection")]
    return [len(list(group.iter(f"{SVG}use"))) for group in groups]


def cells(svg):
    groups = [each for each in ET.fromstring(svg).iter(f"{SVG}g") if each.get("id", "").startswith("PolyCollection")]
    return [len(list(group.iter(f"{SVG}use"))) + len(list(group.iter(f"{SVG}path"))) for group in groups]


def by_svd(vectors):
    """The plane of the first two principal components, by another way: singular values of the centred vectors."""
    centred = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    _, values, directions = np.linalg.svd(centred, full_matrices=False)
    return centred @ directions[:2].T, (values[:2] ** 2).sum() / (values**2).sum()


@given(st.integers(0, 10_000), st.sampled_from([7, 1000]))
@max_examples(20)
def test_the_plane_is_that_of_the_largest_singular_values(seed, size):
    generator = np.random.default_rng(seed)
    vectors = (generator.normal(size=(60, 5)) * [9, 5, 2, 1, 1] + 3).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "PROJECTED", size)
        found, share = plots.principal_plane(vectors)
    expected, variance = by_svd(vectors)
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-4)
    assert share == pytest.approx(variance, abs=1e-6)


@given(st.integers(0, 10_000))
@max_examples(20)
def test_the_largest_weight_of_a_direction_is_positive_in_any_order_of_rows(seed):
    vectors = np.random.default_rng(seed).normal(size=(50, 6)) * [5, 3, 1, 1, 1, 1]
    found, _ = plots.principal_plane(vectors.astype(np.float32))
    weights = (vectors - vectors.mean(axis=0)).T @ found  # in proportion to those of each direction
    assert (weights[np.abs(weights).argmax(axis=0), [0, 1]] > 0).all()
    other, _ = plots.principal_plane(vectors[::-1].astype(np.float32))
    np.testing.assert_allclose(found, other[::-1], atol=1e-4)


@pytest.mark.parametrize("vectors", [np.ones((5, 1)), np.ones((1, 8)), np.tile([[0.6, 0.8]], (9, 1))])
def test_vectors_that_do_not_differ_have_a_map_too(vectors):
    svg = plots.embedding_map(vectors.astype(np.float32), ["a"], np.zeros(len(vectors), np.int64))
    assert points(svg)[0] == len(vectors)


def test_a_map_has_a_point_for_every_row_and_a_colour_for_the_largest_groups():
    generator = np.random.default_rng(2)
    owners = np.repeat(np.arange(-1, 12), [5, *range(20, 8, -1)])
    svg = plots.embedding_map(generator.normal(size=(len(owners), 6)), [f"p{number}" for number in range(12)], owners)
    others = 5 + 11 + 10 + 9
    assert points(svg)[:10] == [others, *range(20, 11, -1)]
    legend = [f"all others ({others})", *(f"p{number} ({20 - number})" for number in range(9))]
    assert [text for text in texts(svg) if "(" in text and "%" not in text] == legend


def test_many_points_are_counted_in_cells(monkeypatch):
    monkeypatch.setattr(plots, "MOST_POINTS", 100)
    generator = np.random.default_rng(3)
    vectors, owners = generator.normal(size=(101, 6)), generator.integers(0, 2, 101)
    svg = plots.embedding_map(vectors, ["a", "b"], owners)
    assert points(svg) == []
    assert len(cells(svg)) >= 2
    assert [text for text in texts(svg) if text.startswith(("a (", "b ("))] == [
        f"{'ab'[group]} ({(owners == group).sum()})" for group in np.argsort(-np.bincount(owners), kind="stable")
    ]
    chosen = plots.choice_map(vectors, np.arange(7))
    assert {"all rows (101)", "chosen (7)"} <= {*texts(chosen)}
    assert points(plots.embedding_map(vectors[:100], ["a"], np.zeros(100, np.int64)))[0] == 100
    assert "rows in a cell" in texts(plots.nll_by_correctness(generator.random(101), generator.random(101)))
    assert points(plots.nll_by_correctness(np.ones(100), np.ones(100)))[0] == 100


def test_a_choice_shows_what_was_chosen_among_what_was_left_out():
    vectors = np.random.default_rng(4).normal(size=(30, 6))
    svg = plots.choice_map(vectors, np.array([3, 17, 20]))
    assert points(svg)[:2] == [27, 3]
    assert {"left out (27)", "chosen (3)"} <= {*texts(svg)}


def test_a_histogram_counts_every_row_of_its_group(monkeypatch):
    drawn = []
    monkeypatch.setattr(Axes, "stairs", lambda self, counts, edges, **rest: drawn.append((counts, edges)))
    generator = np.random.default_rng(5)
    values, owners = generator.gamma(2, 0.4, 500), np.repeat([0, 1, 3], [100, 350, 50])
    svg = plots.nll_histograms(["a/x", "b/y", "nothing", "c/z"], values, owners)
    assert [counts.sum() for counts, _ in drawn] == [350, 100, 50]
    (edges,) = {tuple(edges) for _, edges in drawn}
    assert (edges[0], edges[-1]) == (values.min(), values.max())
    np.testing.assert_array_equal(drawn[0][0], np.histogram(values[100:450], edges)[0])
    told = " ".join(texts(svg))
    for name, rows in (("a/x", slice(100)), ("b/y", slice(100, 450)), ("c/z", slice(450, 500))):
        assert name in told
        assert f"{len(values[rows])} rows, median {np.median(values[rows]):.3f}" in told
    assert "nothing" not in told


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_labels_of_histograms_lie_within_the_figure(monkeypatch, groups):
    labels, real = [], Figure.supxlabel
    monkeypatch.setattr(Figure, "supxlabel", lambda self, text: labels.append(real(self, text)))
    owners = np.arange(10 * groups) % groups
    plots.nll_histograms([f"set{number}" for number in range(groups)], owners + 0.5, owners)
    (label,) = labels
    box, page = label.get_window_extent(), label.figure.bbox
    assert page.x0 <= box.x0 < box.x1 <= page.x1
    assert page.y0 <= box.y0 < box.y1 <= page.y1


def test_only_the_largest_groups_have_histograms(monkeypatch):
    monkeypatch.setattr(plots, "MOST_PANELS", 3)
    owners = np.repeat(np.arange(5), [4, 9, 1, 7, 2])
    told = " ".join(texts(plots.nll_histograms(["set0", "set1", "set2", "set3", "set4"], np.ones(len(owners)), owners)))
    assert re.findall(r"set\d", told) == ["set1", "set3", "set0"]


@pytest.mark.slow
def test_medians_follow_the_correctness(monkeypatch):
    drawn, real = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, *args, **rest: drawn.append(args) or real(self, *args, **rest))
    correctness = np.repeat([0.0, 0.25, 1.0], [3, 4, 5])
    nll = np.array([3, 1, 2, *[0.5, 0.7, 0.9, 9], *[0.1, 0.2, 0.3, 0.4, 5]])
    svg = plots.nll_by_correctness(correctness, nll)
    ((steps, medians),) = drawn
    assert (steps.tolist(), medians) == ([0, 0.25, 1], [2, pytest.approx(0.8), 0.3])
    assert points(svg)[0] == 12


@pytest.mark.filterwarnings("error")
def test_names_are_text_and_nothing_else():
    vectors, owners = np.random.default_rng(6).normal(size=(50, 4)), np.repeat(np.arange(5), 10)
    drawn = [plots.embedding_map(vectors, NAMES, owners), plots.bars(NAMES, [3] * 5, "rows")]
    drawn.append(plots.nll_histograms(NAMES, vectors[:, 0], owners))
    for svg in drawn:
        told = [text.removesuffix(" (10)") for text in texts(svg)]
        assert {*SHOWN} <= {*told}
        assert b"<script" not in svg


CODE = """
import hashlib
import numpy as np
from tokenmill.tasks.report import plots
generator = np.random.default_rng(7)
vectors, owners = generator.normal(size=(300, 6)), generator.integers(-1, 4, 300)
names, values = list("abcd"), generator.random(300)
drawn = [plots.nll_histograms(names, values, owners % 4), plots.bars(names, owners[:4], "x")]
for plots.MOST_POINTS in (100, 1000):
    drawn += [plots.embedding_map(vectors, names, owners), plots.choice_map(vectors, np.arange(40))]
    drawn += [plots.nll_by_correctness(values, values)]
print(hashlib.sha256(b"".join(drawn)).hexdigest())
"""


@pytest.mark.slow
def test_the_same_numbers_give_the_same_bytes_whatever_is_configured(tmp_path):
    (tmp_path / "matplotlibrc").write_text("font.size: 20\nsvg.fonttype: path\nlines.linewidth: 5\ntext.usetex: true\n")
    configured = {"PYTHONHASHSEED": "2", "MATPLOTLIBRC": str(tmp_path), "TZ": "Asia/Tokyo"}
    found = {
        subprocess.check_output([sys.executable, "-c", CODE], cwd=REPOSITORY, env={**os.environ, **environment})
        for environment in ({"PYTHONHASHSEED": "1"}, configured)
    }
    assert len(found) == 1


def test_a_plot_has_no_date_and_leaves_the_configuration_alone():
    before = dict(mpl.rcParams)
    svg = plots.bars(["a"], [1], "rows")
    assert b"<dc:date>" not in svg
    assert dict(mpl.rcParams) == before


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


class Page(HTMLParser):
    """The names of all elements, and the text that is not of a picture."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.paragraphs, self._open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self._open.append(tag)

    def handle_data(self, data):
        if self._open and self._open[-1] in {"p", "h1", "h2"} and data.strip():
            self.paragraphs.append(data)


def report(capfd, *arguments):
    """The page that a report writes, and its pictures."""
    assert run(["report", *map(str, arguments)]) == 0
    record = orjson.loads(capfd.readouterr().out)["report"]
    page = Path(record["page"]).read_text()
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == len(record["plots"])
    return record, page, pictures


def test_a_report_of_rows_and_scores_shows_all_of_them_on_one_page(published, capfd):
    folder, rows = published
    scores = ("--scores", folder / "nll", "--scores", folder / "vectors")
    record, page, pictures = report(capfd, folder / "out", *scores, "--html", folder / "page.html")
    assert record["page"] == str(folder / "page.html")
    assert [title.partition(":")[0] for title in record["plots"]] == [
        f"Pools of {folder / 'out'}", "NLL, by dataset and split", "NLL against correctness", "Map of embeddings",
    ]  # fmt: skip
    pools, histogram, correctness, scatter = pictures
    easy = [row for row in rows if (row["meta_correctness_own"] or 0) >= 0.5]
    hard = [row for row in rows if row["meta_correctness_own"] is not None and row["meta_correctness_own"] < 0.7]
    assert (len(easy), len(hard)) == (12, 16)
    assert [text for text in texts(pools) if text in {"easy", "hard", "nobody"}] == ["easy", "hard"]
    assert {"12", "16"} <= {*texts(pools)}
    median = np.median([0.1 * number for number in range(24) if number % 6 != 5])
    assert f"20 rows, median {median:.3f}" in " ".join(texts(histogram))
    assert points(correctness)[0] == 16
    first = {"easy (12)", "hard (8)", "all others (4)"}
    assert {text for text in texts(scatter) if "(" in text and "%" not in text} == first
    told = Page(page)
    assert "20 rows of 24 have a mean NLL; the line is the median." in told.paragraphs
    assert "16 rows of 24 have both." in told.paragraphs
    assert not {"script", "img", "link", "iframe", "object", "image", "foreignobject"} & {*told.elements}
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'\"" in page
    assert "http-equiv" in page
    assert not re.findall(r'(?:href|src)="(?!#)', page)


def test_scores_alone_are_drawn_beside_themselves(published, capfd):
    folder, _ = published
    record, _, (histogram,) = report(capfd, folder / "nll", "--scores", folder / "nll")
    assert record["page"] == f"{folder}/nll/scores.html"
    assert "math/high" in " ".join(texts(histogram))
    _, _, (scatter,) = report(capfd, folder / "vectors", "--scores", folder / "vectors")
    assert "a/a (24)" in texts(scatter)
    _, _, (bars,) = report(capfd, folder / "out", "--scores", folder / "out")
    assert "hard" in texts(bars)


def test_data_sets_and_folders_keep_their_names_and_their_rows(tmp_path, capfd):
    names = [("z", "train"), ("a", "train"), ("z", "valid"), ("m", "train")]
    counts = {"z/train": 5, "a/train": 9, "z/valid": 2, "m/train": 7}
    rows = [
        {"row_id": f"{dataset}{split}{number}", "id": "x", "dataset": dataset, "split": split}
        for dataset, split in names
        for number in range(counts[f"{dataset}/{split}"])
    ]
    nll = [float("zam".index(row["dataset"])) + len(row["split"]) for row in rows]
    publish_scores(tmp_path / "<b>nll", "nll", [("data/part-00000-00000000.parquet", nll_table(rows, nll))])
    record, page, (histogram,) = report(
        capfd, tmp_path / "<b>nll", "--scores", tmp_path / "<b>nll", "--html", tmp_path / "page.html"
    )
    told = " ".join(texts(histogram))
    found = [" ".join(each) for each in re.findall(r"(\w/\w+) (\d+) rows, median (\d\.\d+)", told)]
    assert found == ["a/train 9 6.000", "m/train 7 7.000", "z/train 5 5.000", "z/valid 2 5.000"]
    assert "<b>" in record["plots"][0]
    assert "<b>" not in page


def test_the_same_report_is_the_same_bytes(published):
    folder, _ = published
    places = [str(folder / name) for name in ("out", "nll", "vectors")]
    written = [
        score_page.publish_page(places, score_page.report_page(places), str(folder / name)) for name in ("one", "two")
    ]
    assert written[0].xxh3_128 == written[1].xxh3_128


def test_what_cannot_be_drawn_is_refused(published, tmp_path):
    folder, _ = published
    empty, other = (publish_scores(tmp_path / kind, kind, []) for kind in ("nll", "sft"))
    for places, words in (
        ([tmp_path], r"no manifest\.json here"),
        ([folder / "out", folder / "out"], "name only one folder of rows"),
        ([empty], "there is nothing to draw; name a folder of scores"),
        ([other], "holds 'sft'; a report shows harmony, nll, embeddings"),
    ):
        with pytest.raises(InputError, match=words):
            score_page.report_page(list(map(str, places)))


def test_without_matplotlib_the_command_says_what_to_install(published):
    folder, _ = published
    code = (
        "import sys; sys.modules['matplotlib'] = None; from tokenmill.flows.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "report", str(folder / "nll"), "--scores", str(folder / "nll")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "install it with: pip install 'tokenmill[report]'" in done.stderr
