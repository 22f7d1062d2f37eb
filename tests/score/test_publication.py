"""What is published of scores: side tables that join one to one, percentiles, the same bytes always, and no half of it."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.report.plan import plan_record
from tokenmill.tasks.report.summary import artifact_record, markdown
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.score.shard import inspect_score_shard
from tokenmill.tasks.select.scores import with_scores
from tokenmill.tasks.shards.manifest import read_manifest
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import verify

from tests import preparing_harmony
from tests.preparing import tree
from tests.preparing_rl import write_rows
from tests.preparing_scores import (
    RARE,
    chat,
    confused_by_the_rare_word,
    harmony_model,
    normalization,
    plan,
    prepare,
    rows_of,
    table_of,
)
from tests.score.test_shard import embedding_model
from tests.score.tiny_models import llama

RARE_ROW = 16
"""The row with RARE, from 0: row 17."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A normalization, one row of which has RARE; a random model, and one that RARE confuses."""
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenmill.tasks.harmony.shard.GROUP_CHARACTERS", 1)  # many row groups, hence many slices
        normalization(folder, count=24, rare=RARE_ROW)
    harmony_model(folder / "random")
    harmony_model(folder / "confused", confused_by_the_rare_word)
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    """The plan of an undisturbed publication of NLL."""
    planned, _ = score(folder, folder / "whole")
    assert len(planned.plan.shards) > 8
    return planned


def score(folder, out, model="random", **settings):
    return prepare("nll", str(folder / "out"), out, model=str(folder / model), **settings)


def problems(out):
    return verify(str(out), inspector_of(str(out))).problems


@pytest.mark.slow
@pytest.mark.parametrize("what", ["nll", "embed"])
def test_scores_join_the_rows_of_a_normalization_one_to_one(folder, whole, tmp_path, what):
    if what == "nll":
        out = folder / "whole"
    else:
        prepare("embed", str(folder / "out"), out := tmp_path / "out")
    (side,) = [path for path in out.iterdir() if path.name in {"nll", "embeddings"}]
    scores, rows = table_of(side), rows_of(folder / "out")
    assert scores.num_rows == rows.num_rows == 48
    names = ["row_id", "id", "dataset", "split"]
    order = [("row_id", "ascending")]
    assert scores.select(names).sort_by(order).equals(rows.select(names).sort_by(order))
    joined = with_scores(rows.select(["row_id", "text"]), [scores.drop_columns(names[1:])])
    assert joined.num_rows == 48
    scored = {"nll_mean", "embedding"} & {*joined.column_names}
    assert [joined[name].null_count for name in scored] == [0]
    assert "text" not in scores.column_names
    assert problems(out) == []


@pytest.mark.slow
def test_a_part_is_found_by_the_file_it_scores(folder, whole):
    manifest = read_manifest(str(folder / "whole"))
    for entry in manifest["shards"]:
        ids = set(pq.read_table(entry["file"], columns=["row_id"])["row_id"].to_pylist())
        ((name,),) = entry["published"].values()
        assert name.startswith("nll/part-")
        assert name.endswith(f"-{entry['key'][:8]}.parquet")
        assert set(pq.read_table(folder / "whole" / name)["row_id"].to_pylist()) <= ids
    listed = json.loads((folder / "whole/blend.json").read_bytes())
    assert listed == {"datasets": [{"name": "nll", "path": str(folder / "whole/nll")}]}


def test_percentiles_are_of_the_split(folder, whole):
    table = table_of(folder / "whole/nll").to_pylist()
    for row in table:
        rivals = [other["nll_mean"] for other in table if other["split"] == row["split"]]
        below = sum(other < row["nll_mean"] for other in rivals) + sum(other == row["nll_mean"] for other in rivals) / 2
        assert row["percentile_within_split"] == pytest.approx(100 * below / len(rivals))
    assert {row["split"] for row in table} == {"easy", "hard"}


@pytest.mark.slow
def test_equal_split_names_are_separated_by_dataset(folder, tmp_path):
    texts = rows_of(folder / "out")["text"].to_pylist()
    rows = [
        {"row_id": str(number), "text": text, "dataset": "ab"[number % 2], "split": "xyz"[number % 3]}
        for number, text in enumerate(texts)
    ]
    prepare("nll", str(write_rows(tmp_path / "rows.jsonl", rows)), tmp_path / "out", model=str(folder / "random"))
    found = table_of(tmp_path / "out/nll").to_pylist()
    for dataset, split in itertools.product("ab", "xyz"):
        of = [row for row in found if (row["dataset"], row["split"]) == (dataset, split)]
        assert np.mean([row["percentile_within_split"] for row in of]) == pytest.approx(50)
        order = sorted(of, key=lambda row: row["nll_mean"])
        assert order == sorted(of, key=lambda row: row["percentile_within_split"])


def test_only_what_changed_is_scored_again(folder, whole, tmp_path):
    out = tmp_path / "whole"
    shutil.copytree(folder / "whole", out)
    shutil.copytree(folder / "random", tmp_path / "elsewhere/random")
    moved = {"model": str(tmp_path / "elsewhere/random"), "store": str(folder / "whole/shards")}
    assert not plan("nll", str(folder / "out"), out, **moved).plan.pending
    files = sorted((folder / "out/data/easy").iterdir())
    one = {"datasets": [{"name": "easy", "path": str(files[0]), "weight": 9.0}]}
    chosen = {"model": str(folder / "random"), "store": str(folder / "whole/shards")}
    assert not plan("nll", one, out, **chosen).plan.pending
    for other in ({"max_length": 200}, {"loss_on": "last_turn"}, {"precision": "bfloat16"}, {"token_budget": 99}):
        assert len(plan("nll", str(folder / "out"), out, **chosen, **other).plan.pending) == len(whole.plan.shards)
    assert plan("nll", str(folder / "out"), out, **{**chosen, "model": str(folder / "confused")}).plan.pending


@pytest.mark.slow
def test_other_splits_do_not_change_percentiles(folder, whole, tmp_path):
    """The slices of a split keep their names when another split is scored with them; a split that grows is ranked anew."""
    easy = {"datasets": [{"name": "easy", "path": str(folder / "out/data/easy")}]}
    _, alone = prepare("nll", easy, tmp_path / "out", model=str(folder / "random"))
    both = read_manifest(str(folder / "whole"))
    keys = {entry["key"] for entry in both["shards"]}
    assert {entry["key"] for entry in alone["shards"]} < keys
    files = sorted((folder / "out/data/easy").iterdir())[:-1]
    fewer = {"datasets": [{"name": "easy", "path": str(tmp_path / "fewer")}]}
    (tmp_path / "fewer").mkdir()
    for path in files:
        shutil.copy(path, tmp_path / "fewer")
    again, partly = prepare("nll", fewer, tmp_path / "out", model=str(folder / "random"))
    assert not again.plan.pending
    assert not {entry["key"] for entry in partly["shards"]} & keys
    assert len(list((tmp_path / "out/nll").iterdir())) == len(partly["shards"]) < len(alone["shards"])
    assert problems(tmp_path / "out") == []


def test_a_row_that_is_there_twice_stops_publication_and_names_both_places(folder, tmp_path):
    path = str(folder / "out/data/easy")
    blend = {"datasets": [{"name": "one", "path": path}, {"name": "two", "path": path}]}
    with pytest.raises(RunError, match=r"occurs 2 times, in datasets/one/.* and datasets/two/.*name each file once"):
        prepare("embed", blend, tmp_path / "out", dimensions=4)
    assert not (tmp_path / "out/embeddings").exists()
    rows = [{"id": "same", "text": "a"}, {"id": "same", "text": "b"}]
    with pytest.raises(RunError, match="row 'same' occurs 2 times"):
        prepare("embed", str(write_rows(tmp_path / "rows.jsonl", rows)), tmp_path / "other")


def test_normalization_without_candidates_is_rejected(tmp_path):
    path = write_rows(tmp_path / "in/train.jsonl", [chat(1)])
    source = {"name": "one", "path": str(path)}
    preparing_harmony.prepare({"datasets": [source]}, tmp_path / "out", selection={"view": "none"})
    with pytest.raises(InputError, match="didn't select candidates to embed"):
        plan("embed", str(tmp_path / "out"), tmp_path / "scores")


# Numbers that are none.


def visible(out):
    return {name: content for name, content in tree(out).items() if not name.startswith("shards/")}


def nothing_published(out):
    """Whether the folder holds the note of a failed run, and the store; and nothing of what a publication has."""
    return {path.name for path in Path(out).iterdir()} <= {"manifest.json", "shards"}


@pytest.mark.slow
def test_nan_publishes_no_scores_and_names_file_and_row(folder, tmp_path):
    out = tmp_path / "out"
    rows = {row["row_id"]: row for row in rows_of(folder / "out").to_pylist()}
    (rare,) = [name for name, row in rows.items() if RARE in row["text"]]
    with pytest.raises(
        RunError, match=rf"part-0000\d-\w+\.parquet: row \d+ \(row_id {rare}\): the NLL of a token is nan"
    ):
        score(folder, out, "confused")
    assert nothing_published(out)
    note = json.loads((out / "manifest.json").read_bytes())
    assert note["status"] == "failed"
    assert rare in note["error"]
    for look in (read_manifest, problems):
        with pytest.raises(RunError, match=r"the run failed and didn't publish: .*the NLL of a token is nan"):
            look(str(out))
    assert plan_record(plan("nll", str(folder / "out"), out, model=str(folder / "random")))["plan"]["shards"]["pending"]
    score(folder, out)
    assert problems(out) == []
    before = visible(out)
    assert table_of(out / "nll").num_rows == 48
    with pytest.raises(RunError, match="is nan"):
        score(folder, out, "confused")
    assert visible(out) == before
    assert problems(out) == []


@pytest.mark.slow
def test_row_17_of_a_file_is_called_that(folder, tmp_path):
    rows = rows_of(folder / "out")
    rare = next(number for number, text in enumerate(rows["text"].to_pylist()) if RARE in text)
    others = [number for number in range(len(rows)) if number != rare]
    rows = rows.take([*others[:RARE_ROW], rare, *others[RARE_ROW:]])
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=5)
    with pytest.raises(RunError, match=r"rows\.parquet: row 17 \(row_id"):
        prepare("nll", str(tmp_path / "rows.parquet"), tmp_path / "out", model=str(folder / "confused"))
    lines = [{"row_id": row["row_id"], "text": row["text"]} for row in rows.to_pylist()]
    path = write_rows(tmp_path / "rows.jsonl", lines)
    with pytest.raises(RunError, match=r"rows\.jsonl: row 17 \(row_id"):
        prepare("nll", str(path), tmp_path / "other", model=str(folder / "confused"))


def test_nan_embedding_publishes_no_scores(tmp_path):
    model = embedding_model(tmp_path / "embedder")
    broken = llama(64)
    broken.model.embed_tokens.weight.data[3 + 7] = float("nan")
    broken.model.save_pretrained(model)
    rows = [{"row_id": str(number), "text": f"w1 w2 w{7 if number == 16 else 9}"} for number in range(40)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    chosen = {"engine": "transformers", "model": model, "pooling": "mean"}
    with pytest.raises(RunError, match=r"rows\.jsonl: row 17 \(row_id 16\): the embedding is nan"):
        prepare("embed", str(path), tmp_path / "out", **chosen)
    assert nothing_published(tmp_path / "out")


# Verification.


@pytest.fixture
def one_shard(tmp_path):
    """A function from a kind of scores to the receipt, store and file of a shard of a few rows."""

    def made(what, folder=None):
        if what == "nll":
            planned, manifest = score(folder, tmp_path / "out", sample=6)
        else:
            rows = [{"row_id": str(number), "text": f"text {number}"} for number in range(6)]
            path = write_rows(tmp_path / "rows.jsonl", rows)
            planned, manifest = prepare("embed", str(path), tmp_path / "out", dimensions=8, shard_size="1MB")
        store = Store(planned.plan.store.place, planned.plan.store.kind)
        receipt = store.receipt(manifest["shards"][0]["key"])
        return store, receipt, Path(store.path(receipt.key, "all.parquet"))

    return made


def replaced(table, name, values):
    number = table.schema.get_field_index(name)
    return table.set_column(number, table.schema.field(name), pa.array(values, table.schema.field(name).type))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table.slice(1), "its receipt records"),
        (lambda table: table.drop_columns(["ppl"]), "not the columns of scores"),
        (lambda table: replaced(table, "row_id", ["x"] * len(table)), "share one with a different row"),
        (lambda table: replaced(table, "row_id", [None] * len(table)), "lack a row_id"),
        (lambda table: replaced(table, "nll_mean", [float("nan")] * len(table)), "nll_mean holds NaN"),
        (lambda table: replaced(table, "completion_token_count", [0] * len(table)), "without them has one"),
        (lambda table: replaced(table, "percentile_within_split", [None] * len(table)), "lacks a score"),
    ],
)
def test_wrong_nll_table_is_found(folder, one_shard, change, words):
    store, receipt, file = one_shard("nll", folder)
    assert inspect_score_shard(store, receipt) == []
    pq.write_table(change(pq.read_table(file)), file)
    assert any(words in problem for problem in inspect_score_shard(store, receipt))


@pytest.mark.parametrize(
    ("vectors", "words"), [(np.full((6, 8), np.nan), "holds NaN"), (np.full((6, 8), 0.5), "whose length is not 1")]
)
def test_vectors_that_are_none_are_found(one_shard, vectors, words):
    store, receipt, file = one_shard("embed")
    assert inspect_score_shard(store, receipt) == []
    table = pq.read_table(file)
    stored = pa.FixedSizeListArray.from_arrays(pa.array(vectors.astype(np.float16).reshape(-1)), 8)
    pq.write_table(table.set_column(table.schema.get_field_index("embedding"), "embedding", stored), file)
    assert any(words in problem for problem in inspect_score_shard(store, receipt))


def test_summary_shows_perplexity(folder, whole):
    manifest = read_manifest(str(folder / "whole"))
    table = table_of(folder / "whole/nll")
    easy = table.filter(np.array(table["split"].to_pylist()) == "easy")
    mean = sum(easy["nll_sum"].to_pylist()) / sum(easy["completion_token_count"].to_pylist())
    assert f"easy: NLL {mean:.4f} per token" in markdown(manifest, "out")
    (record,) = artifact_record(manifest, "out").values()
    assert (record["type"], record["documents"], record["missing"]) == ("nll", 48, 0)
