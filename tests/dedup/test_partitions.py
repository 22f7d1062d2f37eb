"""Files of rounds outlive the run that wrote them, and a later one must not believe what became of them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenmill.tasks.dedup.partitions import partitioned, read_partition, tables
from tokenmill.tasks.dedup.rounds import SignedSlices
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.receipt import shard_key
from tokenmill.tasks.shards.store import Store

PARTITIONS, BITS = 4, 800
SCHEMA = pa.schema([("key", pa.uint64()), ("name", pa.large_string()), ("share", pa.float32())])


@pytest.fixture
def shard(tmp_path):
    """A store, the key of a shard in it, and its one file, of some rows with and without names."""
    store, identity = Store(str(tmp_path), "dedup"), {"kind": "dedup", "source": {}}
    place = store.path(shard_key(identity), "rows.arrow")
    keys = np.random.default_rng(0).integers(0, 1 << 63, 24, dtype=np.uint64) << np.uint64(1)
    with partitioned(place, SCHEMA, PARTITIONS) as file:
        for some in np.array_split(keys, 2):
            names = pa.array(
                [None if key % 3 == 0 else f"name {key % 100}" for key in some.tolist()], pa.large_string()
            )
            columns = [pa.array(some), names, pa.array(some % 7, pa.float32(), from_pandas=True)]
            file.write(pa.Table.from_arrays(columns, schema=SCHEMA), some)
            file.flush()
    store.issue(identity, outputs=[file.output], rows_in=0, parts={}, drops={})
    return store, shard_key(identity), place


def read(place):
    return [read_partition([place], number, PARTITIONS, SCHEMA) for number in range(PARTITIONS)]


@pytest.mark.slow
def test_flipped_bits_in_round_files_are_detected(shard):
    store, key, place = shard
    whole, expected, refused = Path(place).read_bytes(), read(place), []
    for number in np.random.default_rng(BITS).choice(8 * len(whole), BITS, replace=False).tolist():
        damaged = bytearray(whole)
        damaged[number // 8] ^= 1 << number % 8
        Path(place).write_bytes(damaged)
        try:
            assert read(place) == expected, f"bit {number}"
        except RunError as error:
            refused.append(str(error))
    assert len(refused) > BITS / 2, "the others are padding, and what Arrow itself does not read"
    assert store.receipt(key) is None, "so that the next run builds it anew"
    assert all("damaged since it was built" in said for said in refused)


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_truncated_files_are_rejected(shard, length):
    store, key, place = shard
    Path(place).write_bytes(Path(place).read_bytes()[:length])
    with pytest.raises(RunError, match="damaged"):
        read(place)
    assert store.receipt(key) is None, "so that the next run builds it anew"


def test_files_with_different_batches_are_rejected(tmp_path):
    """Batches that are whole in themselves, but not those that were written, or not all of them."""
    table = pa.table({"key": pa.array(range(3), pa.uint64())})
    place = str(tmp_path / "dedup/key/rows.arrow")
    with partitioned(place, table.schema, 1) as file:
        for _ in range(3):
            file.append(table)
    with pa.ipc.open_file(place) as reader:
        batches = [reader.get_batch_with_custom_metadata(number) for number in range(reader.num_record_batches)]
    for chosen in ([0, 1, 3], [0, 2, 1, 3], [0, 1, 2], [3], [0, 0, 1, 2, 3]):
        with pa.OSFile(place, "wb") as stream, pa.ipc.new_file(stream, table.schema) as writer:
            for number in chosen:
                writer.write_batch(*batches[number])
        with pytest.raises(RunError, match="damaged"):
            [*tables(place, 0, 1)]


def test_signed_slices_match_their_name(tmp_path):
    store, slices = Store(str(tmp_path), "dedup"), SignedSlices(("key", "other"), ("a", "b"))
    place = slices.publish(store)
    assert SignedSlices.load(place) == slices
    publish_bytes(place, slices.dump().replace(b"other", b"othes"))
    with pytest.raises(RunError, match="damaged"):
        SignedSlices.load(place)
