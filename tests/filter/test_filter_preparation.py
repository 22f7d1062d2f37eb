"""Whole preparations of filters: rows that stay keep their bytes, drops are counted by rule, and workers change nothing."""

import json
import re
from pathlib import Path

import fasttext
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.flows.options import config_settings
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.report.why import why_row
from tokenmill.tasks.shards.verify import verify

from tests.building import plan_here, prepare_here
from tests.preparing import blend_of
from tests.preparing_rl import write_rows

GOOD = "This is the first sentence of a text that people have written with care. " * 5
OTHER = "Das ist the wheel of that mill, und es is to be with the and have steine. " * 5
SHORT = {"gopher_quality": {"min_doc_words": 20, "max_avg_word_length": None}, "rules": ["gopher_quality"]}


def lines(output, name):
    return [
        line for path in sorted((Path(output) / "data" / name).iterdir()) for line in path.read_bytes().splitlines()
    ]


def test_kept_rows_keep_bytes_and_drops_name_rules(tmp_path):
    rows = [
        json.dumps({"n": 1, "text": GOOD}).encode().replace(b'"n": 1', b'"n":  1.50'),
        b'{"text": "too short"}',
        b'{"text": ""}',
        b"{broken",
        json.dumps({"text": "word " * 60}).encode(),
    ]
    path = write_rows(tmp_path / "a.jsonl", rows)
    _, manifest = prepare_here("filter", blend_of(path), tmp_path / "out", **SHORT)
    assert lines(tmp_path / "out", "a") == [rows[0]]
    dropped = manifest["totals"]["dropped"]
    assert dropped["gopher_short_doc"] == 2
    assert dropped["gopher_enough_stop_words"] == 1
    assert manifest["totals"]["rows"] == 5 == manifest["totals"]["documents"] + sum(dropped.values())
    assert verify(str(tmp_path / "out"), inspector_of("filter")).problems == []
    ((fate, *_), *_) = why_row(str(tmp_path / "out"), f"{path}:2")
    assert fate.reason == "gopher_short_doc"
    again = json.loads((tmp_path / "out/blend.json").read_bytes())
    _, prepared = prepare_here("pretrain", again, tmp_path / "tokens", holdout={"valid": 0, "test": 0})
    assert prepared["totals"]["documents"] == 1


@pytest.mark.parametrize("treatment", ["count", "mask", "drop"])
def test_personal_data_is_counted_masked_or_dropped(tmp_path, treatment):
    texts = [GOOD, f"{GOOD} Write to jane.doe@example.org.", f"{GOOD} AKIA{'ABCD1234' * 2}"]
    path = write_rows(tmp_path / "a.jsonl", [{"text": text, "n": 2.0} for text in texts])
    chosen = {"rules": [], "personal": {"emails": treatment, "secrets": treatment}}
    _, manifest = prepare_here("filter", blend_of(path), tmp_path / "out", **chosen)
    before, after = path.read_bytes().splitlines(), lines(tmp_path / "out", "a")
    assert after[0] == before[0]
    if treatment == "drop":
        assert len(after) == 1
        assert manifest["totals"]["dropped"] == {"personal_emails": 1, "personal_secrets": 1}
    if treatment == "count":
        assert after == before
    if treatment == "mask":
        found = [json.loads(line) for line in after[1:]]
        assert [each["text"] for each in found] == [
            f"{GOOD} Write to email@example.com.", f"{GOOD} <SECRET>",
        ]  # fmt: skip
        assert b'"n":2.0' in after[1]


def test_parquet_with_where_gives_the_same_rows_and_counts_the_others(tmp_path):
    texts = [GOOD if n % 3 else "short" for n in range(600)]
    table = pa.table({"id": range(600), "text": texts, "score": [n % 5 for n in range(600)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    blend = blend_of(tmp_path / "a.parquet")
    blend["datasets"][0]["where"] = "score >= 2"
    _, manifest = prepare_here("filter", blend, tmp_path / "out", shard_size=2_000, **SHORT)
    (file, *more) = sorted((tmp_path / "out/data/a").iterdir())
    found = pa.concat_tables([pq.read_table(each) for each in [file, *more]])
    kept = [n for n in range(600) if n % 3 and n % 5 >= 2]
    assert found.equals(table.take(kept).cast(found.schema))
    assert manifest["totals"]["dropped"] == {
        "filtered": sum(n % 5 < 2 for n in range(600)), "gopher_short_doc": sum(not n % 3 and n % 5 >= 2 for n in range(600)),
    }  # fmt: skip
    assert len(manifest["shards"]) > 1


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"rules": ["c4", "c4"]}, "name each family once"),
        ({"language": {"model": "/nowhere/lid.bin", "keep": ["en"]}}, "/nowhere/lid.bin"),
        ({"holdout": {"valid": 0.1}}, "holdout does not apply to filters"),
    ],
)
def test_impossible_settings_are_rejected(tmp_path, chosen, words):
    path = write_rows(tmp_path / "a.jsonl", [{"text": GOOD}])
    with pytest.raises(InputError, match=words):
        plan_here("filter", blend_of(path), tmp_path / "out", **chosen)


@pytest.mark.slow
def test_the_example_of_models_in_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```yaml\n(.*?)```", (Path(__file__).parents[2] / "docs/filter.md").read_text(), re.DOTALL)
    for name, label in (("lid.176.bin", "en"), ("quality.bin", "high")):
        Path("lines.txt").write_text(f"__label__{label} {GOOD}\n__label__other {OTHER}\n" * 50)
        fasttext.train_supervised("lines.txt", lr=1.0, epoch=50, thread=1, verbose=0).save_model(name)
    Path("filter.yaml").write_text(example)
    path = write_rows(Path("a.jsonl"), [{"text": GOOD}, {"text": OTHER}])
    _, manifest = prepare_here("filter", blend_of(path), "out", **SHORT, **config_settings(Path("filter.yaml")))
    assert manifest["totals"]["dropped"] == {"language": 1}
    score = dict(zip(*fasttext.load_model("lid.176.bin").predict(GOOD, k=-1), strict=True))["__label__other"]
    for threshold, dropped in ((score, {"language": 0}), (1.01 * score, {"language": 1})):
        model = {"model": "lid.176.bin", "keep": ["other"], "threshold": float(threshold)}
        blend = blend_of(write_rows(Path("one.jsonl"), [{"text": GOOD}]))
        _, manifest = prepare_here("filter", blend, "one", rules=[], language=model, allow_shrink=["one"])
        assert {"language": 0} | manifest["totals"]["dropped"] == dropped
