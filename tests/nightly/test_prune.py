"""Shards that no kept manifest refers to go, and only those."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from fsspec.implementations.local import LocalFileSystem
from tokenmill.flows.cli import run
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.nightly.night import prune_night, store_of
from tokenmill.tasks.nightly.prune import leftovers, prune, prune_record
from tokenmill.tasks.nightly.versions import remedy_for
from tokenmill.tasks.report.registry import artifact_in, register
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.tokenize.kind import PRETRAIN

from tests import preparing_harmony
from tests.faults.injection import intercept
from tests.nightly.nights import BOOKS, FIRST, NEWS, SECOND, THIRD, WEB, Nights, texts, whereabouts, write
from tests.preparing import blend_of, prepare, write_lines
from tests.preparing_sft import write_rows
from tests.tokenize.small_vocabularies import word_piece


@pytest.fixture(scope="module")
def two_nights(tmp_path_factory):
    """Two versions of two blends, with shards that only the first one has, and one of a third blend."""
    nights = Nights(tmp_path_factory.mktemp("nights"))
    for name in ("news", "web"):
        nights.settings(name, max_shrink_fraction=1.0)
    nights.run(FIRST)
    nights.append("recent", texts("later", 70))
    nights.run(SECOND)
    nights.grow_old()
    return nights


@pytest.fixture
def nights(two_nights):
    """The same, put back after each test."""
    kept = Path(two_nights.out).with_name("kept")
    shutil.copytree(two_nights.out, kept)
    yield two_nights
    shutil.rmtree(two_nights.out)
    kept.rename(two_nights.out)


def versions(nights, *names):
    return [f"{nights.out}/{name}" for name in names]


def everything(nights):
    return versions(nights, *(f"{name}/{version}" for name in (NEWS, WEB, BOOKS) for version in nights.versions(name)))


def keys(output_dir):
    """The shards and prefixes of a publication."""
    manifest = json.loads(Path(output_dir, "manifest.json").read_bytes())
    return {entry["key"] for part in (manifest, manifest["derived"]) for entry in part["shards"]}


def test_shards_in_any_version_are_kept(nights):
    before = whereabouts(store_of(nights.out))
    found = prune(store_of(nights.out), everything(nights))
    assert found.removable == []
    assert found.referenced == len(nights.receipts("*"))
    assert whereabouts(store_of(nights.out)) == before


def test_a_night_removes_old_versions_and_the_shards_that_only_they_had(nights):
    old, stay = keys(f"{nights.out}/{NEWS}/{FIRST}"), [f"{nights.out}/{NEWS}/{SECOND}", f"{nights.out}/{BOOKS}/{FIRST}"]
    only_old = old - set.union(*map(keys, stay))
    assert only_old
    nights.run(THIRD, keep=1)
    assert sorted(nights.versions_gone) == sorted(versions(nights, f"{NEWS}/{FIRST}", f"{WEB}/{FIRST}"))
    assert {shard.key for shard in nights.leftovers.removable} == only_old
    assert nights.receipts("*").keys() == set.union(*map(keys, stay))
    for output_dir in everything(nights):
        assert verify(output_dir, PRETRAIN.inspect).problems == []
    assert nights.run(THIRD) == {}, "and all are still up to date"


def test_dry_run_counts_without_removing(nights):
    keep, before = versions(nights, f"{NEWS}/{SECOND}"), whereabouts(nights.out)
    looked = leftovers(store_of(nights.out), keep)
    assert whereabouts(nights.out) == before
    folders = [Path(Store(store_of(nights.out), shard.kind).folder(shard.key)) for shard in looked.removable]
    assert looked.size == sum(path.stat().st_size for folder in folders for path in folder.iterdir()) > 0
    assert prune(store_of(nights.out), keep) == looked
    record = prune_record(looked, store_of(nights.out), keep)["prune"]
    assert (record["shards"], record["bytes"], record["young"]) == (len(folders), looked.size, 0)
    assert not any(folder.exists() for folder in folders)


def test_a_shard_younger_than_the_grace_may_be_of_a_run_under_way(nights):
    keep = versions(nights, f"{NEWS}/{SECOND}")
    store = Path(store_of(nights.out))
    unreferenced = leftovers(str(store), keep).removable
    young = store / "pretrain" / unreferenced[0].key
    os.utime(next(young.glob("*.idx")))
    found = prune(str(store), keep)
    assert found.young == 1
    assert {shard.key for shard in found.removable} == {shard.key for shard in unreferenced[1:]}
    assert (young / "receipt.json").exists()


def test_nothing_outside_of_the_layout_is_touched(nights, tmp_path):
    store, key = Path(store_of(nights.out)), "0123456789abcdef" * 2
    strangers = [
        store / "notes.txt", store / "gates" / key, store / "pretrain/README", store / "pretrain" / key[:31] / "x",
        store / "pretrain" / key.upper() / "x", store / "elsewhere" / key / "receipt.json", tmp_path / "precious",
    ]  # fmt: skip
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        os.utime(path, (0, 0))
    (store / "pretrain" / key).symlink_to(tmp_path)
    found = prune(str(store), everything(nights))
    assert found.removable == []
    assert all(path.read_text() == "mine" for path in strangers)


def test_a_folder_inside_of_a_shard_is_left_where_it_is(nights):
    store, keep = Path(store_of(nights.out)), versions(nights, f"{NEWS}/{SECOND}")
    shard = store / "pretrain" / leftovers(str(store), keep).removable[0].key
    (shard / "notes").mkdir()
    (shard / "notes/mine.txt").write_text("mine")
    prune(str(store), keep)
    assert [path.name for path in shard.iterdir()] == ["notes"]


def test_unreadable_or_foreign_output_stops_pruning(nights, tmp_path):
    store, before = store_of(nights.out), whereabouts(nights.out)
    shutil.copytree(nights.out, tmp_path / "copy")
    with pytest.raises(InputError, match="no outputs to keep were named"):
        prune(store, [])
    with pytest.raises(InputError, match=r"nowhere: no manifest\.json of a publication"):
        prune(store, [*everything(nights), str(tmp_path / "nowhere")])
    with pytest.raises(InputError, match=f"its shards are in {store}, not in {tmp_path}/copy/shards"):
        prune(str(tmp_path / "copy/shards"), everything(nights))
    with pytest.raises(InputError, match="store not found"):
        prune(str(tmp_path / "nothing"), everything(nights))
    assert not (tmp_path / "nothing").exists()
    assert whereabouts(nights.out) == before


@pytest.mark.slow
def test_interrupted_removal_deletes_receipts_before_files(nights, monkeypatch):
    """Shards of which nothing is held out are files called `all`, which stand before `receipt.json`, those of others after."""
    nights.settings("web", holdout={"valid": 0, "test": 0}, max_shrink_fraction=1.0)
    nights.run(THIRD)
    nights.settings("web", max_shrink_fraction=1.0)
    nights.grow_old()
    store, keep = store_of(nights.out), versions(nights, f"{BOOKS}/{FIRST}")
    original, cuts, left = LocalFileSystem.rm_file, 0, 0

    def cut_short(self, path):
        nonlocal left, cuts
        if not left:
            cuts += 1
            raise OSError("power cut")
        left -= 1
        original(self, path)

    monkeypatch.setattr(LocalFileSystem, "rm_file", cut_short)
    while leftovers(store, keep).removable:
        left = 5
        with suppress(OSError):
            prune(store, keep)
        for kind in ("pretrain", "prefix"):
            assert Store(store, kind).proven(nights.receipts(kind)).keys() == nights.receipts(kind).keys()
    assert cuts > 5
    assert nights.receipts("*").keys() == keys(keep[0])


def test_pruned_shards_are_rebuilt_when_needed(nights):
    file = nights.data / "recent/first.jsonl"
    status, content = file.stat(), file.read_bytes()
    nights.run(THIRD, keep=1)
    nights.append("recent", [])
    file.write_bytes(content[: content.index(b"later") - len('{"text": "')])
    os.utime(file, (1_400_000_000, 1_400_000_000))
    made = nights.run(THIRD)
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert made[NEWS]["volatile"]["shards"]["built"] == 1
    for output_dir in everything(nights):
        assert verify(output_dir, PRETRAIN.inspect).problems == []


@pytest.mark.slow
def test_sources_of_marked_shards_are_kept(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": "yes"}]}
        for n in (1, 2, 2)
    ]
    write_rows(tmp_path / "chat.jsonl", rows)
    blend = {"datasets": [{"name": "chat", "path": str(tmp_path / "chat.jsonl"), "converter": "openai_messages"}]}
    settings = {"store": str(tmp_path / "store"), "change_detection": "mtime"}
    planned, manifest = preparing_harmony.prepare(blend, tmp_path / "out", **settings)
    marked = {entry["key"] for entry in manifest["shards"]}
    assert marked.isdisjoint(planned.plan.keys)
    selected = {entry["key"] for entry in manifest["derived"]["shards"]}
    prune(str(tmp_path / "store"), [str(tmp_path / "out")], grace_seconds=-1.0)
    replanned = preparing_harmony.plan(blend, tmp_path / "out", **settings)
    assert replanned.plan.pending == []
    assert Store(str(tmp_path / "store"), "harmony").proven(marked | selected).keys() == marked | selected
    assert list((tmp_path / "store/dedup").glob("*/receipt.json")), "rounds are no one's to remove"


def test_what_else_is_to_be_kept_keeps_its_shards_too(nights, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENMILL_ARTIFACTS", str(tmp_path / "names"))
    release, before = tmp_path / "release", f"{nights.out}/{NEWS}/{FIRST}"
    settings = nights.compare(SECOND)[WEB].chosen
    write(nights.data / "own/first.jsonl", texts("own", 30))
    prepare(blend_of(str(nights.data / "own")), release, **settings)
    nights.grow_old()
    register("corpus", artifact_in(before))
    nights.run(THIRD, keep=1, also_keep=[str(release), "art://corpus"])
    assert nights.versions(NEWS) == [FIRST, SECOND]
    assert nights.versions(WEB) == [SECOND]
    for output_dir in (str(release), before, f"{nights.out}/{NEWS}/{SECOND}"):
        assert verify(output_dir, PRETRAIN.inspect).problems == []
    with pytest.raises(InputError, match="no manifest"):
        prune_night(nights.out, 1, 0, [str(tmp_path)])
    assert nights.versions(NEWS) == [FIRST, SECOND]


PRUNE = """
import sys
from tokenmill.tasks.nightly import prune
prune.say = lambda sentence: print(sentence, flush=True)
prune.prune(sys.argv[1], sys.argv[2:], grace_seconds=-1.0)
"""


def test_shards_in_publication_are_not_pruned(tmp_path):
    """Old shards that no output names are reused; pruning starts after their receipts were checked, and before the manifest."""
    store, out = tmp_path / "store", tmp_path / "out"
    reused, other = (blend_of(write_lines(tmp_path / f"{name}.jsonl", texts(name, 30))) for name in ("reused", "other"))
    settings = {
        "store": str(store),
        "tokenizer": {"model": str(word_piece(tmp_path / "vocabulary"))},
        "allow_shrink": ["reused", "other"],
    }
    for blend in (reused, other):
        prepare(blend, out, **settings)
    command = [sys.executable, "-c", PRUNE, str(store), str(out)]
    with ExitStack() as stack:

        def prune_beside(number, name, arguments):
            if name == "link" and not pruned:
                pruned.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
                told.append(pruned[0].stdout.readline())

        pruned, told = [], []
        with intercept(prune_beside):
            prepare(reused, out, **settings)
    assert pruned[0].returncode == 0
    assert told == [
        f"waiting for process {os.getpid()} ({shlex.join(psutil.Process().cmdline())[:100]}), which is publishing from {store}\n"
    ]
    assert verify(str(out), PRETRAIN.inspect).problems == []


def test_versions_behind_a_link_keep_their_shards(nights, tmp_path):
    moved = tmp_path / "books"
    shutil.move(f"{nights.out}/{BOOKS}", moved)
    Path(nights.out, BOOKS).symlink_to(moved)
    nights.run(THIRD, grace_seconds=0)
    assert verify(f"{nights.out}/{BOOKS}/{FIRST}", PRETRAIN.inspect).problems == []


def test_a_damaged_version_is_prepared_again_by_the_remedy_that_verify_names(nights):
    version = Path(nights.out, NEWS, SECOND)
    key = next(iter(json.loads((version / "manifest.json").read_bytes())["derived"]["shards"]))["key"]
    damaged = next(Path(store_of(nights.out), "prefix", key).glob("*.bin"))
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\xff\xff\xff\xff")
    assert verify(str(version), PRETRAIN.inspect).withdrawn
    assert remedy_for(str(version)) == "remove this folder, and the next nightly run prepares this blend again"
    shutil.rmtree(version)
    assert set(nights.run(THIRD)) == {NEWS}
    assert verify(f"{nights.out}/{NEWS}/{THIRD}", PRETRAIN.inspect).problems == []
    assert "run the preparation again" in remedy_for(nights.out)


def test_sizes_are_readable_and_negative_age_is_rejected(nights, capsys):
    store, kept = store_of(nights.out), [f"--keep={place}" for place in everything(nights)]
    assert run(["prune", store, *kept, "--dry-run"]) == 0
    assert "0 shards of 0 bytes would be removed" in "".join(capsys.readouterr())
    assert run(["prune", store, *kept, "--grace-days=-1"]) == 2
    assert "--grace-days" in capsys.readouterr().err
