"""A loop over megatron-core's own datasets, with a loader's processes, records what it reads."""

from pathlib import Path

import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.train.engine import joined
from tokenmill.tasks.train.order import INDICES
from tokenmill.tasks.train.ordering import make_order
from tokenmill.tasks.train.prepared import prepared_data
from tokenmill.tasks.train.proof import prove
from tokenmill.tasks.train.recorder import ReadRecorder, use_order
from tokenmill.tasks.train.settings import OrderSettings

from tests import preparing
from tests.preparing_sft import chat_vocabulary
from tests.train.small_data import TEXTS, texts
from tests.train.test_order import here

BATCH, STEPS = 6, 12


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    found = prepared_data(texts(folder, chat_vocabulary(folder))[0])
    make_order(found, OrderSettings(sequence_length=16, global_batch=BATCH, steps=STEPS, seed=7), here)
    return found


def blend_of(data):
    """The prefixes and weights of the train split, as in blend.json."""
    return (
        [file for source in data.of("train") for file in source.files],
        [weight for source in data.of("train") for weight in source.weights],
    )


def built(data, blend):
    """The train split as Megatron-LM builds it, with a tokenizer of its own and the order's indices."""
    config = GPTDatasetConfig(
        random_seed=7, sequence_length=16, blend_per_split=[blend, None, None], reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False, path_to_cache=None,
        tokenizer=NullTokenizer(data.vocabulary_size),
    )  # fmt: skip
    use_order(config, data.path)
    with joined("cpu"):
        return BlendedMegatronDatasetBuilder(GPTDataset, [STEPS * BATCH, 0, 0], lambda: True, config).build()[0]


@pytest.fixture
def dataset(data):
    """The train split of blend.json."""
    before = {path.name for path in Path(data.path, INDICES).iterdir()}
    found = built(data, blend_of(data))
    assert {path.name for path in Path(data.path, INDICES).iterdir()} == before
    return found


def train(dataset, data, folder, steps, replicas=1, shift=0, workers=0):
    """The steps of one run, by the replicas in turn, with the order in which Megatron's sampler gives rows."""
    for replica in range(replicas):
        recorder = ReadRecorder(
            dataset, data.path, str(folder), global_batch=BATCH, steps=STEPS, first_step=steps[0], replica=replica,
            replicas=replicas,
        )  # fmt: skip
        size = 3 // replicas if replicas == 3 else BATCH // 2 // replicas or 1
        numbers = range((steps[0] - 1) * BATCH + shift, steps[-1] * BATCH + shift)
        rows = [numbers[at : at + size] for at in range(0, len(numbers), size)][replica::replicas]
        loader = torch.utils.data.DataLoader(
            recorder.dataset, batch_sampler=[list(each) for each in rows], num_workers=workers,
            multiprocessing_context="spawn" if workers else None,  # a fork of the tests' many threads may not end well
        )  # fmt: skip
        for batch in recorder.watch(iter(loader)):
            assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids", "dataset_id"}


@pytest.mark.slow
def test_a_loop_that_reads_the_plan_is_proven(dataset, data, tmp_path):
    train(dataset, data, tmp_path, range(1, STEPS + 1), workers=1)
    proof = prove(str(tmp_path))
    assert (proof.steps, proof.problem) == (STEPS, None)


def test_restarts_with_other_numbers_of_replicas_are_proven(dataset, data, tmp_path):
    train(dataset, data, tmp_path, range(1, 8), replicas=3)
    train(dataset, data, tmp_path, range(5, 10))
    train(dataset, data, tmp_path, range(8, STEPS + 1), replicas=3)
    proof = prove(str(tmp_path))
    assert (proof.steps, proof.problem) == (STEPS, None)


@pytest.mark.parametrize(
    ("shift", "words"),
    [(BATCH, ": from its first sample on, it read what was planned for step 7"), (-1, "")],
    ids=["rows skipped by a restart", "rows read twice"],
)
def test_other_rows_after_a_restart_are_caught(dataset, data, tmp_path, shift, words):
    train(dataset, data, tmp_path, range(1, 6))
    train(dataset, data, tmp_path, range(6, STEPS), shift=shift)
    problem = prove(str(tmp_path)).problem
    assert problem is not None
    assert problem.startswith(f"step 6 did not read what was planned{words}")


def test_a_dataset_of_other_prefixes_is_refused(data, tmp_path):
    files, weights = blend_of(data)
    swapped = built(data, (files[::-1], weights[::-1]))
    with pytest.raises(InputError, match=rf"the dataset reads {files[-1]} where .*blend.json has {files[0]}; build it"):
        ReadRecorder(swapped, data.path, str(tmp_path), global_batch=BATCH, steps=STEPS)


@pytest.mark.parametrize(
    ("batch", "given", "words"),
    [
        (BATCH // 2, {"first_step": 3}, "another training was recorded here: global_batch was 6, now 3; choose"),
        (BATCH, {"replica": 0, "replicas": 4}, "replica=0, replicas=4, global_batch=6: give"),
        (BATCH, {"replica": 3, "replicas": 3}, "replica=3, replicas=3, global_batch=6: give"),
    ],
)
def test_a_record_that_cannot_be_is_refused(dataset, data, tmp_path, batch, given, words):
    train(dataset, data, tmp_path, range(1, 3))
    with pytest.raises(InputError, match=words):
        ReadRecorder(dataset, data.path, str(tmp_path), global_batch=batch, steps=STEPS, **given)


def test_data_with_a_budget_are_refused(dataset, tmp_path, vocabulary):
    blend = preparing.blend_of(preparing.write_lines(tmp_path / "a.jsonl", TEXTS))
    chosen = {"tokenizer": {"model": str(vocabulary)}, "holdout": {"valid": 0, "test": 0}}
    preparing.prepare({**blend, "tokens": 200}, tmp_path / "out", **chosen)
    with pytest.raises(InputError, match="has a budget, which only tokenmill train follows exactly"):
        ReadRecorder(dataset, str(tmp_path / "out"), str(tmp_path / "model"), global_batch=BATCH, steps=STEPS)


def without_last_lines(folder, cut):
    """Cut the record, as if its processes were still at work, or killed."""
    log = Path(folder, "reads-00000.jsonl")
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(cut(lines))


def test_a_step_that_some_replicas_have_not_read_yet_is_not_compared(dataset, data, tmp_path):
    train(dataset, data, tmp_path, range(1, 8), replicas=3)
    without_last_lines(tmp_path, lambda lines: b"".join(lines[:-1]))
    proof = prove(str(tmp_path))
    assert (proof.steps, proof.problem) == (6, None)


def test_a_restart_that_has_begun_a_step_does_not_hide_the_former_reads(dataset, data, tmp_path):
    train(dataset, data, tmp_path, range(1, 8))
    train(dataset, data, tmp_path, range(5, 6), replicas=3)
    without_last_lines(tmp_path, lambda lines: b"".join(lines[:-1]))
    proof = prove(str(tmp_path))
    assert (proof.steps, proof.problem) == (7, None)


def test_records_of_other_machines_are_missed(dataset, data, tmp_path):
    train(dataset, data, tmp_path, range(1, 2), replicas=3)
    without_last_lines(tmp_path, lambda lines: lines[0])
    with pytest.raises(InputError, match=r"no step of 6 samples is recorded whole; .* copy those of all machines"):
        prove(str(tmp_path))


def test_a_line_that_a_kill_has_cut_off_is_removed_by_the_restart(dataset, data, tmp_path):
    train(dataset, data, tmp_path, range(1, 8))
    without_last_lines(tmp_path, lambda lines: b"".join(lines)[:-9])
    train(dataset, data, tmp_path, range(7, STEPS + 1))
    proof = prove(str(tmp_path))
    assert (proof.steps, proof.problem) == (STEPS, None)
