"""Scores joined to rows, and pools that name them: in tables, and in whole normalizations."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.harmony.columns import SCHEMA as ROWS
from tokenmill.tasks.score.choice import ChoiceSettings, choose_rows
from tokenmill.tasks.select.kind import HARMONY
from tokenmill.tasks.select.scores import (
    read_scores,
    require_joinable,
    score_columns,
    score_folder,
    with_scores,
    without_score,
)
from tokenmill.tasks.select.settings import SelectionChoices
from tokenmill.tasks.select.shard import require_selectable
from tokenmill.tasks.shards.manifest import file_hash

from tests.building import build_here
from tests.peers.conversations import assistant, talk, user
from tests.preparing_harmony import build, finish, plan, prepare
from tests.preparing_rl import write_rows
from tests.publishing_scores import embeddings_table, nll_table, publish_scores
from tests.select.test_select_shard import write_pools


def rows(*ids):
    return pa.table({"row_id": pa.array(ids, pa.string()), "text": [f"of {each}" for each in ids]})


def scores(found, name="nll_mean"):
    return pa.table({"row_id": pa.array(found, pa.string()), name: pa.array(found.values(), pa.float64())})


@given(st.lists(st.sampled_from("abcdef"), max_size=12), st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 9)))
def test_every_row_has_its_score_or_none(ids, found):
    joined = with_scores(rows(*ids), [scores(found)])
    assert joined.drop_columns(["nll_mean"]) == rows(*ids)
    assert joined["nll_mean"].to_pylist() == [found.get(each) for each in ids]
    assert without_score(rows(*ids), scores(found)) == sum(each not in found for each in ids)


def test_repeated_rows_repeat_scores_and_missing_ids_are_null():
    assert with_scores(rows("a", None, "a"), [scores({"a": 1.0})])["nll_mean"].to_pylist() == [1, None, 1]


TWICE = pa.concat_tables([scores({"a": 1.0, "b": 1.0}), scores({"b": 1.0})])


@pytest.mark.parametrize(
    ("join", "kind", "words"),
    [
        (lambda: with_scores(rows("a"), [scores({"a": 1.0})] * 2), InputError, "two columns 'nll_mean'"),
        (lambda: with_scores(pa.table({"id": ["a"]}), [scores({})]), InputError, "the rows need the column 'row_id' .* only id"),
        (lambda: require_joinable(pa.table({"id": ["a"]})), InputError, "the scores need the column 'row_id' .* only id"),
        (lambda: require_joinable(scores({None: 1.0})), RunError, "1 scores have no row_id"),
        (lambda: require_joinable(TWICE), RunError, "row 'b' has 2 scores"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_joined(join, kind, words):
    with pytest.raises(kind, match=words):
        join()


@pytest.fixture
def blend(tmp_path):
    """Conversations of two datasets, in two shards each."""
    sources = []
    for name in "ab":
        rows = [talk(user(f"What is {n} of {name}?"), assistant(f"{n * 7919} it is")) for n in range(12)]
        path = write_rows(tmp_path / f"{name}.jsonl", rows)
        sources.append({"name": name, "path": str(path), "converter": "openai_messages"})
    return {"datasets": sources}


CHOICES = {"shard_size": 700, "dedup": {"mode": "off"}}


def rows_by_file(out):
    return {path: pq.read_table(path).to_pylist() for path in sorted((out / "data").rglob("*.parquet"))}


def nll_of(row):
    """A number between 0 and 2 that the text decides."""
    return int(row["id"][:6], 16) / 2**23


def score(data, out, of=nll_of, files=slice(None)):
    """Publish the NLL of some files of rows."""
    tables = [(path, nll_table(rows, map(of, rows))) for path, rows in list(data.items())[files]]
    return publish_scores(out, "nll", tables)


def selected(blend, out, **selection):
    """Normalize and select; what the run built, and its manifest."""
    planned, built = plan(blend, out, **CHOICES, selection=selection), []
    build(planned, planned.plan.pending)

    def counting(step, pending, store, arguments, *, rebuild):
        built.extend((step.name, shard.key) for shard in pending)
        return build_here(step, pending, store, arguments, rebuild=rebuild)

    return built, finish(planned, counting)


def pool(out, name):
    tables = [pq.read_table(path) for path in sorted((Path(out) / "pools" / name).glob("*.parquet"))]
    return pa.concat_tables(tables) if tables else None


@pytest.mark.parametrize("materialize", [False, True])
def test_pools_take_rows_by_their_scores_and_keep_them(blend, tmp_path, materialize):
    own = ROWS.names if materialize else ["row_id", "source_row"]
    out = tmp_path / "out"
    selected(blend, out)
    data = rows_by_file(out)
    assert len(data) == 4
    place = score(data, tmp_path / "scores", files=slice(3))
    asked = {"band": "nll_mean >= 0.4 and nll_mean <= 1.2", "unscored": "nll_mean is null", "whole": "not truncated"}
    pools = write_pools(tmp_path / "pools.yaml", asked, base=())
    _, manifest = selected(blend, out, scores=[place], pools=pools, materialize=materialize)
    scored = [row for rows in list(data.values())[:3] for row in rows]
    unscored = list(data.values())[3]
    band, expected = pool(out, "band"), [row for row in scored if 0.4 <= nll_of(row) <= 1.2]
    assert band["row_id"].to_pylist() == [row["row_id"] for row in expected]
    assert band["nll_mean"].to_pylist() == [nll_of(row) for row in expected]
    assert 0 < band.num_rows < len(scored)
    assert pool(out, "unscored")["row_id"].to_pylist() == [row["row_id"] for row in unscored]
    assert pool(out, "unscored")["completion_token_count"].to_pylist() == [None] * len(unscored)
    assert not any(pool(out, "whole")["truncated"].to_pylist())
    of_scores = {"nll_mean": "double", "completion_token_count": "int64", "truncated": "bool", "model": "string"}
    for table in (band, pool(out, "unscored")):
        assert table.schema.names == [*own, *of_scores]
        assert {name: str(table.schema.field(name).type) for name in of_scores} == of_scores
    assert band.select(own).to_pylist() == [{name: row[name] for name in own} for row in expected]
    assert manifest["selection"]["without_score"] == {place: len(unscored)}
    assert f"without a score of {place}: {len(unscored)} rows" in list(HARMONY.summary(manifest))
    assert rows_by_file(out) == data


def test_candidates_may_be_required_to_have_a_score(blend, tmp_path):
    out = tmp_path / "out"
    selected(blend, out)
    data = rows_by_file(out)
    selected(blend, out, scores=[score(data, tmp_path / "scores")], require="nll_mean < 1")
    candidates = pa.concat_tables([pq.read_table(path) for path in sorted((out / "candidates").iterdir())])
    expected = [row["row_id"] for rows in data.values() for row in rows if nll_of(row) < 1]
    assert candidates["row_id"].to_pylist() == expected
    assert 0 < len(expected) < 24


def test_new_scores_rebuild_only_the_selection_of_the_rows_they_are_of(blend, tmp_path):
    out = tmp_path / "out"
    pools = write_pools(tmp_path / "pools.yaml", {"band": "nll_mean < 1"}, base=())
    selected(blend, out)
    data = rows_by_file(out)
    chosen = {"scores": [score(data, tmp_path / "scores")], "pools": pools}
    built, _ = selected(blend, out, **chosen)
    assert [name for name, _ in built] == ["select-rows"] * 4
    assert selected(blend, out, **chosen)[0] == []
    moved = tmp_path / "elsewhere/scores"
    moved.parent.mkdir()
    (tmp_path / "scores").rename(moved)
    chosen["scores"] = [str(moved)]
    assert selected(blend, out, **chosen)[0] == []
    second = {row["row_id"] for row in list(data.values())[1]}
    score(data, moved, of=lambda row: 0.5 if row["row_id"] in second else nll_of(row))
    built, _ = selected(blend, out, **chosen)
    assert [name for name, _ in built] == ["select-rows"]
    assert second <= {*pool(out, "band")["row_id"].to_pylist()}


def test_embeddings_of_candidates_are_of_the_rows_they_were_made_from(blend, tmp_path):
    out = tmp_path / "out"
    selected(blend, out)
    files = sorted((out / "candidates").iterdir())
    ids = {path: pq.read_table(path)["row_id"].to_pylist() for path in files}
    counts = {path: pa.array(range(len(of)), pa.int32()) for path, of in ids.items()}
    tables = [(path, embeddings_table(of, np.eye(len(of), 16), token_count=counts[path])) for path, of in ids.items()]
    place = publish_scores(tmp_path / "vectors", "embeddings", tables)
    pools = write_pools(tmp_path / "pools.yaml", {"short": "token_count < 2"}, base=())
    for _ in range(2):  # the second time, the candidates that were embedded are no longer published
        selected(blend, out, scores=[place], pools=pools)
        assert pool(out, "short")["row_id"].to_pylist() == [each for of in ids.values() for each in of[:2]]
        assert "embedding" not in pool(out, "short").schema.names
        assert not {path.name for path in files} & {path.name for path in (out / "candidates").iterdir()}


def test_a_choice_of_rows_is_a_pool(blend, tmp_path):
    out = tmp_path / "out"
    selected(blend, out)
    ids = [row["row_id"] for rows in rows_by_file(out).values() for row in rows]
    vectors = np.random.default_rng(1).normal(size=(len(ids), 8))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    tables = [("candidates/part-00000-00000000.parquet", embeddings_table(ids, vectors))]
    embedded = publish_scores(tmp_path / "vectors", "embeddings", tables)
    choose_rows(embedded, str(tmp_path / "picked"), ChoiceSettings(rows=7, clusters=3))
    chosen = pq.read_table(tmp_path / "picked/chosen.parquet").to_pylist()
    pools = write_pools(tmp_path / "pools.yaml", {"chosen": "place is not null", "others": "cluster is null"}, base=())
    _, manifest = selected(blend, out, scores=[str(tmp_path / "picked")], pools=pools)
    found = pool(out, "chosen").select(["row_id", "cluster", "distance", "place"]).to_pylist()
    assert sorted(found, key=lambda row: row["row_id"]) == sorted(chosen, key=lambda row: row["row_id"])
    assert len(chosen) == 7
    assert {*pool(out, "others")["row_id"].to_pylist()} == {*ids} - {row["row_id"] for row in chosen}
    assert manifest["selection"]["without_score"] == {str(tmp_path / "picked"): 17}


def test_ambiguous_score_names_use_the_folder(blend, tmp_path):
    out = tmp_path / "out"
    selected(blend, out)
    data = rows_by_file(out)
    ids = {path: [row["row_id"] for row in rows] for path, rows in data.items()}
    vectors = [(path, embeddings_table(of, np.eye(len(of), 8))) for path, of in ids.items()]
    places = [score(data, tmp_path / "small-1"), score(data, tmp_path / "large", of=lambda row: 1.0)]
    places.append(publish_scores(tmp_path / "vectors", "embeddings", vectors))
    pools = write_pools(
        tmp_path / "pools.yaml", {"harder": "small_1_nll_mean > large_nll_mean and token_count == 7"}, base=()
    )
    selected(blend, out, scores=places, pools=pools)
    harder = pool(out, "harder")
    assert set(harder["row_id"].to_pylist()) == {r["row_id"] for rows in data.values() for r in rows if nll_of(r) > 1}
    assert {"small_1_model", "large_model", "vectors_truncated", "token_count"} <= {*harder.schema.names}
    with pytest.raises(InputError, match=r"two columns 'large_nll_mean'"):
        require_selectable(SelectionChoices(scores=[places[1], places[1]]))


def test_misspelt_column_suggests_the_nearest(blend, tmp_path):
    selected(blend, tmp_path / "out")
    place = score(rows_by_file(tmp_path / "out"), tmp_path / "scores")
    pools = write_pools(tmp_path / "pools.yaml", {"a": "nll_meen < 1"}, base=())
    with pytest.raises(InputError, match="unknown field 'nll_meen'; did you mean 'nll_mean'"):
        require_selectable(SelectionChoices(pools=pools, scores=[place]))
    with pytest.raises(InputError, match=r"selection\.require: .*\n?.*unknown field 'nll_mean'"):
        require_selectable(SelectionChoices(require="nll_mean < 1"))
    with pytest.raises(InputError, match="field 'nll_mean' is a number"):
        require_selectable(SelectionChoices(require="nll_mean == 'high'", scores=[place]))
    with pytest.raises(InputError, match="unknown field 'nll_meen'"):
        selected(blend, tmp_path / "out", pools=pools, scores=[place])
    require_selectable(SelectionChoices(require="nll_mean < 1", scores=[place]))


def test_columns_that_cannot_be_compared_are_excluded(tmp_path):
    kept = {
        "tiny": pa.array([1], pa.int8()), "half": pa.array([0.5], pa.float16()), "no": pa.array([False]),
        "name": pa.array(["x"]).dictionary_encode(), "big": pa.array([1], pa.uint64()), "list": pa.array([[1]]),
        "text": pa.array(["rows have this themselves"]),
    }  # fmt: skip
    table = pa.table({"row_id": ["a"], **kept})
    folder = score_folder(publish_scores(tmp_path / "s", "nll", [("x-00000000.parquet", table)]))
    (columns,) = score_columns([folder])
    assert columns == [
        ("tiny", "tiny", "int64"), ("half", "half", "double"), ("no", "no", "bool"), ("name", "name", "string"),
    ]  # fmt: skip
    (side,) = read_scores([columns], [(0, content(folder))], {content(folder): folder.files[0].place})
    assert side.to_pylist() == [{"row_id": "a", "tiny": 1, "half": 0.5, "no": False, "name": "x"}]


def content(folder):
    return file_hash(folder.files[0].place)


def test_folders_without_scores_of_these_rows_are_rejected(blend, tmp_path):
    out = tmp_path / "out"
    prepare(blend, out, **CHOICES)
    with pytest.raises(InputError, match=r"no manifest\.json in this folder"):
        score_folder(str(tmp_path))
    with pytest.raises(InputError, match="of type 'harmony'; expected nll, embeddings, choice"):
        score_folder(str(out))
    other = publish_scores(tmp_path / "other", "nll", [("x-0123abcd.parquet", scores({"a": 1.0}))])
    with pytest.raises(InputError, match="doesn't have scores for these rows; score the published rows again"):
        selected(blend, out, scores=[other])
    empty = publish_scores(tmp_path / "empty", "nll", [])
    with pytest.raises(InputError, match="this folder doesn't have scores"):
        require_selectable(SelectionChoices(scores=[empty]))


def test_scores_that_change_under_a_run_are_noticed(tmp_path):
    place = publish_scores(tmp_path / "s", "nll", [("x-00000000.parquet", scores({"a": 1.0}))])
    folder = score_folder(place)
    found = content(folder)
    publish_scores(tmp_path / "s", "nll", [("x-00000000.parquet", scores({"a": 2.0}))])
    with pytest.raises(RunError, match="the scores changed during the run"):
        read_scores(score_columns([folder]), [(0, found)], {found: folder.files[0].place})


def test_a_row_that_was_scored_twice_stops_the_selection(blend, tmp_path):
    out = tmp_path / "out"
    selected(blend, out)
    path, rows_of_file = next(iter(rows_by_file(out).items()))
    table = nll_table(rows_of_file, map(nll_of, rows_of_file))
    place = publish_scores(tmp_path / "scores", "nll", [(path, table), (path, table.slice(0, 1))])
    with pytest.raises(RunError, match="has 2 scores"):
        selected(blend, out, scores=[place])
