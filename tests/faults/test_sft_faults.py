"""What a preparation of SFT keeps open and leaves around, and sequences that are damaged or interrupted while they are packed."""

import errno
import gc
import re
from pathlib import Path

import fsspec
import pytest
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.pack.parquet import PackWriter
from tokenmill.tasks.shards.build import BadRowError
from tokenmill.tasks.shards.publish import TEMPORARY

from tests.faults.injection import count_operations, fail_operation
from tests.kinds.preparations import sample
from tests.preparing import tree
from tests.preparing_sft import prepare
from tests.shards.damage import flip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def preparation(tmp_path_factory):
    with sample("sft", tmp_path_factory.mktemp("faults")) as found:
        found.run()  # warm: the vocabulary, the gate and the encoders are loaded now
        found.clear()
        with count_operations() as log:
            found.run()
        found.whole, found.operations = tree(found.out), len(log.operations)
        yield found


def published(found):
    return {name: content for name, content in found.items() if name.startswith(("blend.json", "splits/"))}


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
    r"(/(train|valid|all)\.(tokens|index\.parquet|parquet)|/quarantine\.jsonl|/rows\.map|/receipt\.json)?)?"
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


def test_preparation_closes_and_removes_its_files(preparation, before):
    preparation.clear()
    preparation.run()
    assert descriptors() == before
    assert strangers(preparation.out / "shards") == []


def failing(preparation, error, **changed):
    preparation.clear()
    with pytest.raises(error):
        preparation.run(**changed)


def test_failed_preparation_closes_files(preparation, before):
    failing(preparation, BadRowError, on_bad_row="fail")
    failing(preparation, RunError, on_oversize="error", pack_size=40)
    for number in range(30, preparation.operations, 25):  # beyond the verdicts, which may be lost
        with fail_operation(number, OSError(errno.ENOSPC, "No space left on device")):
            failing(preparation, OSError)
    gc.collect()
    assert descriptors() == before
    assert strangers(preparation.out / "shards") == []


def test_packing_damaged_sequences_fails_and_repairs_them(preparation):
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
    assert published(tree(preparation.out)) == published(preparation.whole)


def test_tokens_that_are_objects_are_packed_from_a_file_without_a_name(preparation, tmp_path, monkeypatch, before):
    seen, table = [], vars(PackWriter)["_table"]

    def noting(*arguments):
        seen.append(([path for path in descriptors() if path.startswith(f"{tmp_path}/")], list(tmp_path.iterdir())))
        return table(*arguments)

    monkeypatch.setattr(PackWriter, "_table", noting)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    system = fsspec.filesystem("memory")
    system.store.clear()
    prepare(preparation.blend, "memory://bucket/out", **preparation.settings)
    gc.collect()
    assert descriptors() == before
    assert seen
    assert all(opened and all(path.endswith(" (deleted)") for path in opened) for opened, _ in seen)
    assert all(names == [] for _, names in seen)
    assert system.exists("/bucket/out/blend.json")
    system.store.clear()
