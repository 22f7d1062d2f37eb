"""Packs as rows: each sequence by itself, every token once in an epoch, in an order of the epoch's own."""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.pack.parquet import SCHEMA
from tokenmill.tasks.train.prepared import prepared_data
from tokenmill.tasks.train.rows import PackedRows, flat_packs, lay_out, layout_folder

from tests.examples import max_examples
from tests.faults.injection import killed_at
from tests.preparing_sft import chat_vocabulary
from tests.train import small_data

PAD = 2
A = ([10, 11, 12, 50, 51, 2], [0, 0, 1, 1, 1, 0])
B = ([20, 21, 60, 61, 62, 2], [0, 1, 1, 1, 1, 0])
"""Two sequences and their masks, shifted as they are stored."""


def write_packs(path, packs, row_group_size=2):
    """A file of packs, each a list of sequences with their masks."""
    rows = [
        {
            "input_ids": [token for ids, _ in pack for token in ids],
            "loss_mask": [bit for _, mask in pack for bit in mask],
            "seq_start_id": np.cumsum([0, *(len(ids) for ids, _ in pack)])[:-1].tolist(),
            **dict.fromkeys(("document", "role"), [0] * len(pack)),
            "role_start": np.cumsum([0, *(len(ids) for ids, _ in pack)])[:-1].tolist(),
        }
        for pack in packs
    ]
    schema = SCHEMA.with_metadata({"tokenmill": '{"pack_size": 16}'})
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=row_group_size)
    return str(path)


def rows_of(folder, files, length=16, seed=1):
    """The rows of `files`, a list of packs for each."""
    paths = [write_packs(folder / f"{number}.parquet", packs) for number, packs in enumerate(files)]
    lay_out(paths, str(folder / "flat"))
    return PackedRows(flat_packs(str(folder / "flat")), length, PAD, seed)


def test_a_pack_is_collated_as_megatron_bridge_does(tmp_path):
    batch = rows_of(tmp_path, [[[A, B]]]).batch([0])
    assert batch.tokens.tolist() == [[10, 11, 12, 50, 51, 20, 21, 60, 61, 62, *[PAD] * 6]]
    assert batch.labels.tolist() == [[11, 12, 50, 51, 2, 21, 60, 61, 62, 2, *[PAD] * 6]]
    assert batch.loss_mask.tolist() == [[False, False, *[True] * 3, False, *[True] * 4, *[False] * 6]]
    assert batch.positions.tolist() == [[*range(5), *range(5), *range(6)]]
    assert batch.segments.tolist() == [[*[0] * 5, *[1] * 5, *[-1] * 6]]
    assert batch.padding == 6


def test_pack_longer_than_a_row_is_rejected(tmp_path):
    assert rows_of(tmp_path, [[[A, B]]], length=10).batch([0]).padding == 0
    with pytest.raises(RunError, match=r"gives 10 tokens .* a row of 9; raise sequence_length"):
        PackedRows(flat_packs(str(tmp_path / "flat")), 9, PAD, 1).batch([0])


tokens = st.integers(0, 200_000)
sequences = st.lists(st.tuples(tokens, st.integers(0, 1)), min_size=1, max_size=6).map(
    lambda pairs: ([token for token, _ in pairs], [*(bit for _, bit in pairs[:-1]), 0])
)
files = st.lists(st.lists(st.lists(sequences, min_size=1, max_size=4), min_size=1, max_size=5), min_size=1, max_size=3)


@max_examples(40)
@given(files=files, seed=st.integers(0, 3), epoch=st.integers(0, 2))
def test_in_every_epoch_every_token_is_read_once_before_the_one_that_follows(files, seed, epoch):
    stored = [pack for packs in files for pack in packs]
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(Path(folder), files, length=24, seed=seed)
        batch = rows.batch(range(epoch * len(stored), (epoch + 1) * len(stored)))
    assert Counter(map(read_pack, *arrays(batch))) == Counter(map(expected, stored))
    assert batch.loss_mask.sum() == sum(bit for pack in stored for _, mask in pack for bit in mask)
    read = sum(len(ids) - 1 for pack in stored for ids, _ in pack)
    assert batch.padding == batch.tokens.size - read
    assert (batch.tokens[batch.segments < 0] == PAD).all()
    assert not batch.loss_mask[batch.segments < 0].any()


def arrays(batch):
    return batch.tokens, batch.labels, batch.loss_mask, batch.segments, batch.positions


def read_pack(tokens, labels, loss, segments, positions):
    """The sequences in a row: of each what is read, what follows it, what is trained on, and the places."""
    numbers = sorted(set(segments[segments >= 0].tolist()))
    return tuple(
        tuple(tuple(each[segments == number].tolist()) for each in (tokens, labels, loss, positions))
        for number in numbers
    )


def expected(pack):
    return tuple(
        (tuple(ids[:-1]), tuple(ids[1:]), tuple(bit == 1 for bit in mask[:-1]), tuple(range(len(ids) - 1)))
        for ids, mask in pack
        if len(ids) > 1
    )


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """A folder of 300 packs in three files, each with its own number for a token."""
    folder = tmp_path_factory.mktemp("numbered")
    packs = [[([number, 0], [1, 0])] for number in range(300)]
    return rows_of(folder, [packs[:7], packs[7:100], packs[100:]], length=4).packs


def order(packs, numbers, seed=1):
    return PackedRows(packs, 4, PAD, seed).batch(numbers).tokens[:, 0].tolist()


def test_epochs_are_permutations_over_all_files_and_no_two_alike(numbered):
    epochs = [order(numbered, range(begin, begin + 300)) for begin in (0, 300, 600)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(300))
        assert sum(abs(place - number) for place, number in enumerate(epoch)) > 300 * 50  # 100 each, if drawn at random
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_row_depends_only_on_the_seed(numbered):
    assert order(numbered, range(300), seed=2) != order(numbered, range(300)) == order(numbered, range(300))
    there, back = order(numbered, range(290, 310)), order(numbered, range(309, 289, -1))
    assert there == back[::-1]


def test_packs_are_laid_out_once(tmp_path):
    first = rows_of(tmp_path, [[[A, B], [B]]]).batch([0, 1])
    for file in tmp_path.glob("*.parquet"):
        file.unlink()
    lay_out([str(tmp_path / "0.parquet")], str(tmp_path / "flat"))
    again = PackedRows(flat_packs(str(tmp_path / "flat")), 16, PAD, 1).batch([0, 1])
    assert again.tokens.tolist() == first.tokens.tolist()


def whole(folder):
    """The files of the columns that are laid out with their bounds, where they have some; each with its inode."""
    names = {"trained": ["trained"], "packs": ["ids", "packs"], "sequences": ["starts", "sequences"]}
    there = [name for last, both in names.items() if (folder / last).exists() for name in both]
    return {name: (folder / name).stat().st_ino for name in there}


@pytest.mark.slow
def test_interrupted_layout_resumes_from_whole_columns(tmp_path):
    files = [write_packs(tmp_path / "0.parquet", [[A, B], [B]]), write_packs(tmp_path / "1.parquet", [[A]])]
    number = 1
    while True:
        flat = tmp_path / f"flat-{number}"
        killed = killed_at(number, lambda flat=flat: lay_out(files, str(flat)))
        published = whole(flat)
        lay_out(files, str(flat))
        assert published.items() <= whole(flat).items()
        packs = flat_packs(str(flat))
        assert packs.ids.tolist() == [*A[0], *B[0], *B[0], *A[0]]
        assert packs.trained.tolist() == [bit for _, mask in (A, B, B, A) for bit in [0, *mask[:-1]]]
        assert packs.starts.tolist() == [0, 6, 0, 0]
        assert packs.token_offsets.tolist() == [0, 12, 18, 24]
        assert packs.sequence_offsets.tolist() == [0, 2, 3, 4]
        assert len(list(flat.iterdir())) == 5
        if not killed:
            break
        number += 1
    assert number > 5 * 4


@pytest.fixture(scope="module")
def preparations(tmp_path_factory):
    """The same conversations prepared in several ways, and one of them at two places."""
    folder = tmp_path_factory.mktemp("preparations")
    vocabulary = chat_vocabulary(folder / "vocabulary")
    ways = {"one": {}, "moved": {}, "longer": {"pack_size": 96}, "otherwise masked": {"loss_end_of_turn": False}}
    return {
        way: prepared_data(small_data.packs(folder / way, vocabulary, store=str(folder / "store"), **settings)[0])
        for way, settings in ways.items()
    }


def test_layouts_are_keyed_by_content_and_split(preparations):
    folders = {way: layout_folder(data, "train", "/cache") for way, data in preparations.items()}
    assert folders.pop("moved") == folders["one"]
    assert len(set(folders.values())) == len(folders) == 3
    assert layout_folder(preparations["one"], "valid", "/cache") not in folders.values()


def test_a_column_that_was_left_by_other_data_is_not_taken(preparations, tmp_path):
    left = Path(laid_out(preparations["one"], tmp_path))
    for name in ("trained", "starts", "sequences"):
        (left / name).unlink()
    kept, other = (left / "ids").read_bytes(), preparations["longer"]
    place = laid_out(other, tmp_path)
    assert flat_packs(place).ids.tolist() == [token for ids in stored(other) for token in ids]
    assert (left / "ids").read_bytes() == kept


def laid_out(data, cache):
    place = layout_folder(data, "train", str(cache))
    lay_out([file for source in data.of("train") for file in source.files], place)
    return place


def stored(data):
    return [
        ids
        for source in data.of("train")
        for file in source.files
        for ids in pq.read_table(file)["input_ids"].to_pylist()
    ]
