"""A preparation of each kind for the tests of all kinds."""

import shutil

import pytest
from tokenmill.tasks.shards.kinds import KINDS

from tests.faults.injection import count_operations
from tests.kinds.preparations import THREADED, sample
from tests.preparing import tree


@pytest.fixture(scope="module", params=KINDS)
def undisturbed(request, tmp_path_factory):
    """A sample of each kind. `whole` is what an undisturbed run leaves in `out`, and `logs` lists the file-system operations of
    one that begins with nothing and of one that begins with `store`, in which all shards are.
    """
    with sample(request.param, tmp_path_factory.mktemp(request.param)) as found:
        found.run()  # warm: vocabularies, gates, models and tables are loaded now
        found.clear()
        with count_operations() as whole:
            planned, manifest = found.run()
        assert found.drops(manifest) == found.dropped
        assert len(planned.plan.shards) > 1
        found.whole = tree(found.out)
        found.store = shutil.copytree(found.out / "shards", found.folder / "store")
        found.clear(found.store)
        with count_operations() as publishing:
            found.run()
        found.logs = {None: whole, found.store: publishing}
        yield found


@pytest.fixture
def prepared(undisturbed):
    """The same, `out` being empty."""
    undisturbed.clear()
    return undisturbed


@pytest.fixture
def forking(prepared):
    """The same, but for a kind whose threads do not survive a fork."""
    if prepared.kind in THREADED:
        pytest.skip("a forked child waits for the threads of torch")
    return prepared
