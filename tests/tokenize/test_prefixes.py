"""Prefixes hold every document of their shards once, in order; tokens are stored once; what a trainer shows is what was asked."""

import itertools
import json
import os
import shutil
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.store import PREFIX, Store
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.tokenize import prefixes as prefixes_module
from tokenmill.tasks.tokenize.kind import PRETRAIN
from tokenmill.tasks.tokenize.prefixes import build_prefix, plan_prefixes

from tests.building import build_shards, plan_here, publish_here
from tests.preparing import blend_of, prefixes_of, prepare, tree, write_lines
from tests.tokenize.small_vocabularies import Identity, byte_level_bpe

NOTHING_HELD_OUT = {"valid": 0, "test": 0}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return byte_level_bpe(tmp_path_factory.mktemp("vocabulary"), size=400)


@pytest.fixture
def chosen(small):
    return {"tokenizer": {"model": str(small)}, "holdout": NOTHING_HELD_OUT}


def each_alone(documents):
    """Settings by which each file of that many documents is a shard of its own."""
    return {"shard_size": 28 * documents}


def folder_of(place, files, documents, first=0):
    """A folder of JSON Lines files, of `documents` short documents each, all of them different."""
    for number in range(first, first + files):
        write_lines(place / f"{number:05d}.jsonl", [f"{number} of {row}: hello" for row in range(documents)])
    return place


def blend(place):
    return {"datasets": [{"name": "web", "path": str(place)}]}


def check(out):
    return verify(str(out), PRETRAIN.inspect).problems


def megatron_documents(prefix):
    return [ids.tolist() for ids in IndexedDataset(str(prefix))]


@pytest.mark.parametrize("prefix_size", [1, 300, 1000, 10**9])
def test_megatron_reads_documents_in_order_for_any_prefix_size(tmp_path, chosen, prefix_size):
    chosen |= each_alone(9)
    place = folder_of(tmp_path / "in", 7, 9)
    _, manifest = prepare(blend(place), tmp_path / "out", prefix_size=prefix_size, **chosen)
    rows = [json.loads(line)["text"] for path in sorted(place.iterdir()) for line in path.open()]
    whole = write_lines(tmp_path / "whole.jsonl", rows)
    prepare(blend_of(whole), tmp_path / "expected", **chosen)
    (expected,) = prefixes_of(tmp_path / "expected")
    prefixes = prefixes_of(tmp_path / "out")
    found = [ids for prefix in prefixes for ids in megatron_documents(prefix)]
    assert found == megatron_documents(expected)
    sizes = [prefix.with_suffix(".bin").stat().st_size for prefix in prefixes]
    members = [len(entry["source"]["members"]) for entry in manifest["derived"]["shards"]]
    assert sum(members) == 7
    assert all(size <= prefix_size or count == 1 for size, count in zip(sizes, members, strict=True))
    assert all(one + other > prefix_size for one, other in itertools.pairwise(sizes)), "none could have been joined"
    assert check(tmp_path / "out") == []


def test_tokens_are_stored_once_and_nothing_is_built_again(tmp_path, chosen):
    chosen |= each_alone(20)
    place = folder_of(tmp_path / "in", 5, 20)
    _, manifest = prepare(blend(place), tmp_path / "out", **chosen)
    (prefix,) = prefixes_of(tmp_path / "out")
    stored = sum(path.stat().st_size for path in (tmp_path / "out/shards").rglob("*.bin"))
    assert stored == prefix.with_suffix(".bin").stat().st_size == 2 * manifest["totals"]["tokens"]
    before = tree(tmp_path / "out")
    again, manifest = prepare(blend(place), tmp_path / "out", **chosen)
    assert again.plan.pending == []
    assert manifest["volatile"]["shards"] == {"total": 5, "built": 0, "reused": 5}
    assert tree(tmp_path / "out") == before


def test_shared_dataset_shares_its_prefix(tmp_path, chosen):
    chosen |= each_alone(9)
    place, other = folder_of(tmp_path / "in", 4, 9), folder_of(tmp_path / "more", 2, 9, first=50)
    chosen["store"] = str(tmp_path / "store")
    prepare(blend(place), tmp_path / "one", **chosen)
    two = {"datasets": [*blend(place)["datasets"], {"name": "more", "path": str(other)}]}
    planned, _ = prepare(two, tmp_path / "two", **chosen)
    assert len(planned.plan.pending) == 2
    assert len(list((tmp_path / "store/prefix").iterdir())) == 2
    (first,), (same, _) = prefixes_of(tmp_path / "one"), prefixes_of(tmp_path / "two")
    assert first.with_suffix(".bin").samefile(same.with_suffix(".bin"))
    planned, _ = prepare(blend(place), tmp_path / "three", prefix_size=1, **chosen)
    assert planned.plan.pending == []
    found = [ids for prefix in prefixes_of(tmp_path / "three") for ids in megatron_documents(prefix)]
    assert found == megatron_documents(first)
    for out in ("one", "two", "three"):
        assert check(tmp_path / out) == []


def times_in(folder):
    return {(path, path.stat().st_mtime_ns) for path in folder.rglob("*.*") if path.name != "index.json"}


def test_an_appended_file_writes_itself_and_the_last_prefix_only(tmp_path, chosen):
    chosen |= each_alone(5)
    place = folder_of(tmp_path / "in", 50, 5)
    prepare(blend(place), tmp_path / "out", prefix_size=1500, **chosen)
    before = times_in(tmp_path / "out/shards")
    count = len(prefixes_of(tmp_path / "out"))
    folder_of(place, 1, 5, first=50)
    planned, _ = prepare(blend(place), tmp_path / "out", prefix_size=1500, **chosen)
    assert len(planned.plan.pending) == 1
    written = {path.parent for path, _ in times_in(tmp_path / "out/shards") - before}
    assert {path.name for path in written if path.parent.name == "pretrain"} == {
        each.key for each in planned.plan.pending
    }
    assert sum(path.parent.name == "prefix" for path in written) == 1
    assert len(prefixes_of(tmp_path / "out")) in {count, count + 1}
    assert check(tmp_path / "out") == []


def test_a_store_of_shards_with_their_own_tokens_is_joined_without_tokenizing(tmp_path, chosen):
    """As stores of earlier versions are."""
    chosen |= each_alone(9)
    place = folder_of(tmp_path / "in", 4, 9)
    planned = plan_here("pretrain", blend(place), tmp_path / "out", **chosen)
    build_shards("pretrain", planned, planned.plan.pending)
    assert len(list((tmp_path / "out/shards/pretrain").rglob("*.bin"))) == 4
    again, _ = prepare(blend(place), tmp_path / "out", **chosen)
    assert again.plan.pending == []
    assert not list((tmp_path / "out/shards/pretrain").rglob("*.bin"))
    assert check(tmp_path / "out") == []


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(50))
def test_kill_during_a_join_keeps_all_data(tmp_path, chosen, monkeypatch, moment):
    """Every removal, rename, sync and kernel copy of the join may be the last thing that a process does."""
    chosen |= each_alone(9)
    place = folder_of(tmp_path / "in", 3, 9)
    planned = plan_here("pretrain", blend(place), tmp_path / "out", **chosen)
    build_shards("pretrain", planned, planned.plan.pending)
    done = 0

    def dying(original):
        def operation(*arguments, **named):
            nonlocal done
            if done == moment:
                raise Killed
            done += 1
            return original(*arguments, **named)

        return operation

    with monkeypatch.context() as patched:
        for name in ("replace", "fsync", "copy_file_range", "remove", "unlink", "link", "open"):
            patched.setattr(os, name, dying(getattr(os, name)))
        with suppress(Killed):
            publish_here("pretrain", planned)
    again, _ = prepare(blend(place), tmp_path / "out", **chosen)
    assert again.plan.pending == [], "nothing is tokenized twice"
    assert check(tmp_path / "out") == []
    prepare(blend(place), tmp_path / "expected", **chosen)
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


@pytest.mark.parametrize("pruned", [False, True])
def test_members_that_others_join_one_after_the_other_are_all_found(tmp_path, chosen, monkeypatch, pruned):
    """Before each attempt one more member is joined into a prefix of its own, or removed with its receipt as by `prune`."""
    place, original = folder_of(tmp_path / "in", 4, 9), prefixes_module.join_extents
    planned = plan_here("pretrain", blend(place), tmp_path / "out", **chosen | each_alone(9))
    finished = planned.plan.after(build_shards("pretrain", planned, planned.plan.pending)).finished
    rivals = plan_prefixes(finished, planned.plan.store, 1, np.dtype("<u2")).pending
    assert len(rivals) > 2

    def later(extents, target):
        if rivals:
            rival = rivals.pop()
            with monkeypatch.context() as patched:
                patched.setattr(prefixes_module, "join_extents", original)
                build_prefix(rival, Store(planned.plan.store.place, PREFIX))
            if pruned:
                shutil.rmtree(Store(planned.plan.store.place, PREFIX).folder(rival.key))
        original(extents, target)

    monkeypatch.setattr(prefixes_module, "join_extents", later)
    with pytest.raises(RunError, match="missing; run the same command again") if pruned else nullcontext():
        publish_here("pretrain", planned)
    assert pruned or check(tmp_path / "out") == []


def test_too_many_prefixes_for_megatron_are_rejected(tmp_path, chosen, monkeypatch):
    monkeypatch.setattr(prefixes_module, "MOST_PREFIXES", 3)
    chosen |= each_alone(3)
    place = folder_of(tmp_path / "in", 4, 3)
    words = r"prefix_size: gives 4 prefixes in train, and Megatron opens 3 at most; raise"
    with pytest.raises(InputError, match=words):
        prepare(blend(place), tmp_path / "out", prefix_size=1, **chosen)
    prepare(blend(place), tmp_path / "out", prefix_size=10_000, **chosen)


def seen(out, sequence_length, small, weights=None):
    """How often megatron-core shows each document in the samples of one epoch, by (prefix, document)."""
    entries = json.loads((out / "blend.json").read_bytes())["train"]
    tokens = sum(Path(f"{prefix}.bin").stat().st_size // 2 for prefix in entries[1::2])
    samples = (tokens - 1) // sequence_length
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=sequence_length, reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, tokenizer=Identity(400, 0), path_to_cache=None,
        blend_per_split=[get_blend_from_list(entries), None, None],
    )  # fmt: skip
    built, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()
    counts = Counter()
    for number in range(samples):
        place, own, dataset = 0, number, built
        if hasattr(built, "datasets"):
            place, own = built.dataset_index[number], built.dataset_sample_index[number]
            dataset = built.datasets[place]
        row = dataset.shuffle_index[own]
        (first, start), (last, stop) = dataset.sample_index[row], dataset.sample_index[row + 1]
        for document in range(first, last + (1 if stop else 0)):
            if not (document == first and start):  # seen where it begins
                counts[int(place), int(dataset.document_index[document])] += 1
    return counts, samples


@pytest.mark.parametrize(("files", "documents"), [(150, 20), pytest.param(3000, 3, marks=pytest.mark.slow)])
def test_megatron_shows_documents_of_many_small_files_once_in_an_epoch(tmp_path, chosen, small, files, documents):
    place = folder_of(tmp_path / "in", files, documents)
    _, manifest = prepare(blend(place), tmp_path / "out", **chosen)
    counts, samples = seen(tmp_path / "out", manifest["totals"]["tokens"] // 201, small)
    assert samples >= 200
    once = sum(count == 1 for count in counts.values())
    assert once >= 0.995 * files * documents
    assert max(counts.values()) == 1
