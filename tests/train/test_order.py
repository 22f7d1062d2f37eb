"""The order of a training: planned by megatron-core's own code, and followed by the trainer without building an index."""

import json
import logging
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.train import blocks
from tokenmill.tasks.train import order as order_module
from tokenmill.tasks.train.blocks import block_checks, check_places_of_documents, require_block_hashes
from tokenmill.tasks.train.engine import joined
from tokenmill.tasks.train.order import (
    INDICES,
    checked_data,
    fetch_indices,
    fits_in_process,
    make_order,
    prepared_indices,
    read_order,
)
from tokenmill.tasks.train.prepared import prepared_data
from tokenmill.tasks.train.rows import document_rows
from tokenmill.tasks.train.samples import (
    content_numbers,
    parts_of,
    pieces_of,
    range_digest,
    sample_hashes,
    step_digest,
    step_sums,
)
from tokenmill.tasks.train.settings import OrderPlan, OrderSettings

from tests.flaky_storage import flaky_server, used_here
from tests.train.small_data import packs, texts

SETTINGS = OrderSettings(sequence_length=16, global_batch=6, steps=25, seed=7, validation_batches=2)


def here(_name, function, calls):
    """Run tasks one after the other in this process, with what a scheduler would send."""
    return [json.loads(json.dumps(function(**call))) for call in calls]


@pytest.fixture(scope="module")
def data(tmp_path_factory, vocabulary):
    return prepared_data(texts(tmp_path_factory.mktemp("data"), vocabulary)[0])


@pytest.fixture(scope="module")
def order(data):
    return make_order(data, SETTINGS, here)


def rows_of(data, folder, settings=SETTINGS):
    with joined("cpu"):
        return document_rows(data, settings.sequence_length, settings.sizes, settings.seed, str(folder))


def test_trainer_does_not_build_indices(data, order, tmp_path, caplog):
    before = {path: path.stat().st_mtime_ns for path in Path(data.path, INDICES).iterdir()}
    with caplog.at_level(logging.INFO):
        train, valid = rows_of(data, tmp_path)
    assert not any("Build and save" in record.message for record in caplog.records)
    assert sum("Load the BlendedDataset" in record.message for record in caplog.records) == 2
    assert not (tmp_path / "indices").exists()
    assert {path: path.stat().st_mtime_ns for path in Path(data.path, INDICES).iterdir()} == before
    assert (
        train.batch(range(6)).tokens
        == rows_of(data.model_copy(update={"path": "/none"}), tmp_path)[0].batch(range(6)).tokens
    ).all()
    assert valid is not None


@pytest.mark.parametrize("change", [{"seed": 8}, {"steps": 26}, {"sequence_length": 15}])
def test_training_with_other_settings_builds_its_own(data, order, tmp_path, change):
    rows_of(data, tmp_path, SETTINGS.model_copy(update=change))
    assert len(list((tmp_path / "indices").glob("*-BlendedDataset-train-*"))) == 3


def test_training_on_other_content_builds_its_own(data, order, tmp_path):
    rows_of(data.model_copy(update={"made_from": "xxh3_128:0"}), tmp_path)
    assert (tmp_path / "indices").exists()


def test_digests_match_the_trainers_reads(data, order, tmp_path):
    rows, _ = rows_of(data, tmp_path)
    positions = np.arange(6)
    for step in range(SETTINGS.steps):
        reads = rows.batch(range(step * 6, step * 6 + 6)).reads
        parts = [step_sums(reads[part], positions[part]) for part in (np.s_[4:], np.s_[:1], np.s_[1:4])]
        assert order.digests[step] == step_digest(parts)
    assert len(order.digests) == len(set(order.digests)) == SETTINGS.steps
    assert read_order(data.path) == order


def test_counts_match_tokens_in_samples(data, order, tmp_path):
    """Against every single token of every sample, counted one by one."""
    samples = rows_of(data, tmp_path)[0].samples
    found = {source.dataset: Counter() for source in data.of("train")}
    names = [source.dataset for source in data.of("train") for _ in source.files]
    for number in range(SETTINGS.sizes[0]):
        inputs = [
            (piece.source, piece.document, piece.offset + place)
            for piece in pieces_of(samples, [number]).of(0) for place in range(piece.length)
        ]  # fmt: skip
        for token in inputs[:-1]:
            found[names[token[0]]][token] += 1
    lengths = [part.dataset.sequence_lengths.tolist() for part in parts_of(samples)]
    for reads in order.datasets:
        own = [number for number, name in enumerate(names) if name == reads.dataset]
        tokens = found[reads.dataset]
        assert reads.tokens == sum(sum(lengths[number]) for number in own)
        assert reads.drawn == tokens.total()
        read = {(number, place): 0 for number in own for place in range(len(lengths[number]))}
        for (source, document, _), count in tokens.items():
            read[source, document] += count
        never = sum(not count for count in read.values())
        assert reads.documents["never"] == never
        assert sum(reads.documents[times] for times in ("never", "once", "twice", "more")) == len(read)
        assert reads.documents["twice"] == sum(
            lengths[source][place] < count <= 2 * lengths[source][place] for (source, place), count in read.items()
        )
        assert 0 <= reads.cut < SETTINGS.sequence_length * len(own)


def test_packages_that_are_not_installed(monkeypatch):
    monkeypatch.setattr("tokenmill.tasks.train.order.find_spec", lambda name: None if name == "torch" else name)
    with pytest.raises(InputError, match=r"order: torch must be installed: pip install torch=="):
        checked_data("out", SETTINGS)


def test_packs_and_damaged_orders_are_rejected(vocabulary, tmp_path):
    path, _ = packs(tmp_path, vocabulary)
    with pytest.raises(InputError, match="packs"):
        checked_data(path, SETTINGS)
    Path(path, "order.json").write_bytes(b"{}")
    with pytest.raises(InputError, match="run tokenmill order again"):
        read_order(path)


def test_a_hash_depends_on_every_field_of_a_piece_and_on_no_path(data, order, tmp_path):
    samples = rows_of(data, tmp_path)[0].samples
    pieces = pieces_of(samples, range(4))
    contents = content_numbers([f"content {number}" for number in range(len(parts_of(samples)))])
    hashes = sample_hashes(pieces, contents)
    for name in ("document", "offset", "length"):
        changed = getattr(pieces, name).copy()
        changed[pieces.bounds[2]] += 1
        fields = {each: getattr(pieces, each) for each in ("bounds", "source", "document", "offset", "length")}
        other = sample_hashes(type(pieces)(**{**fields, name: changed}), contents)
        assert (other != hashes).tolist() == [False, False, True, False]
    assert (sample_hashes(pieces, contents + np.uint64(1)) != hashes).all()


@pytest.fixture(scope="module")
def hashed(tmp_path_factory, vocabulary):
    """Documents with block hashes."""
    found = prepared_data(texts(tmp_path_factory.mktemp("hashed"), vocabulary)[0])
    make_order(found, SETTINGS.model_copy(update={"block_hashes": True}), here)
    return found


@pytest.mark.parametrize("block_bytes", [1 << 16, 64])
def test_a_flipped_bit_stops_reading_exactly_the_rows_that_hold_it(hashed, tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    if block_bytes == 64:  # so small that many rows do not touch the damaged one
        for path in Path(hashed.path, blocks.BLOCKS).iterdir():
            path.unlink()
        here("", blocks.hash_blocks, blocks.block_calls(hashed))
    rows, _ = rows_of(hashed, tmp_path)
    checked = replace(rows, checks=block_checks(hashed, "train", rows.samples))
    for number in range(SETTINGS.sizes[0]):
        checked.batch([number])
    damaged = hashed.of("train")[0].files[0]
    before = Path(damaged + ".bin").read_bytes()
    place = len(before) // 2
    Path(damaged + ".bin").write_bytes(before[:place] + bytes([before[place] ^ 4]) + before[place + 1 :])
    try:
        for number in range(SETTINGS.sizes[0]):
            tokens = []
            for piece in pieces_of(rows.samples, [number]).of(0):
                begin = rows.samples.datasets[piece.source].dataset.index.sequence_pointers[piece.document]
                tokens += [
                    (piece.source, (begin + (piece.offset + at) * 2) // block_bytes) for at in range(piece.length)
                ]
            if (0, place // block_bytes) in tokens:
                with pytest.raises(InputError, match=rf"{damaged}\.bin: changed between bytes"):
                    checked.batch([number])
            else:
                checked.batch([number])
    finally:
        Path(damaged + ".bin").write_bytes(before)


def test_a_changed_place_of_a_document_stops_training_and_planning(data):
    here("", blocks.hash_blocks, blocks.block_calls(data))
    check_places_of_documents(data)
    place = Path(f"{data.of('train')[0].files[0]}.idx")
    before = place.read_bytes()
    place.write_bytes(before[:-40] + bytes([before[-40] ^ 2]) + before[-39:])
    try:
        with pytest.raises(InputError, match=rf"{place}: changed between bytes 0 and 65,536"):
            check_places_of_documents(data)
        shutil.rmtree(Path(data.path, blocks.BLOCKS))
        with pytest.raises(RunError, match=rf"{place}: its content is not the recorded one"):
            here("", blocks.hash_blocks, blocks.block_calls(data))
    finally:
        place.write_bytes(before)
        shutil.rmtree(Path(data.path, blocks.BLOCKS))


def test_hashes_are_not_written_of_a_file_that_has_changed(hashed, tmp_path):
    call = {"place": f"{hashed.of('train')[0].files[0]}.bin", "target": str(tmp_path / "hashes")}
    with pytest.raises(RunError, match="not the recorded one"):
        blocks.hash_blocks(**call, recorded=[(1, "0" * 32)])
    assert not (tmp_path / "hashes").exists()


def test_checks_without_hashes_are_rejected(data):
    with pytest.raises(InputError, match="block_hashes=true"):
        require_block_hashes(data)


@pytest.mark.slow
def test_indices_in_a_bucket_are_copied_and_used(vocabulary, tmp_path, caplog):
    with flaky_server() as server, used_here(server):
        server.bucket("ordered")
        path, _ = texts(tmp_path, vocabulary, out="s3://ordered/out")
        stored = prepared_data(path)
        make_order(stored, SETTINGS, here)
        for split, size in zip(("train", "valid"), SETTINGS.sizes, strict=True):
            place = prepared_indices(stored, split, SETTINGS.sequence_length, size, SETTINGS.seed)
            assert place == f"{path}/{INDICES}"
            fetch_indices(place, str(tmp_path / "cache" / "indices"))
        with caplog.at_level(logging.INFO):
            rows_of(stored, tmp_path / "cache")
    assert not any("Build and save" in record.message for record in caplog.records)
    assert sum("Load the BlendedDataset" in record.message for record in caplog.records) == 2


def test_ranges_of_steps_share_digests(data, order, monkeypatch):
    """Ten steps to a digest, and few samples at once."""
    monkeypatch.setattr(order_module, "TOKENS_AT_ONCE", 40)
    plan = OrderPlan(**SETTINGS.model_dump(include=set(OrderPlan.model_fields)))
    task = order_module.Task(data=data, plan=plan, indices=f"{data.path}/{INDICES}", objects="")
    assert order_module.digest_steps(task, 0, 25, 10) == [
        range_digest(order.digests[part]) for part in (np.s_[:10], np.s_[10:20], np.s_[20:])
    ]


def test_large_data_or_many_steps_start_workers(data, monkeypatch):
    tokens = sum(source.tokens for source in data.sources)
    for most, steps, expected in ((tokens, 1, False), (tokens + 1, 1, True), (tokens + 1, tokens, False)):
        monkeypatch.setattr(order_module, "MAX_LOCAL_TOKENS", most)
        assert fits_in_process(data, SETTINGS.model_copy(update={"steps": steps})) == expected


@pytest.mark.slow
def test_a_small_order_starts_no_workers(vocabulary, tmp_path):
    """Workers of a cluster take more than 30 s of CPU time, most of it to import torch and megatron-core."""
    path, _ = texts(tmp_path, vocabulary)
    command = ["order", path, "sequence_length=16", "global_batch=6", "steps=12"]
    program = (
        f"import sys; from tokenmill.flows import cli; cli.run({command!r}); assert 'distributed' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert read_order(path)
