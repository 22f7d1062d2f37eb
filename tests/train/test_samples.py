"""The pieces of samples, against the tensors that megatron-core's own datasets give."""

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path
from tokenmill.tasks.train.engine import joined
from tokenmill.tasks.train.job import TrainData, TrainSource
from tokenmill.tasks.train.rows import document_rows
from tokenmill.tasks.train.samples import parts_of, pieces_of, samples_config

LENGTH = 16
LENGTHS = [[40, 0, 3, 3, 1, 90, 17], [5, 5, 5, 60, 16, 17, 1, 1], [200]]


@pytest.fixture(scope="module", autouse=True)
def _alone():
    with joined("cpu"):
        yield


def pairs(folder, lengths=LENGTHS):
    """Pairs of random tokens, one per list of documents; their prefixes."""
    generator = np.random.default_rng(1)
    prefixes = [str(folder / f"pair-{number}") for number in range(len(lengths))]
    for prefix, documents in zip(prefixes, lengths, strict=True):
        builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=np.int32)
        for length in documents:
            builder.add_document(generator.integers(1, 60_000, length).tolist(), [length])
        builder.finalize(get_idx_path(prefix))
    return prefixes


def data_of(folder, prefixes, weights):
    """What a training knows of pairs: they are one dataset each."""
    sources = [
        TrainSource(dataset=f"set-{number}", split="train", files=[prefix], weights=[weight], tokens=1)
        for number, (prefix, weight) in enumerate(zip(prefixes, weights, strict=True))
    ]
    return TrainData(
        path=str(folder), kind="pretrain", made_from="xxh3_128:1", tokenizer={}, fingerprint="sha256:1",
        vocabulary_size=60_000, eos=0, sources=sources,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("places", "mapped"), [(["", ""], True), (["", "s3://bucket"], False), (["s3://bucket"] * 2, False)]
)
def test_files_on_an_object_store_are_not_mapped(tmp_path, places, mapped):
    data = data_of(tmp_path, [f"{place}/data-{number}" for number, place in enumerate(places)], [1.0, 1.0])
    config, _ = samples_config(data, "train", LENGTH, 10, 1, "/indices", "/objects")
    assert (config.mmap_bin_files, config.object_storage_cache_path is None) == (mapped, mapped)


def samples_of(folder, prefixes, weights, size=600):
    (rows, _) = document_rows(data_of(folder, prefixes, weights), LENGTH, (size, 0), 1, str(folder / "cache"))
    return rows.samples


def read(dataset, pieces):
    """The tokens of pieces, by megatron-core's own reader."""
    parts = parts_of(dataset)
    return np.concatenate([parts[source].dataset.get(*place) for source, *place in pieces])


@pytest.mark.parametrize("weights", [[1.0, 3.0, 2.0], [1.0]], ids=["several prefixes", "one prefix"])
def test_the_pieces_of_a_sample_are_the_tokens_that_megatron_reads(tmp_path, weights):
    dataset = samples_of(tmp_path, pairs(tmp_path)[: len(weights)], weights)
    numbers = np.random.default_rng(2).integers(0, len(dataset), 500)
    pieces = pieces_of(dataset, numbers)
    for place, number in enumerate(numbers.tolist()):
        sample, found = dataset[number], pieces.of(place)
        assert read(dataset, found).tolist() == [*sample["tokens"].tolist(), int(sample["labels"][-1])]
        assert {piece.source for piece in found} == {sample.get("dataset_id", 0)}
        assert all(piece.length for piece in found)
    assert any(pieces.document[1:] != pieces.document[:-1])


def test_single_samples_have_the_same_pieces(tmp_path):
    dataset = samples_of(tmp_path, pairs(tmp_path), [1.0, 3.0, 2.0])
    together = pieces_of(dataset, range(40))
    assert [pieces_of(dataset, [number]).of(0) for number in range(40)] == [together.of(place) for place in range(40)]
    assert pieces_of(dataset, []).bounds.tolist() == [0]
