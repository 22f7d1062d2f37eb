"""Filters in every kind of preparation: all rows are counted, the same ones are kept of JSON and of Parquet, and keys tell them apart."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.plan import estimated_tokens, plan_record, print_plan
from tokenmill.tasks.report.why import why_row

from tests.building import plan_here, prepare_here
from tests.preparing_rl import write_rows
from tests.preparing_sft import CHATML, chat_vocabulary

KINDS = ["pretrain", "dedup", "sft", "rl", "harmony"]
WORDS = ["stones", "wheels", "flour", "rivers", "bread", "tides", "sacks"]


def row(number):
    """A row for every kind of preparation."""
    text = f"{number} {' '.join(WORDS[(number * step + step) % 7] for step in range(1, 4 + number % 9))}"
    messages = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": text}]
    language = ["en", "de", None][number % 3]
    return {"uuid": f"u-{number}", "text": text, "messages": messages, "score": number // 10, "language": language}


ROWS = [row(number) for number in range(120)]
WHERE = "score >= 4 and (language == 'en' or language is null) and length(text) < 50"
KEPT = [number for number, each in enumerate(ROWS) if each["score"] >= 4 and each["language"] in {"en", None} and len(each["text"]) < 50]  # fmt: skip


def files(folder):
    """The same rows as JSON Lines and as Parquet of several row groups."""
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, folder / "rows.parquet", row_group_size=10)
    return [write_rows(folder / "rows.jsonl", ROWS), folder / "rows.parquet"]


def blend_of(path, **keys):
    return {"datasets": [{"name": "rows", "path": str(path), **keys}]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_drop_the_same_rows_from_json_and_parquet(tmp_path, kind):
    for path in files(tmp_path):
        output = tmp_path / f"out{path.suffix}"
        chat = {"chat_template": CHATML, "tokenizer": {"model": str(chat_vocabulary(tmp_path / "vocabulary"))}}
        settings = chat if kind == "sft" else {}
        _, manifest = prepare_here(kind, blend_of(path, where=WHERE), output, shard_size="2KB", **settings)
        totals = manifest["totals"]
        assert (totals["rows"], totals["documents"]) == (120, len(KEPT))
        assert totals["dropped"] == {"filtered": 120 - len(KEPT)}
        fates = [why_row(str(output), f"{path}:{number + 1}")[0][0] for number in (*KEPT[:3], KEPT[-1], 0, 41, 119)]
        assert [fate.kept for fate in fates] == [number in KEPT for number in (*KEPT[:3], KEPT[-1], 0, 41, 119)]
        assert {(fate.reason, fate.detail) for fate in fates if not fate.kept} == {("filtered", f"not true: {WHERE}")}


def test_deduplication_keeps_rows_byte_for_byte(tmp_path):
    lines = [
        b'{"text":  "a\\u0041", "n": 1.50}',
        b'{"n": 1, "text": "b"}',
        b'{"text": "c", "n": 2e0}',
        b'{"n": 9, "text": null}',
    ]
    path = write_rows(tmp_path / "rows.jsonl", lines)
    _, manifest = prepare_here("dedup", blend_of(path, where="n > 1 and n < 9"), tmp_path / "out")
    (published,) = (tmp_path / "out/data").rglob("*.jsonl")
    assert published.read_bytes().splitlines() == [lines[0], lines[2]]
    assert manifest["totals"]["dropped"] == {"filtered": 2}
    _, table = files(tmp_path)
    prepare_here("dedup", blend_of(table, where=WHERE), tmp_path / "table")
    (published,) = (tmp_path / "table/data").rglob("*.parquet")
    assert pq.read_table(published).equals(pq.read_table(table).take(KEPT))


@pytest.mark.parametrize("kind", ["pretrain", "dedup"])
def test_filters_by_value_are_a_short_form_in_pretraining_and_deduplication_too(tmp_path, kind):
    rows = [{**each, "used_in": ["nano", "super"] if number % 2 else "ultra"} for number, each in enumerate(ROWS)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    blend = blend_of(path, used_in="nano", filters={"language": ["en", "de"]}, where="score < 6")
    _, manifest = prepare_here(kind, blend, tmp_path / "out")
    kept = [each for number, each in enumerate(ROWS) if number % 2 and each["language"] and each["score"] < 6]
    assert manifest["totals"]["documents"] == len(kept)
    assert manifest["totals"]["dropped"] == {"filtered": 120 - len(kept)}
    (fate,) = why_row(str(tmp_path / "out"), f"{path}:1")[0]
    assert fate.detail == "not true: language is one of ['de', 'en'] and used_in is one of ['nano'] and score < 6"


@pytest.mark.parametrize("kind", ["pretrain", "rl", "dedup"])
def test_filter_is_part_of_the_key_only_when_set(tmp_path, kind):
    path, _ = files(tmp_path)
    keys = {
        name: plan_here(kind, blend_of(path, **chosen), tmp_path / "out").plan.shards[0]
        for name, chosen in {
            "none": {}, "where": {"where": "score>=3"}, "same": {"where": "score  >= 3"}, "other": {"where": "score >= 4"},
            "values": {"filters": {"language": "en"}},
        }.items()
    }  # fmt: skip
    assert keys["none"].identity["source"].keys() == {"content", "format", "compression"}
    assert keys["where"].identity["source"]["where"] == "score >= 3"
    assert keys["where"].key == keys["same"].key
    assert len({shard.key for shard in keys.values()}) == 4


def test_why_separates_filtered_from_dropped_rows(tmp_path):
    """Several reasons in one shard, so that the row is read again; one is in a row group that is not read."""
    table = pa.table({"text": ["", "x", "kept", "kept too", "y", ""], "n": [1, 2, 2, 2, 0, 0]})
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path, row_group_size=2)
    chosen = {"min_doc_chars": 3}
    _, manifest = prepare_here("pretrain", blend_of(path, where="n >= 1"), tmp_path / "out", **chosen)
    assert manifest["totals"]["dropped"] == {"filtered": 2, "too_short": 2}
    reasons = [why_row(str(tmp_path / "out"), f"{path}:{line}")[0][0].reason for line in range(1, 7)]
    assert reasons == ["too_short", "too_short", None, None, "filtered", "filtered"]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_plan_estimates_kept_rows_and_tokens(tmp_path, ending):
    path = next(each for each in files(tmp_path) if each.suffix == ending)
    everything = plan_here("pretrain", blend_of(path), tmp_path / "out")
    planned = plan_here("pretrain", blend_of(path, where="score >= 6 and language is not null"), tmp_path / "out")
    (sample,) = planned.plan.samples.values()
    kept = sum(each["score"] >= 6 and each["language"] is not None for each in ROWS) / 120
    assert sample.kept_rows == pytest.approx(kept, abs=0.08)
    (whole,), (some,) = estimated_tokens(everything).values(), estimated_tokens(planned).values()
    assert some == pytest.approx(whole * sample.kept_bytes, rel=0.01)
    assert plan_record(planned)["plan"]["estimated_kept"]["datasets/rows"]["kept_rows"] == sample.kept_rows
    shown = Console(record=True, width=150)
    print_plan(planned, shown)
    assert f"{sample.kept_rows:.1%}" in shown.export_text()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("scor >= 3", "rows has the field 'scor', which its filter names; did you mean 'score'?"),
        ("score >= '3'", "field 'score' is a number and \"3\" is text; compare values of one type"),
        ("messages == 'x'", "field 'messages' is a list, which can only be tested with `is null`"),
    ],
)
def test_misfit_predicate_on_json_fails_early(tmp_path, where, message):
    path, _ = files(tmp_path)
    with pytest.raises(InputError) as error:
        plan_here("pretrain", blend_of(path, where=where), tmp_path / "out")
    assert str(error.value).startswith("dataset 'rows': ")
    assert message in str(error.value)
    with pytest.raises(InputError, match=r"blend: datasets\[0\].where: .*character 7, before '= 3': expected and, or, or the end; write =="):  # fmt: skip
        plan_here("pretrain", blend_of(path, where="score = 3"), tmp_path / "out")
    plan_here("pretrain", blend_of(path, where="licence is null or licence == 'mit'"), tmp_path / "out")


def test_a_sample_counts_rows_before_the_filter_and_bundles_have_it_too(tmp_path):
    path, table = files(tmp_path)
    for each in (path, table):
        _, manifest = prepare_here("pretrain", blend_of(each, where=WHERE), tmp_path / f"out{each.suffix}", sample=60)
        assert manifest["totals"]["rows"] == 60
        assert manifest["totals"]["documents"] == sum(number < 60 for number in KEPT)
    folder = tmp_path / "many"
    for number in range(12):
        write_rows(folder / f"{number:02}.jsonl", ROWS[number * 10 : number * 10 + 10])
    planned, manifest = prepare_here("pretrain", blend_of(folder, where=WHERE), tmp_path / "bundled")
    assert len(planned.plan.shards) < 12
    assert manifest["totals"]["documents"] == len(KEPT)
    assert json.loads(Path(tmp_path / "bundled/manifest.json").read_bytes())["blend"]["datasets"][0]["where"] == WHERE
