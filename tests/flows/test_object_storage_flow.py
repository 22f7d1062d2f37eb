"""Flows on a real Prefect server and real Dask workers, from a bucket to a bucket that fails now and then: the bytes of an
undisturbed run into a local folder.
"""

import pytest
from tokenmill.flows.pretrain import pretrain_data_prep

from tests.flaky_storage import flaky_server, used_here
from tests.kinds.preparations import sample
from tests.kinds.test_object_storage import Stored, assert_never_half, assert_none_pending, assert_proven, resolved
from tests.preparing import tree

pytestmark = pytest.mark.slow


@pytest.fixture
def server():
    with flaky_server() as server, used_here(server):
        yield server


def test_a_flow_from_a_bucket_to_a_bucket_has_the_bytes_of_a_local_run(server, prefect_api, tmp_path):
    with sample("pretrain", tmp_path) as preparation:
        stored = Stored(preparation, tmp_path, server)
        out = f"{stored.place}/out"
        stored.run(tmp_path / "local")
        server.faults.clear(rate=0.1, seed=2)  # workers wait before they try again, half a second at first
        record = pretrain_data_prep(preparation.blend, out, **preparation.settings, workers=2)["pretrain"]
        assert record["shards"]["built"] == record["shards"]["total"] > 1
        assert sum(server.faults.counts[each] > 0 for each in ("slow", "cut", "unsaid", "torn")) >= 3
        assert_none_pending(stored, "out")
        server.faults.clear()
        assert resolved(stored.tree("out", tmp_path / "fetched")) == resolved(tree(tmp_path / "local"))
        assert_never_half(stored.versions("out"))
        assert_proven(out)
