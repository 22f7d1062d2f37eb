"""The leading packs of a file are measured as they are, and written as they were."""

import itertools
import random

import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.pack.parquet import leading_packs, write_leading

from tests.pack.small_packs import METADATA, PADDING, facts_of, packs, parquet, tokens_of

MADE = packs(1300, seed=5)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("packs") / "train.parquet"
    path.write_bytes(parquet(MADE))
    return str(path)


WANTED = [0, 1, 20, 63, 64, 1000, tokens_of(MADE[:300]), tokens_of(MADE[:301]) - 3, tokens_of(MADE) - 1, 10**9]


@pytest.mark.parametrize("wanted", [*WANTED, *random.Random(3).sample(range(1, tokens_of(MADE)), 20)])
def test_leading_packs_are_closest(file, wanted):
    sums = list(itertools.accumulate((tokens_of([pack]) for pack in MADE), initial=0))
    best = min(range(len(sums)), key=lambda count: abs(sums[count] - wanted))
    expected = facts_of(MADE[:best]) if best else None
    found = leading_packs(file, wanted)
    if expected is None:
        assert found is None
        return
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("count", [1, 299, 300, 301, 1299])
def test_a_cut_file_has_the_leading_rows_and_everything_else_of_its_source(file, tmp_path, count):
    output = write_leading(file, str(tmp_path / "cut.parquet"), count)
    cut, whole = pq.ParquetFile(output.path), pq.ParquetFile(file)
    assert cut.read().equals(whole.read().slice(0, count), check_metadata=True)
    assert cut.schema.equals(whole.schema)
    assert cut.schema_arrow.metadata == METADATA
    groups = [cut.metadata.row_group(number) for number in range(cut.num_row_groups)]
    assert [group.num_rows for group in groups] == [min(300, count - first) for first in range(0, count, 300)]
    for group, leaf in itertools.product(groups, range(6)):
        made, found = whole.metadata.row_group(0).column(leaf), group.column(leaf)
        assert (found.compression, found.encodings) == (made.compression, made.encodings)
    assert write_leading(file, str(tmp_path / "again.parquet"), count).xxh3_128 == output.xxh3_128


def test_padding_is_not_counted(tmp_path):
    made = [[[2, 4, *[PADDING] * 3]], [[2] * 5, [4, *[PADDING] * 4]], [[4] * 9]]
    path = tmp_path / "padded.parquet"
    path.write_bytes(parquet(made))
    assert leading_packs(str(path), 8).packs == 2
    assert leading_packs(str(path), 8).tokens == 8
    assert leading_packs(str(path), 8).padding == 7
    assert leading_packs(str(path), 2).packs == 1


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:4] + b"\0" * 3000 + data[3004:]])
def test_a_damaged_file_is_named_with_a_remedy(file, tmp_path, damage):
    path = tmp_path / "train.parquet"
    path.write_bytes(damage(parquet(MADE)))
    with pytest.raises(RunError, match=rf"{path}: cannot be read: .*run the same command again"):
        leading_packs(str(path), 10**6)
