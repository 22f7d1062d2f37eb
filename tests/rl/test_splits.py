"""Splits: the last rows of each dataset, or those that the sources have; every row in exactly one, and none in a wrong one."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.rl.kind import by_source_splits, held_out_from
from tokenmill.tasks.rl.settings import RlSettings
from tokenmill.tasks.sources.files import SourceFile
from tokenmill.tasks.sources.slices import cut, leading_rows
from tokenmill.tasks.strict import parse

from tests.examples import max_examples
from tests.preparing import blend_of
from tests.preparing_rl import plan, prepare, write_rows


def rows(count, first=0):
    return [{"id": number, "text": "x" * (number * 7919 % 60)} for number in range(first, first + count)]


def ids(manifest):
    """The numbers of the rows in each split, in order."""
    return {
        key: [json.loads(line)["id"] for line in Path(manifest[key]).read_bytes().splitlines()] if manifest[key] else []
        for key in ("train", "val", "test")
    }


def prepared(blend, out, **chosen):
    _, manifest = prepare(blend, out, **chosen)
    return ids(manifest)


def split_at(numbers, held_out):
    """What is expected of a dataset with these numbers: the last `held_out` of them for validation, and no test."""
    return {"train": numbers[:-held_out], "val": numbers[-held_out:], "test": []}


# The last rows of each dataset.


@pytest.mark.parametrize("shard_size", [100, 1500, 10**9])
@pytest.mark.parametrize("count", [1, 13, 99])
def test_the_last_rows_are_held_out_across_slices_and_files(tmp_path, shard_size, count):
    for name, first, number in (("a", 0, 60), ("b", 60, 5), ("c", 65, 35)):
        write_rows(tmp_path / "in" / f"{name}.jsonl", rows(number, first))
    planned, manifest = prepare(blend_of(tmp_path / "in"), tmp_path / "out", val_holdout=count, shard_size=shard_size)
    assert len(planned.plan.shards) > 20 or shard_size > 100
    assert ids(manifest) == split_at([*range(100)], count)
    assert manifest["mode"] == "local_split"


@pytest.mark.parametrize("shard_size", [400, 10**9])
def test_each_dataset_gives_its_last_rows_for_any_shares(tmp_path, shard_size):
    one, other = write_rows(tmp_path / "one.jsonl", rows(50)), write_rows(tmp_path / "other.jsonl", rows(20, 100))
    chosen = {"val_holdout": 3, "holdout": {"valid": 0.3, "test": 0.3}, "shard_size": shard_size}
    found = prepared(blend_of(one, other), tmp_path / "out", **chosen)
    assert found["val"] == [47, 48, 49, 117, 118, 119]
    assert found["train"] == [*range(47), *range(100, 117)]
    named = {"train": blend_of(one)["datasets"], "valid": blend_of(other)["datasets"]}
    found = prepared(named, tmp_path / "named", val_holdout=3, shard_size=shard_size)
    assert found == {"train": [*range(50)], "val": [*range(100, 120)], "test": []}


@pytest.mark.parametrize("count", [5, 6, 1000])
@pytest.mark.parametrize("shard_size", [20, 10**9])
def test_a_dataset_with_no_more_rows_than_that_keeps_all_for_training(tmp_path, count, shard_size):
    small, large = write_rows(tmp_path / "small.jsonl", rows(5)), write_rows(tmp_path / "large.jsonl", rows(1001, 10))
    found = prepared(blend_of(small), tmp_path / "out", val_holdout=count, shard_size=shard_size)
    assert found == {"train": [*range(5)], "val": [], "test": []}
    both = prepared(blend_of(small, large), tmp_path / "both", val_holdout=count)
    assert both["train"][:5] == [*range(5)]
    assert both["val"] == [*range(1011 - count, 1011)]


def test_rows_are_counted_in_file_order(tmp_path):
    """Blank, bad and filtered ones as well: which row is the last does not hang on what is done to rows."""
    stand = [*rows(10), b"", b"broken", {"id": 10, "drop": True}, *rows(1, 11)]
    path = write_rows(tmp_path / "a.jsonl", stand)
    blend = blend_of(path)
    found = [prepared(blend, tmp_path / f"{count}", val_holdout=count)["val"] for count in (1, 2, 3, 4, 5)]
    assert found == [[11], [10, 11], [10, 11], [10, 11], [9, 10, 11]]
    blend["datasets"][0]["transforms"] = [{"select": ["id", "text"]}]
    assert prepared(blend, tmp_path / "selected", val_holdout=2)["val"] == [11]
    blend["datasets"][0] |= {"transforms": [], "filters": {"id": [0, 9, 11]}}
    found = prepared(blend, tmp_path / "filtered", val_holdout=4)
    assert found == {"train": [0, 9], "val": [11], "test": []}


@pytest.mark.parametrize("kind", ["jsonl.gz", "json", "parquet"])
def test_last_rows_in_any_format_are_held_out(tmp_path, kind):
    path, many = tmp_path / "in" / f"a.{kind}", rows(90)
    path.parent.mkdir()
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(many), path, row_group_size=20)
    else:
        text = json.dumps(many) if kind == "json" else "".join(json.dumps(row) + "\n" for row in many)
        path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    write_rows(tmp_path / "in" / "b.jsonl", rows(10, 90))
    found = prepared(blend_of(tmp_path / "in"), tmp_path / "out", val_holdout=37, shard_size=300)
    assert found == split_at([*range(100)], 37)


def test_a_dataset_that_grows_costs_its_tail(tmp_path):
    """Rows that were held out before are training data now, so their shards change; those before them do not."""
    path = write_rows(tmp_path / "a.jsonl", rows(100))
    chosen = {"val_holdout": 10, "shard_size": 400}
    planned, _ = prepare(blend_of(path), tmp_path / "out", **chosen)
    (last,) = [shard for shard in planned.plan.shards if (shard.identity["recipe"]["valid_from"] or 0) > 0]
    with path.open("ab") as file:
        file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows(100, 100)))
    again = plan(blend_of(path), tmp_path / "out", **chosen)
    assert len(again.plan.pending) < len(again.plan.shards) - 5
    assert min(shard.part.start for shard in again.plan.pending) == last.part.start
    assert prepared(blend_of(path), tmp_path / "out", **chosen) == split_at([*range(200)], 10)


@max_examples(60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 70), st.integers(1, 400), st.none() | st.integers(1, 80))  # fmt: skip
def test_every_slice_knows_its_rows_among_the_last(tmp_path_factory, counts, held_out, shard_size, sample):
    slices, first = [], 0
    for number, count in enumerate(counts):
        path = write_rows(tmp_path_factory.getbasetemp() / f"held{number}.jsonl", rows(count, first))
        slices += cut(SourceFile(str(path), path.stat().st_size, "jsonl"), shard_size, [])
        first += count
    slices = slices if sample is None else leading_rows(slices, sample)
    total = first if sample is None else min(first, sample)
    owned = [_owned(part) for part in slices]
    found = held_out_from(slices, held_out)
    numbers = [number for each, start in zip(owned, found, strict=True) if start is not None for number in each[start:]]
    assert numbers == ([] if total <= held_out else [*range(total - held_out, total)])


def _owned(part):
    """The numbers of the rows whose first byte lies in a slice."""
    found, place = [], 0
    for line in Path(part.file.uri).read_bytes().splitlines(keepends=True):
        if part.start <= place < part.stop:
            found.append(json.loads(line)["id"])
        place += len(line)
    return found[: part.rows]


# The splits of the source.


def folder(place, *names, each=10):
    """A folder with a file per name, of ten rows each, numbered on."""
    for number, name in enumerate(names):
        write_rows(place / name, rows(each, number * each))
    return blend_of(place)


TEN = {name: [*range(first, first + 10)] for name, first in (("first", 0), ("second", 10), ("third", 20))}


FILES = [
    # the files, of ten rows each, another split to take in place of train, what each split has, and the splits of the source
    ("train.jsonl validation.jsonl test.jsonl", None, ("first", "second", "third")),
    ("training.jsonl valid.jsonl testing.jsonl", None, ("first", "second", "third")),
    ("train/a.jsonl dev/a.jsonl test/a.jsonl", None, ("first", "second", "third")),
    ("data/train-00000-of-00001.jsonl data/val-00000-of-00001.jsonl data/test_0001.jsonl", None, ("first", "second", "third")),
    ("train.jsonl validation.jsonl dev.jsonl", None, ("first", "third second", "")),
    ("train.jsonl validation.jsonl test.jsonl", "validation", ("second", "", "")),
]  # fmt: skip


@pytest.mark.parametrize(("names", "split", "expected"), FILES)
def test_splits_of_the_source_are_taken_by_any_of_their_names(tmp_path, names, split, expected):
    blend = folder(tmp_path / "in", *names.split())
    blend["datasets"][0] |= {"split": split} if split else {}
    _, manifest = prepare(blend, tmp_path / "out", splits="source", holdout={"valid": 0.4, "test": 0.4})
    found = dict(zip(("train", "val", "test"), expected, strict=True))
    assert ids(manifest) == {key: [row for name in files.split() for row in TEN[name]] for key, files in found.items()}
    taken = [name for name, files in zip(("train", "validation", "test"), expected, strict=True) if files]
    assert set(manifest["source_splits"]) == ({split} if split else {*taken})


def test_each_dataset_has_the_splits_that_it_has(tmp_path):
    one = folder(tmp_path / "one", "train.jsonl", "test.jsonl")["datasets"]
    write_rows(tmp_path / "other" / "some.jsonl", rows(10, 100))
    both = {"datasets": [*one, *blend_of(tmp_path / "other")["datasets"]]}
    found = prepared(both, tmp_path / "out", splits="source")
    assert found == {"train": [*range(10), *range(100, 110)], "val": [], "test": TEN["second"]}


def test_a_file_that_is_named_outright_is_training_data_and_a_folder_needs_some(tmp_path):
    """The file has no splits to choose from, and rows that are trained on must never be validated with."""
    path = write_rows(tmp_path / "some.jsonl", rows(10))
    found = prepared(blend_of(path), tmp_path / "out", splits="source")
    assert found == {"train": TEN["first"], "val": [], "test": []}
    with pytest.raises(InputError, match="has no split 'train"):
        plan(folder(tmp_path / "in", "validation.jsonl", "test.jsonl"), tmp_path / "out", splits="source")
    with pytest.raises(InputError, match="splits=source: this blend lists its splits itself; remove the setting"):
        by_source_splits(load_blend({"train": blend_of(path)["datasets"]}))


def test_transforms_apply_in_every_split(tmp_path):
    blend = folder(tmp_path / "in", "train.jsonl", "validation.jsonl")
    blend["datasets"][0] |= {"transforms": [{"select": ["id"]}], "filters": {"id": [0, 1, 10, 11]}, "weight": 3}
    planned, manifest = prepare(blend, tmp_path / "out", splits="source")
    assert ids(manifest) == {"train": [0, 1], "val": [10, 11], "test": []}
    assert all(line == b'{"id":0}' for line in Path(manifest["train"]).read_bytes().splitlines()[:1])
    assert {source.weight for sources in planned.blend.parts().values() for source in sources} == {3}


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"splits": "source", "val_holdout": 3}, "keep one of the two"),
        ({"max_tokens": 3}, "set target as well"),
        ({"val_holdout": 0}, "val_holdout"),
        ({"splits": "sources"}, "splits"),
        ({"compression": "gzip"}, "compression"),
        ({"target": "nemo_rl"}, "target"),
    ],
)
def test_conflicting_settings_are_rejected(chosen, words):
    with pytest.raises(InputError, match=words):
        parse(RlSettings, chosen, "settings")
