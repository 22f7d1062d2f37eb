"""Incremental work: a plan asks for what changed, says why, and reads nothing that it knows already."""

import gzip
import io
import json
import os
import shutil
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from rich.filesize import decimal
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.plan import BYTES_PER_TOKEN, pending_reasons, plan_record, print_plan
from tokenmill.tasks.shards import planning

from tests.building import plan_here
from tests.preparing import blend_of, prepare, write_lines, write_texts
from tests.tokenize.small_vocabularies import byte_level_bpe

TEXTS = [f"document {number} says hello to the {number * 7919 % 1000}th world" for number in range(120)]
NO_HOLDOUT = {"valid": 0, "test": 0}


@pytest.fixture
def chosen(vocabulary):
    """The settings of most tests: a small tokenizer, and shards of some ten rows."""
    return {"tokenizer": {"model": str(vocabulary)}, "shard_size": 700, "holdout": NO_HOLDOUT}


@pytest.fixture
def corpus(tmp_path):
    """A folder of two files, last modified long ago."""
    write_lines(tmp_path / "corpus" / "a.jsonl", TEXTS[:40])
    write_lines(tmp_path / "corpus" / "b.jsonl", TEXTS[40:60])
    return aged(tmp_path / "corpus")


def aged(folder, seconds=1_000_000_000):
    for path in Path(folder).iterdir():
        os.utime(path, (seconds, seconds))
    return folder


planned = partial(plan_here, "pretrain")


def pending(blend, out, **settings):
    """The shards to build, as (file name, start)."""
    plan = planned(blend, out, **settings).plan
    return [(Path(shard.part.file.uri).name, shard.part.start) for shard in plan.pending]


def test_tokens_are_estimated_from_bytes_until_they_are_counted(corpus, tmp_path, chosen):
    chosen["shard_size"] = 1000
    plan = planned(blend_of(corpus), tmp_path / "out", **chosen)
    estimate = plan_record(plan)["plan"]["estimated_tokens"]
    assert len(plan.plan.shards) > 1
    assert plan.plan.pending_bytes == sum(path.stat().st_size for path in corpus.iterdir())
    assert estimate == pytest.approx(plan.plan.pending_bytes / BYTES_PER_TOKEN, abs=len(plan.plan.shards))
    _, manifest = prepare(blend_of(corpus), tmp_path / "out", **chosen)
    plan = planned(blend_of(corpus), tmp_path / "out", **chosen)
    assert plan_record(plan)["plan"]["estimated_tokens"] == manifest["totals"]["tokens"]


def test_compressed_text_is_estimated_to_have_more_tokens(tmp_path):
    path = write_lines(tmp_path / "plain/a.jsonl", [f"{number} {'Text compresses. ' * 9}" for number in range(99)])
    (tmp_path / "zipped").mkdir()
    (tmp_path / "zipped/a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes(), 0))
    plans = [planned(blend_of(tmp_path / folder), tmp_path / "out") for folder in ("plain", "zipped")]
    plain, zipped = (plan_record(plan)["plan"]["estimated_tokens"] for plan in plans)
    assert zipped > 2 * plain  # gzip at level 0 stores the bytes as they are


def test_repeated_plan_reads_no_source(corpus, tmp_path, chosen):
    (corpus / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "zipped"}\n'))
    aged(corpus)
    prepare(blend_of(corpus), tmp_path / "out", **chosen)
    index = tmp_path / "out/shards/index.json"
    written = index.stat()
    with opened_files() as opened:
        assert pending(blend_of(corpus), tmp_path / "out", **chosen) == []
    assert [path for path in opened if path.startswith(str(corpus))] == []
    assert str(index) in opened
    assert index.stat().st_ino == written.st_ino


@contextmanager
def opened_files():
    """The paths that Python opens inside the context, by any means; a hook can't be removed, but listens no longer."""
    found, listening = [], True

    def hear(event, arguments):
        if listening and event == "open":
            found.append(str(arguments[0]))

    sys.addaudithook(hear)
    yield found
    listening = False


def owned(data, shard_size):
    """The bytes of the rows that begin in each slice, by its start, found by splitting the file into lines."""
    found, place = {}, 0
    for line in data.splitlines(keepends=True):
        start = place // shard_size * shard_size
        found[start] = found.get(start, b"") + line
        place += len(line)
    return found


@pytest.mark.parametrize(("shard_size", "grown"), [(130, 35), (700, 1), (100_000, 35)])
@pytest.mark.parametrize("ending", [b"\n", b""])
def test_a_file_that_grows_costs_its_last_slice_and_the_new_ones(tmp_path, chosen, shard_size, ending, grown):
    chosen |= {"shard_size": shard_size}
    path = write_lines(tmp_path / "a.jsonl", TEXTS[:40])
    path.write_bytes(path.read_bytes().removesuffix(b"\n") + ending)
    before = owned(path.read_bytes(), shard_size)
    prepare(blend_of(path), tmp_path / "out", **chosen)
    with path.open("ab") as stream:
        stream.write((b"" if ending else b"\n") + b"".join(b'{"text": "%d"}\n' % number for number in range(grown)))
    after = owned(path.read_bytes(), shard_size)
    work = pending(blend_of(path), tmp_path / "out", **chosen)
    assert [start for _, start in work] == [start for start in after if after[start] != before.get(start)]
    assert all(start >= max(before) for _, start in work)
    assert work


def test_shared_store_shares_shards(corpus, tmp_path, chosen):
    chosen |= {"store": str(tmp_path / "store")}
    prepare(blend_of(corpus / "a.jsonl"), tmp_path / "one", **chosen)
    copied = Path(shutil.copy(corpus / "a.jsonl", tmp_path / "copied.jsonl"))
    other = blend_of(copied, corpus / "b.jsonl", copied=7.0)
    assert {name for name, _ in pending(other, tmp_path / "two", **chosen)} == {"b.jsonl"}


def test_equal_content_twice_in_a_blend_is_built_once_and_published_twice(corpus, tmp_path, chosen):
    copied = Path(shutil.copy(corpus / "a.jsonl", tmp_path / "copied.jsonl"))
    blend = blend_of(corpus / "a.jsonl", copied)
    plan, manifest = prepare(blend, tmp_path / "out", **chosen)
    assert len(plan.plan.pending) * 2 == len(plan.plan.shards)
    books = manifest["totals"]["datasets"]
    assert books["datasets/a"] == books["datasets/copied"]
    train = json.loads((tmp_path / "out/blend.json").read_bytes())["train"]
    one, other = (Path(f"{prefix}.bin").read_bytes() for prefix in train[1::2])
    assert one == other
    assert train[1] != train[3]


@pytest.mark.parametrize("place", ["here", "there"])
def test_changed_tokenizer_rebuilds_all_and_is_named(corpus, tmp_path, chosen, place):
    """Also when its file changes in place, in a process that has loaded it before."""
    chosen["tokenizer"] = {"model": str(byte_level_bpe(tmp_path / "here", size=400))}
    prepare(blend_of(corpus), tmp_path / "out", **chosen)
    chosen["tokenizer"] = {"model": str(byte_level_bpe(tmp_path / place, size=401))}
    plan = planned(blend_of(corpus), tmp_path / "out", **chosen)
    assert len(plan.plan.pending) == len(plan.plan.shards)
    ((reason, count),) = pending_reasons(plan).items()
    assert count == len(plan.plan.shards)
    named = f"{tmp_path / 'here'} -> {tmp_path / 'there'}" if place == "there" else "'sha256:"
    assert f"recipe.tokenizer changed: {named}" in reason
    assert "source" not in reason


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"holdout": {"valid": 0, "test": 0.25, "seed": 3}}, "recipe.holdout_seed changed: None -> 3"),
        ({"tokenizer": {"add_bos": True}}, "recipe.bos changed: None -> 397"),
        ({"tokenizer": {"add_eos": False}}, "recipe.eos changed: 398 -> None"),
    ],
    ids=str,
)
def test_a_choice_that_changes_bytes_rebuilds_everything_and_is_named(corpus, tmp_path, chosen, change, field):
    prepare(blend_of(corpus), tmp_path / "out", **chosen)
    if "tokenizer" in change:
        change = {"tokenizer": chosen["tokenizer"] | change["tokenizer"]}
    plan = planned(blend_of(corpus), tmp_path / "out", **chosen | change)
    assert len(plan.plan.pending) == len(plan.plan.shards)
    assert all(field in reason for reason in pending_reasons(plan))


def test_reasons_separate_new_changed_and_lost_shards(corpus, tmp_path, chosen):
    plan, _ = prepare(blend_of(corpus), tmp_path / "out", **chosen)
    lost = next(key for key, shard in zip(plan.plan.keys, plan.plan.shards, strict=True) if "a.jsonl" in shard.place)
    Path(plan.plan.store.path(lost, "receipt.json")).unlink()
    content = (corpus / "b.jsonl").read_bytes()
    (corpus / "b.jsonl").write_bytes(content.replace(b"document 40", b"document 4x"))
    write_lines(corpus / "c.jsonl", ["brand new"])
    assert pending_reasons(planned(blend_of(corpus), tmp_path / "out", **chosen)) == {
        "no valid receipt with all outputs": 1,
        "source content changed": 1,
        "new": 1,
    }


def test_a_file_written_just_now_is_read_again_even_if_size_and_time_are_the_same(tmp_path, chosen):
    path = write_lines(tmp_path / "a.jsonl", ["first words"])
    written = path.stat().st_mtime_ns
    prepare(blend_of(path), tmp_path / "out", **chosen)
    write_lines(path, ["other words"])
    os.utime(path, ns=(written, written))
    assert pending(blend_of(path), tmp_path / "out", **chosen) == [("a.jsonl", 0)]


def test_stat_identity_trusts_size_and_time_and_takes_a_touched_file_for_new(corpus, tmp_path, chosen):
    chosen |= {"change_detection": "mtime"}
    prepare(blend_of(corpus), tmp_path / "out", **chosen)
    with opened_files() as opened:
        assert pending(blend_of(corpus), tmp_path / "out", **chosen) == []
    assert [path for path in opened if path.startswith(str(corpus))] == []
    os.utime(corpus / "b.jsonl", (1_000_000_002, 1_000_000_002))
    work = pending(blend_of(corpus), tmp_path / "out", **chosen)
    every = pending(blend_of(corpus), tmp_path / "out", force=True, **chosen)
    assert work == [place for place in every if place[0] == "b.jsonl"]


def test_files_that_are_skipped_are_counted_in_plan_and_manifest(corpus, tmp_path, chosen):
    for name in ("notes.txt", "more.csv", "most.csv", ".hidden.jsonl"):
        (corpus / name).write_bytes(b"text")
    expected = {"datasets/corpus": {".csv": 2, ".txt": 1, "hidden": 1}}
    plan, manifest = prepare(blend_of(corpus), tmp_path / "out", **chosen)
    assert plan_record(plan)["plan"]["skipped_files"] == manifest["skipped_files"] == expected
    shown = io.StringIO()
    print_plan(plan, Console(file=shown, width=200))
    assert "  corpus: files skipped: 4 (2 .csv, 1 .txt, 1 hidden)\n" in shown.getvalue()


def test_the_figures_of_a_plan_are_whole_at_any_width(tmp_path, chosen):
    """rich says that a column of figures may be as narrow as the longest word, and then cuts "10.9 kB"."""
    source = write_lines(tmp_path / "a.jsonl", ["some text"] * 1_000)
    for name in ("short", "a-name-as-long-as-those-of-published-data-sets"):
        plan, _ = prepare({"datasets": [{"name": name, "path": str(source)}]}, tmp_path / "out", **chosen)
        for width in range(60, 120):
            shown = Console(record=True, width=width, file=io.StringIO())
            print_plan(plan, shown)
            text = shown.export_text()
            assert "…" not in text
            assert all(figure in text for figure in (name, decimal(source.stat().st_size), "100.0%"))


def test_one_shard_in_the_singular(corpus, tmp_path, chosen):
    shown, plan = io.StringIO(), planned(blend_of(corpus), tmp_path / "out", **chosen | {"shard_size": "1GB"})
    print_plan(plan, Console(file=shown, width=200))
    assert "  1 shard: new\n" in shown.getvalue()


NEVER_EMPTY = r": is empty \(0 bytes\), so it is not a \w+ file; fetch it"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.jsonl", r" doesn't contain rows \(a file of 0 bytes\); fix the path"),
        ("a.jsonl.gz", NEVER_EMPTY),
        ("a.json.zst", NEVER_EMPTY),
        ("a.parquet", NEVER_EMPTY),
    ],
)
def test_dataset_with_empty_files_is_rejected(tmp_path, chosen, name, words):
    (tmp_path / name).touch()
    with pytest.raises(InputError, match=rf"{name}{words}"):
        planned(blend_of(tmp_path / name), tmp_path / "out", **chosen)


def tokens_in(out):
    """All published training tokens, in order."""
    prefixes = json.loads((out / "blend.json").read_bytes())["train"][1::2]
    return b"".join(Path(f"{prefix}.bin").read_bytes() for prefix in prefixes)


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("a.jsonl", 1),
        ("a.jsonl", 50),
        ("a.jsonl", 1000),
        *((f"a.{form}", 11) for form in ("jsonl", "jsonl.gz", "json", "parquet")),
    ],
)
def test_a_sample_prepares_exactly_the_leading_rows(tmp_path, chosen, name, sample):
    source = write_texts(tmp_path / name, TEXTS)
    _, manifest = prepare(blend_of(source), tmp_path / "out", sample=sample, **chosen)
    assert manifest["totals"]["rows"] == sum(entry["rows"] for entry in manifest["shards"]) == min(sample, len(TEXTS))
    leading = write_lines(tmp_path / "leading" / "a.jsonl", TEXTS[:sample])
    prepare(blend_of(leading), tmp_path / "expected", **chosen)
    assert tokens_in(tmp_path / "out") == tokens_in(tmp_path / "expected")


def test_a_sample_is_taken_of_each_dataset(corpus, tmp_path, chosen):
    blend = blend_of(corpus / "a.jsonl", corpus / "b.jsonl")
    _, manifest = prepare(blend, tmp_path / "out", sample=25, **chosen)
    assert {name: books["rows"] for name, books in manifest["totals"]["datasets"].items()} == {
        "datasets/a": 25,
        "datasets/b": 20,
    }


def test_new_sample_costs_only_its_slices(tmp_path, chosen):
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    rows = {start: content.count(b"\n") for start, content in owned(path.read_bytes(), 700).items()}
    starts, whole = list(rows), rows[0] + rows[700]
    prepare(blend_of(path), tmp_path / "out", sample=whole, **chosen)
    assert pending(blend_of(path), tmp_path / "out", sample=whole - 1, **chosen) == [("a.jsonl", 700)]
    assert pending(blend_of(path), tmp_path / "out", sample=whole + 1, **chosen) == [("a.jsonl", 1400)]
    assert pending(blend_of(path), tmp_path / "out", **chosen) == [("a.jsonl", start) for start in starts[2:]]


@pytest.mark.parametrize(("scale", "percent"), [("tiny", 1), ("small", 10), ("medium", 30), ("full", 100)])
def test_a_scale_prepares_the_rows_that_begin_in_the_leading_share_of_the_bytes(tmp_path, chosen, scale, percent):
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    lines = path.read_bytes().splitlines(keepends=True)
    begins = [sum(map(len, lines[:number])) for number in range(len(lines))]
    expected = sum(begin * 100 < path.stat().st_size * percent for begin in begins)
    _, manifest = prepare(blend_of(path), tmp_path / "out", scale=scale, **chosen)
    assert manifest["totals"]["rows"] == expected
    assert tokens_in(tmp_path / "out")


def test_tiny_is_capped_in_rows_and_a_sample_within_a_scale_takes_the_smaller(tmp_path, chosen, monkeypatch):
    path = write_texts(tmp_path / "a.jsonl", TEXTS * 10)
    monkeypatch.setattr(planning, "TINY_ROWS", 5)
    for scale, sample, rows in (
        ("tiny", None, 5),
        ("tiny", 3, 3),
        ("tiny", 50, 5),
        ("small", 50, 50),
        ("small", 5000, 120),
    ):
        _, manifest = prepare(blend_of(path), tmp_path / "out", scale=scale, sample=sample, **chosen)
        assert manifest["totals"]["rows"] == rows
