"""A whole SFT preparation that is interrupted anywhere, then repeated: the same bytes as if nothing had happened, and
nothing left behind.

A preparation of two files in two shards, with a quarantine, held-out conversations and a file of leading packs, makes
some 160 file-system operations. Each of them is hit once, in the four ways of `test_preparation_faults`.
"""

import errno
import gc
import os
import random
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import fsspec
import pytest
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.pack.inspect import inspect_sft_shard
from tokenmill.tasks.pack.parquet import PackWriter
from tokenmill.tasks.pack.sequences import SequenceWriter
from tokenmill.tasks.shards.build import BadRowError
from tokenmill.tasks.shards.publish import TEMPORARY
from tokenmill.tasks.shards.verify import verify

from tests.building import publish_here
from tests.faults.injection import count_operations, fail_operation, killed_at
from tests.faults.interruptions import FAULTS, Repeatable, assert_mended, survive_each
from tests.forking import fork
from tests.peers.conversations import assistant, talk, thinking, user
from tests.preparing import blend_of, tree
from tests.preparing_sft import build, chat_vocabulary, plan, prepare, probing_once, write_rows
from tests.shards.damage import flip

pytestmark = pytest.mark.slow

STRIDE = 4
ROWS = [
    talk(user(f"Question {number}?"), thinking("Hm.", f"Answer {number * 7919 % 1000}."), user("So?"), assistant("So."))
    for number in range(40)
]


class Preparation(Repeatable):
    """Two files in two shards, or in more."""

    def __init__(self, folder):
        rows = {"a": [*ROWS[:15], b"broken", *ROWS[15:24]], "b": [*ROWS[24:], talk(user("Anyone?"))]}
        for name, lines in rows.items():
            os.utime(write_rows(folder / "corpus" / f"{name}.jsonl", lines), (1_000_000_000, 1_000_000_000))
        self.blend = blend_of(*sorted((folder / "corpus").iterdir()), b=0.9)
        self.model = str(chat_vocabulary(folder / "vocabulary"))
        self.out = folder / "out"

    def settings(self, **changed):
        chosen = {"tokenizer": {"model": self.model}, "pack_size": 128, "holdout": {"valid": 0.2, "test": 0}}
        return {**chosen, "sampling": "down", "shard_size": 10_000, **changed}

    def plan(self, **changed):
        return plan(self.blend, self.out, **self.settings(**changed))

    def run(self, **changed):
        return prepare(self.blend, self.out, **self.settings(**changed))


@pytest.fixture(scope="module", autouse=True)
def _quickly():
    with probing_once():
        yield


@pytest.fixture(scope="module")
def preparation(tmp_path_factory):
    return Preparation(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def undisturbed(preparation):
    """What the folder holds after an undisturbed preparation, and how many operations that took."""
    preparation.clear()
    preparation.run()  # warm: the vocabulary, the gate and the encoders are loaded now
    preparation.clear()
    with count_operations() as log:
        planned, _ = preparation.run()
    whole = tree(preparation.out)
    assert len(planned.plan.shards) == 2
    assert any("_leading_" in name for name in whole)
    assert {"quarantine/a.jsonl", "quarantine/b.jsonl", "splits/packing_valid.json"} <= whole.keys()
    return whole, len(log.operations)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_at_every_fourth_operation(preparation, undisturbed, fault):
    whole, operations = undisturbed
    survive_each(fault, preparation, whole, operations, STRIDE)


def published(found):
    return {name: content for name, content in found.items() if name.startswith(("blend.json", "splits/"))}


def test_a_kill_while_an_earlier_output_is_replaced(preparation, undisturbed):
    """The folder holds another preparation; what it shows a trainer is whole until the new one is."""
    whole, _ = undisturbed
    preparation.clear()
    preparation.run(pack_size=256)
    earlier = tree(preparation.out)
    shutil.copytree(preparation.out, preparation.out.with_name("earlier"))
    with count_operations() as log:
        preparation.run()
    for number in range(1, len(log.operations) + 1, 13):
        preparation.clear()
        shutil.copytree(preparation.out.with_name("earlier"), preparation.out)
        assert killed_at(number, preparation.run)
        found = tree(preparation.out)
        expected = earlier if found["blend.json"] == earlier["blend.json"] else whole
        names = {name for name in expected if name.startswith("splits/") and name.endswith(".parquet")}
        assert {name: found[name] for name in names} == {name: expected[name] for name in names}
        preparation.run()
        assert preparation.temporaries() == []
        assert published(tree(preparation.out)) == published(whole)


@pytest.mark.parametrize("seed", range(3))
def test_order_batches_and_duplicates_change_no_byte(preparation, seed):
    """Shards come in any order, some of them twice, in batches of any size."""
    preparation.clear()
    preparation.run(shard_size=1_000)
    expected = tree(preparation.out)
    preparation.clear()
    shuffle = random.Random(seed)
    planned = preparation.plan(shard_size=1_000)
    twice = shuffle.sample(planned.plan.pending, 4)
    work = [*planned.plan.pending, *twice]
    shuffle.shuffle(work)
    done = []
    while work:
        size = shuffle.randint(1, 4)
        batch, work = work[:size], work[size:]
        done += build(planned, batch)
    assert sum(shard.reused for shard in done) == len(twice)
    publish_here("sft", planned)
    assert tree(preparation.out) == expected


def test_a_run_stopped_after_some_shards_goes_on_from_there(preparation):
    preparation.clear()
    preparation.run(shard_size=1_000)
    expected = tree(preparation.out)
    preparation.clear()
    planned = preparation.plan(shard_size=1_000)
    build(planned, random.Random(0).sample(planned.plan.pending, 3))
    again, _ = preparation.run(shard_size=1_000)
    assert len(again.plan.pending) == len(planned.plan.pending) - 3
    assert tree(preparation.out) == expected


@pytest.mark.parametrize("days", [-1, 1])
def test_a_clock_that_jumps_between_runs_changes_nothing(preparation, undisturbed, monkeypatch, days):
    whole, _ = undisturbed
    preparation.clear()
    preparation.run()
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + days * 86_400)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + days * 86_400 * 10**9)
    planned, _ = preparation.run()
    assert planned.plan.pending == []
    preparation.clear()
    preparation.run()
    assert tree(preparation.out) == whole
    assert verify(str(preparation.out), inspect_sft_shard).problems == []


def test_three_processes_that_prepare_the_same_at_once_agree(preparation, undisturbed):
    whole, _ = undisturbed
    preparation.clear()
    children = [fork(preparation.run) for _ in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert preparation.temporaries() == []
    assert tree(preparation.out) == whole


# What is open, and what lies around.


def descriptors():
    """What this process has open, by name; a file without a name is ` (deleted)`."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except FileNotFoundError:
            continue  # that of the listing itself
    return sorted(found)


OWN = re.compile(
    r"prefix|index\.json|gates(/[0-9a-f]{32}\.json)?|(sft|packs)(/[0-9a-f]{32}"
    r"(/(train|valid|all)\.(tokens|index\.parquet|parquet)|/quarantine\.jsonl|/receipt\.json)?)?"
)


def strangers(store):
    """What lies in a store and is neither its own nor a file being published."""
    names = [str(path.relative_to(store)) for path in Path(store).rglob("*")]
    return [name for name in names if not OWN.fullmatch(name) and not TEMPORARY.fullmatch(Path(name).name)]


@pytest.fixture
def before():
    """What is open before a test; maps of tokens live as long as the traceback of an earlier test's error."""
    gc.collect()
    return descriptors()


def test_a_preparation_closes_what_it_opens_and_leaves_nothing_strange(preparation, undisturbed, before):
    preparation.clear()
    preparation.run()
    assert descriptors() == before
    assert strangers(preparation.out / "shards") == []


def failing(preparation, error, **changed):
    preparation.clear()
    with pytest.raises(error):
        preparation.run(**changed)


def test_a_preparation_that_fails_closes_what_it_opened(preparation, undisturbed, before):
    _, operations = undisturbed
    failing(preparation, BadRowError, on_bad_row="fail")
    failing(preparation, RunError, oversize="error", pack_size=40)
    for number in range(30, operations, 25):  # beyond the verdicts, which may be lost
        with fail_operation(number, OSError(errno.ENOSPC, "No space left on device")):
            failing(preparation, OSError)
    gc.collect()
    assert descriptors() == before
    assert strangers(preparation.out / "shards") == []


@pytest.mark.parametrize(("where", "name"), [(SequenceWriter, "append"), (PackWriter, "_table")])
def test_a_kill_while_sequences_are_stored_or_packed_leaves_nothing(preparation, undisturbed, monkeypatch, where, name):
    whole, _ = undisturbed
    preparation.clear()
    called = getattr(where, name)

    def killing(*arguments):
        called(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(where, name, killing)
        child = fork(preparation.run)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert strangers(preparation.out / "shards") == []
    assert_mended(preparation, whole, "sequences")


def test_a_full_disk_proves_nothing(preparation, undisturbed):
    """No file may grow beyond 4 kB."""
    whole, _ = undisturbed
    preparation.clear()

    def cramped():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, 4_096))
        with pytest.raises(OSError, match="File too large"):
            preparation.run(pack_size=4096, packing="concatenative")

    assert os.waitstatus_to_exitcode(os.waitpid(fork(cramped), 0)[1]) == 0
    assert not list(preparation.out.rglob("receipt.json"))
    assert strangers(preparation.out / "shards") == []
    assert_mended(preparation, whole, "sequences")


def test_packing_again_with_damaged_sequences_is_refused_and_mends_them(preparation, undisturbed):
    whole, _ = undisturbed
    preparation.clear()
    preparation.run()
    for number, tokens in enumerate((preparation.out / "shards/sft").glob("*/train.tokens")):
        flip(tokens, tokens.stat().st_size // 2)
        with pytest.raises(RunError, match=f"{tokens}: damaged since it was built"):
            preparation.run(pack_size=256 + number)  # a size that no sequences are packed to yet
        assert not (tokens.parent / "receipt.json").exists()
    preparation.run(pack_size=256)
    again, _ = preparation.run()
    assert again.plan.pending == []
    assert published(tree(preparation.out)) == published(whole)


def test_tokens_that_are_objects_are_packed_from_a_file_without_a_name(preparation, tmp_path, monkeypatch, before):
    seen, table = [], vars(PackWriter)["_table"]

    def noting(*arguments):
        seen.append(([path for path in descriptors() if path.startswith(f"{tmp_path}/")], list(tmp_path.iterdir())))
        return table(*arguments)

    monkeypatch.setattr(PackWriter, "_table", noting)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    system = fsspec.filesystem("memory")
    system.store.clear()
    prepare(preparation.blend, "memory://bucket/out", **preparation.settings())
    gc.collect()
    assert descriptors() == before
    assert seen
    assert all(opened and all(path.endswith(" (deleted)") for path in opened) for opened, _ in seen)
    assert all(names == [] for _, names in seen)
    assert system.exists("/bucket/out/blend.json")
    system.store.clear()
