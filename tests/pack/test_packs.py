"""Sequences are stored once and packed as often as wanted: every one of them once in packs, wherever shards begin and end, and
no other choice of packs tokenizes anything again.
"""

import itertools
import json
import random
import resource
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.chat.encoding import Batch
from tokenmill.tasks.chat.template import ChatTemplate
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.nightly.prune import leftovers
from tokenmill.tasks.pack import packs as packs_module
from tokenmill.tasks.pack.kind import SFT
from tokenmill.tasks.pack.packs import UNPACKED_REASONS
from tokenmill.tasks.pack.parquet import PackWriter
from tokenmill.tasks.pack.shard import SequenceShard
from tokenmill.tasks.report.verification import inspector_of
from tokenmill.tasks.report.view import view_output
from tokenmill.tasks.report.why import why_row
from tokenmill.tasks.shards.verify import verify

from tests.building import build_here
from tests.pack.small_packs import packs_of
from tests.peers.conversations import assistant, talk, thinking, user
from tests.preparing import blend_of, old, tree
from tests.preparing_sft import build, pack_receipts, plan, prepare, probing_once, write_rows

PACK_SIZE, SMALL = 512, 2_000
WORDS = ["mill", "grain", "Wasser", "北京", "0.5", "\n\n", "=>"]


def conversation(number):
    """A conversation of one or more sequences, of very different lengths, that begins with its number."""
    source = random.Random(number)

    def words(most):
        return " ".join(source.choices(WORDS, k=source.randint(1, most)))

    turns = ([user(words(9)), thinking("Hm.", words(source.choice([3, 3, 60])))] for _ in range(source.randint(1, 3)))
    return talk(user(f"#{number}#"), assistant("Yes."), *itertools.chain(*turns))


ROWS = [conversation(number) for number in range(90)]


@pytest.fixture(scope="module", autouse=True)
def _quickly():
    with probing_once():
        yield


@pytest.fixture
def chosen(vocabulary):
    return {"tokenizer": {"model": str(vocabulary)}, "pack_size": PACK_SIZE, "shard_size": SMALL}


@pytest.fixture
def source(tmp_path):
    return old(write_rows(tmp_path / "rows.jsonl", ROWS))


def stored_in(place, split="all"):
    """Every stored sequence (ids, mask) of the shards in a store, read without the project."""
    found = []
    for folder in sorted(Path(place, "sft").iterdir()):
        if (folder / f"{split}.tokens").exists():
            tokens = np.fromfile(folder / f"{split}.tokens", "<u4")
            lengths = pq.read_table(folder / f"{split}.index.parquet")["length"].to_pylist()
            assert sum(lengths) == len(tokens)
            parts = np.split(tokens, np.cumsum(lengths)[:-1])
            found += [(tuple((part & 0x7FFFFFFF).tolist()), tuple((part >> 31).tolist())) for part in parts]
    return found


def packs_in(out, split="train"):
    """The published packs of a split, each a list of its sequences (ids, mask)."""
    return [[sequence.learnable for sequence in pack] for pack in packs_of(out, split)]


def times_of(folder):
    """When each file below a folder was written, and what it is."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in sorted(Path(folder).rglob("*"))}


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["best_fit_decreasing", "first_fit_shuffle", "concatenative"])
def test_every_stored_sequence_is_in_one_pack_and_no_pack_is_too_large(tmp_path, source, chosen, packing):
    planned, _ = prepare(blend_of(source), tmp_path / "out", packing=packing, **chosen)
    assert len(planned.plan.shards) > 5
    packs = packs_in(tmp_path / "out")
    stored = stored_in(tmp_path / "out/shards")
    fitting = [each for each in stored if len(each[0]) <= PACK_SIZE]
    assert 0 < len(fitting) < len(stored), "some are too long"
    assert Counter(itertools.chain(*packs)) == Counter(fitting)
    assert max(sum(len(ids) for ids, _ in pack) for pack in packs) <= PACK_SIZE
    assert verify(str(tmp_path / "out"), inspector_of(str(tmp_path / "out"))).problems == []


def test_where_shards_begin_and_end_changes_no_pack(tmp_path, source, chosen):
    """So packs are filled as if the dataset were one shard."""
    found = []
    for size in (SMALL, 10**9):
        planned, _ = prepare(blend_of(source), tmp_path / f"{size}", **chosen | {"shard_size": size})
        found.append(packs_in(tmp_path / f"{size}"))
    assert len(planned.plan.shards) == 1
    assert found[0] == found[1]


def test_a_group_of_more_members_than_files_may_be_open_is_packed(tmp_path, source, chosen):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 40, limits[1]))
        planned, _ = prepare(blend_of(source), tmp_path / "out", **chosen | {"shard_size": SMALL // 20})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(planned.plan.shards) > 60
    assert packs_in(tmp_path / "out")


def test_datasets_and_splits_share_no_pack(tmp_path, chosen):
    paths = [write_rows(tmp_path / f"{name}.jsonl", ROWS[first::2]) for first, name in enumerate("ab")]
    prepare(blend_of(*paths), tmp_path / "out", **chosen | {"holdout": {"valid": 0.3, "test": 0}})
    for split in ("train", "valid"):
        held = Counter(stored_in(tmp_path / "out/shards", split))
        packs = packs_in(tmp_path / "out", split)
        assert Counter(itertools.chain(*packs)) == Counter({each: n for each, n in held.items() if len(each[0]) <= PACK_SIZE})  # fmt: skip
    names = {path.name.split("__")[1] for path in (tmp_path / "out/splits").rglob("*.parquet")}
    assert names == {"a", "b"}


CHOICES = {
    "pack_size": 300, "packing": "first_fit_shuffle", "seed": 7, "on_oversize": "truncate", "pad_seq_to_mult": 8,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_new_pack_settings_reuse_sequences(tmp_path, source, chosen, monkeypatch, name):
    other = chosen | {name: CHOICES[name]}
    prepare(blend_of(source), tmp_path / "fresh", **other)
    prepare(blend_of(source), tmp_path / "out", **chosen)
    before = times_of(tmp_path / "out/shards/sft")
    planned = plan(blend_of(source), tmp_path / "out", **other)

    def refuse(*_):
        raise AssertionError("work is done again")

    for where, method in ((ChatTemplate, "render"), (Batch, "encode"), (SequenceShard, "build")):
        assert hasattr(where, method)
        monkeypatch.setattr(where, method, refuse)  # after planning, which renders a few probes
    assert planned.plan.pending == []
    prepared = SFT.build(planned, build_here)
    manifest = SFT.publish(prepared, 0.0)
    assert manifest["volatile"]["shards"]["built"] == 0
    assert times_of(tmp_path / "out/shards/sft") == before
    assert published(tmp_path / "out") == published(tmp_path / "fresh")
    assert verify(str(tmp_path / "out"), inspector_of(str(tmp_path / "out"))).problems == []
    assert len(pack_receipts(prepared)) == 2, "the packs of before, and these"
    unused = leftovers(str(tmp_path / "out/shards"), [str(tmp_path / "out")], grace_seconds=-60)
    assert [shard.kind for shard in unused.removable] == ["packs"]


def published(out):
    return {name: content for name, content in tree(out).items() if name.startswith(("splits/", "blend.json"))}


def groups(monkeypatch, tokens):
    monkeypatch.setattr(packs_module, "GROUP_TOKENS", tokens)
    monkeypatch.setattr(packs_module, "GROUP_PACKS", 1)


@pytest.mark.slow
def test_a_large_dataset_is_packed_in_groups_and_one_that_grows_packs_only_the_last_again(
    tmp_path, source, chosen, monkeypatch
):
    groups(monkeypatch, 6_000)
    data = {"datasets": [{"name": "rows", "path": str(source.parent / "*.jsonl")}]}
    before, _ = prepare(data, tmp_path / "out", **chosen)
    first = pack_receipts(before)
    shards = before.plan.store
    members = [[name.partition("/")[0] for name in each.identity["source"]["sequences"]] for each in first]
    assert sorted(itertools.chain(*members)) == sorted(before.plan.keys)
    assert len(first) > 3
    assert max(sum(shards.receipt(key).tokens for key in keys) for keys in members) <= 6_000
    fitting = [each for each in stored_in(tmp_path / "out/shards") if len(each[0]) <= PACK_SIZE]
    assert Counter(itertools.chain(*packs_in(tmp_path / "out"))) == Counter(fitting)
    written = times_of(tmp_path / "out/shards/packs")
    old(write_rows(tmp_path / "z.jsonl", ROWS[:7]))
    after, _ = prepare(data, tmp_path / "out", **chosen)
    kept = times_of(tmp_path / "out/shards/packs")
    assert all(kept[path] == time for path, time in written.items() if Path(path).is_file())
    assert len(pack_receipts(after)) == len(first) + 1
    groups(monkeypatch, 1)
    planned, _ = prepare(blend_of(source), tmp_path / "alone", **chosen)
    assert len(pack_receipts(planned)) == len(planned.plan.shards) > 5, "a shard larger than a group is one by itself"


def test_dry_run_counts_packs_to_build(tmp_path, source, chosen):
    def told(**settings):
        return SFT.outlook(plan(blend_of(source), tmp_path / "out", **settings))

    assert told(**chosen) == ["then all sequences are packed, 512 tokens to a pack"]
    prepare(blend_of(source), tmp_path / "out", **chosen)
    assert told(**chosen)[0].startswith("0 of 1 groups")
    assert told(**(chosen | {"pack_size": 700}))[0].startswith("1 of 1 groups of sequences to pack, 700 tokens")


@pytest.mark.slow
@pytest.mark.parametrize("oversize", ["drop", "truncate"])
def test_every_row_is_followed_into_the_packs_and_back(tmp_path, source, chosen, monkeypatch, oversize):
    """Over several shards in a group, several groups, and rows that are too long."""
    groups(monkeypatch, 9_000)
    long = talk(user("#long# " + "mill " * 300), assistant("Yes."))
    write_rows(source, [*ROWS[:40], b"broken", long, *ROWS[40:]])
    _, manifest = prepare(blend_of(source), tmp_path / "out", on_oversize=oversize, **chosen)
    assert len(manifest["derived"]["shards"]) > 1
    lines = [json.loads(line) if line.startswith(b"{") else None for line in source.read_bytes().splitlines()]
    fates = [why_row(str(tmp_path / "out"), f"{source}:{line}")[0][-1] for line in range(1, len(lines) + 1)]
    reasons = Counter(fate.reason for fate in fates if not fate.kept)
    assert reasons == {"malformed_json": 1, UNPACKED_REASONS[oversize]: 1}
    assert manifest["totals"]["dropped"] == reasons
    assert manifest["totals"]["documents"] == sum(fate.kept for fate in fates) == len(ROWS)
    for fate in (fate for fate in fates if fate.kept):
        found = view_output(str(tmp_path / "out"), doc=fate.document)
        shown = [sequence for pack in found.packs for sequence in pack.sequences]
        asked = lines[fate.line - 1]["messages"][0]["content"]
        assert {sequence.line for sequence in shown} == {fate.line}
        assert all(f"{asked}<|im_end|>" in "".join(p.text for p in sequence.passages) for sequence in shown)
        assert sum(place.tokens for place in fate.places) == sum(sequence.tokens for sequence in shown)
        assert all(place.name is not None for place in fate.places)


def test_a_cut_sequence_is_the_beginning_of_the_stored_one(tmp_path, source, chosen):
    prepare(blend_of(source), tmp_path / "out", **chosen | {"on_oversize": "truncate", "pack_size": 100})
    expected = Counter()
    for ids, mask in stored_in(tmp_path / "out/shards"):
        cut = ids[:100], (*mask[:100][:-1], 0)
        expected[cut] += any(cut[1])
    assert Counter(itertools.chain(*packs_in(tmp_path / "out"))) == +expected
    assert sum(len(ids) == 100 for ids, _ in expected) > 10


def test_a_missing_member_is_named(tmp_path, source, chosen):
    planned = plan(blend_of(source), tmp_path / "out", **chosen)
    build(planned, planned.plan.pending)
    work = []

    def collecting(step, pending, store, arguments, *, rebuild=False):
        work.extend((s, store) for s in pending)
        return [*store.proven(s.key for s in pending).values()]

    with pytest.raises(RunError, match="don't have a receipt"):
        SFT.build(planned, collecting)
    (shard, store) = work[-1]
    key = planned.plan.keys[3]
    shutil.rmtree(planned.plan.store.folder(key))
    with pytest.raises(RunError, match=f"{key}/.*: missing since it was built; .*run the same command again"):
        packs_module.build_packs(shard, store)


# Packs of 294,912 tokens, as Nemotron 3 Ultra's, of many sequences that nobody had to tokenize.


def allocated():
    """Bytes that NumPy, Python and Arrow hold, whatever their allocators keep for later."""
    return tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes()


LONG = "the mill grinds grain and Wasser flows " * 25
"""Some 500 tokens."""


def long_conversation(number):
    """A conversation of two turns with reasoning, of some 2,000 to 200,000 tokens; the second turn of every fifth is too long for a pack."""
    much = 700 if number % 5 == 4 else random.Random(number).randint(1, 200)
    return talk(
        user(f"#{number}#"), thinking("Hm.", LONG * (much // 2 + 1)), user("Why?"), thinking(LONG * 2, LONG * much)
    )


@pytest.mark.slow
def test_conversations_of_lightning_fill_packs_of_294912_tokens_for_eight_ranks(tmp_path, vocabulary, monkeypatch):
    """Every sequence is m·16 + 1 tokens, so that 16 chunks of it, two for each rank, are equally long."""
    chosen = {"tokenizer": {"model": str(vocabulary)}, "chat_template": "lightning35", "shard_size": 2_000_000}
    chosen |= {"pack_size": 294_912, "pad_seq_to_mult": 16}
    grown, table = [], vars(PackWriter)["_table"]
    monkeypatch.setattr(PackWriter, "_table", lambda *given: (table(*given), seen.append(allocated()))[0])
    for count in (40, 120):
        source, seen = write_rows(tmp_path / f"{count}.jsonl", map(long_conversation, range(count))), []
        tracemalloc.start()
        before = allocated()
        _, manifest = prepare(blend_of(source), tmp_path / str(count), **chosen)
        grown.append(max(*seen, tracemalloc.get_traced_memory()[1]) - before)
        tracemalloc.stop()
        assert manifest["totals"]["documents"] == count
        assert manifest["totals"]["dropped"] == {}
        tables = [pq.read_table(path) for path in sorted((tmp_path / str(count) / "splits/train").glob("*.parquet"))]
        sizes = [pa.compute.list_value_length(each["input_ids"]).to_numpy() for each in tables]
        assert max(map(max, sizes)) <= 294_912
        lengths = np.concatenate(
            [
                np.diff([*starts, size])
                for each, ends in zip(tables, sizes, strict=True)
                for starts, size in zip(each["seq_start_id"].to_pylist(), ends.tolist(), strict=True)
            ]
        )
        assert len(lengths) == 2 * count - count // 5
        assert set(lengths % 16) == {1}
        assert lengths.max() > 100_000
    assert grown[1] < 1.25 * grown[0] < 100e6
