"""A partition of a file in a bucket costs what it holds, not what lies around it."""

import numpy as np
import pyarrow as pa
import pytest
from s3fs.core import S3File
from tokenmill.tasks.dedup.partitions import partitioned, read_partition

from tests.flaky_storage import flaky_server, used_here

PARTITIONS, ROWS = 16, 200_000
SCHEMA = pa.schema([("key", pa.uint64())])
FILE = "s3://partitions/keys.arrow"


@pytest.fixture
def keys():
    with flaky_server() as server, used_here(server):
        server.bucket("partitions")
        keys = np.random.default_rng(0).integers(0, 1 << 63, ROWS, dtype=np.uint64) << np.uint64(1)
        with partitioned(FILE, SCHEMA, PARTITIONS) as file:
            file.write(pa.Table.from_arrays([pa.array(keys)], schema=SCHEMA), keys)
        yield keys


def test_partition_memory_matches_its_size(keys, monkeypatch):
    fetch, fetched = getattr(S3File, "_fetch_range"), []  # noqa: B009 - what s3fs asks the store for

    def counting(self, start, stop):
        fetched.append(stop - start)
        return fetch(self, start, stop)

    monkeypatch.setattr(S3File, "_fetch_range", counting)
    found = read_partition([FILE], 3, PARTITIONS, SCHEMA)["key"].to_numpy()
    assert np.array_equal(found, keys[keys >> np.uint64(60) == 3])
    assert found.nbytes <= sum(fetched) < keys.nbytes / 4
