"""Documents as rows: what megatron-core makes of .bin/.idx pairs, in the shares that the blend asks for."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path
from tokenmill.tasks.train.engine import joined
from tokenmill.tasks.train.job import TrainData, TrainSource
from tokenmill.tasks.train.rows import document_rows, remove_torn_indices
from tokenmill.tasks.train.samples import parts_of, pieces_of, samples_config

LENGTH = 16
STRIDE = 10_000
"""The tokens of pair number n count on from n times this, through all of its documents."""

WEIGHTS = {"a": [1.5, 0.5], "b": [1.0]}
DOCUMENTS = [30, 40, 20]


@pytest.fixture(scope="module", autouse=True)
def _alone():
    with joined("cpu"):
        yield


@pytest.fixture(scope="module")
def lengths():
    """Of the documents of each pair, which are shorter and longer than a row, or empty."""
    generator = np.random.default_rng(1)
    return [[*generator.integers(3, 60, count).tolist(), 0, 1, 200, 0] for count in (*DOCUMENTS, 12)]


@pytest.fixture(scope="module")
def data(tmp_path_factory, lengths):
    """Three pairs to train on, of two datasets, and one that is held out."""
    folder = tmp_path_factory.mktemp("pairs")
    pairs = [str(folder / str(number)) for number in range(4)]
    for number, prefix in enumerate(pairs):
        builder, begin = IndexedDatasetBuilder(get_bin_path(prefix), dtype=np.int32), number * STRIDE
        for length in lengths[number]:
            builder.add_document(list(range(begin, begin + length)), [length])
            begin += length
        builder.finalize(get_idx_path(prefix))
    places = {("a", "train"): pairs[:2], ("b", "train"): pairs[2:3], ("b", "valid"): pairs[3:]}
    return TrainData(
        path=str(folder), kind="pretrain", made_from="xxh3_128:1", tokenizer={}, fingerprint="sha256:1",
        vocabulary_size=4 * STRIDE, eos=0,
        sources=[
            TrainSource(dataset=name, split=split, files=files, weights=WEIGHTS[name][: len(files)], tokens=1)
            for (name, split), files in places.items()
        ],
    )  # fmt: skip


def read(rows, count, first=0):
    """Rows, by number, as the tokens of each with the one that follows the last."""
    batch = rows.batch(range(first, first + count))
    assert batch.loss_mask.all()
    assert batch.segments is None
    assert (batch.tokens[:, 1:] == batch.labels[:, :-1]).all()
    return np.concatenate([batch.tokens, batch.labels[:, -1:]], 1)


@pytest.fixture(scope="module")
def rows(data, tmp_path_factory):
    return document_rows(data, LENGTH, (240, 8), 1, str(tmp_path_factory.mktemp("cache")))


def test_mix_matches_the_blend_exactly(rows):
    found = Counter((read(rows[0], 240)[:, 0] // STRIDE).tolist())
    assert found == {0: 120, 1: 40, 2: 80}


def test_held_out_data_has_its_own_pair(rows):
    held_out = read(rows[1], 8)
    assert set((held_out // STRIDE).ravel().tolist()) == {3}
    assert (read(rows[1], 8, first=len(rows[1].samples)) == held_out).all()


def test_rows_match_the_cache_and_depend_on_the_seed(data, rows, tmp_path):
    first = read(rows[0], 40)
    for _ in ("built", "from the cache"):
        again = document_rows(data, LENGTH, (240, 8), 1, str(tmp_path))[0]
        assert (read(again, 40) == first).all()
    other = document_rows(data, LENGTH, (240, 8), 2, str(tmp_path))[0]
    assert (read(other, 40) != first).any()


def test_nothing_is_written_beside_the_data(data, rows, tmp_path):
    document_rows(data, LENGTH, (240, 8), 1, str(tmp_path))
    names = {path.name for path in type(tmp_path)(data.path).iterdir()}
    assert names == {f"{number}.{kind}" for number in range(4) for kind in ("bin", "idx")}
    assert any((tmp_path / "indices").rglob("*.npy"))


def test_a_split_that_nothing_is_asked_of_or_that_is_not_there_is_none(data, tmp_path):
    assert document_rows(data, LENGTH, (8, 0), 1, str(tmp_path))[1] is None
    train_alone = data.model_copy(update={"sources": data.of("train")})
    assert document_rows(train_alone, LENGTH, (8, 8), 1, str(tmp_path))[1] is None


@pytest.mark.parametrize("left", [0, 90, 130])
def test_indices_that_a_kill_has_cut_off_are_built_again(data, tmp_path, left):
    def tokens():
        return document_rows(data, LENGTH, (40, 0), 7, str(tmp_path))[0].batch(range(40)).tokens.tolist()

    expected, indices = tokens(), Path(tmp_path, "indices")
    for path in indices.glob("*.npy"):
        whole = path.read_bytes()
        path.write_bytes(whole[:left])
        with pytest.raises((ValueError, EOFError)):
            tokens()
        remove_torn_indices(str(indices))
        assert not path.exists()
        assert tokens() == expected
        assert path.read_bytes() == whole


@pytest.mark.parametrize("sources", [2, 1], ids=["several prefixes", "one prefix"])
def test_the_pieces_of_a_sample_are_the_tokens_that_megatron_reads(data, tmp_path, sources):
    chosen = data.model_copy(update={"sources": data.of("train")[-sources:]})
    dataset = document_rows(chosen, LENGTH, (600, 0), 1, str(tmp_path))[0].samples
    numbers, parts = np.random.default_rng(2).integers(0, len(dataset), 500), parts_of(dataset)
    pieces = pieces_of(dataset, numbers)
    for place, number in enumerate(numbers.tolist()):
        sample, found = dataset[number], pieces.of(place)
        tokens = np.concatenate([parts[source].dataset.get(*piece) for source, *piece in found])
        assert tokens.tolist() == [*sample["tokens"].tolist(), int(sample["labels"][-1])]
        assert {piece.source for piece in found} == {sample.get("dataset_id", 0)}
        assert all(piece.length for piece in found)
        assert pieces_of(dataset, [number]).of(0) == found
    assert any(pieces.document[1:] != pieces.document[:-1])
    assert pieces_of(dataset, []).bounds.tolist() == [0]


@pytest.mark.parametrize(
    ("places", "mapped"), [(["", ""], True), (["", "s3://bucket"], False), (["s3://bucket"] * 2, False)]
)
def test_files_on_an_object_store_are_not_mapped(data, places, mapped):
    sources = [
        source.model_copy(update={"files": [f"{place}/{number}"], "weights": [1.0]})
        for number, (place, source) in enumerate(zip(places, data.of("train"), strict=True))
    ]
    stored = data.model_copy(update={"sources": sources})
    config, _ = samples_config(stored, "train", LENGTH, 10, 1, "/indices", "/objects")
    assert (config.mmap_bin_files, config.object_storage_cache_path is None) == (mapped, mapped)
