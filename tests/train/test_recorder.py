"""A loop over megatron-core's own datasets, with a loader's processes, records what it reads."""

from pathlib import Path

import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from tokenmill.tasks.train.engine import joined
from tokenmill.tasks.train.order import INDICES
from tokenmill.tasks.train.ordering import make_order
from tokenmill.tasks.train.prepared import prepared_data
from tokenmill.tasks.train.proof import prove
from tokenmill.tasks.train.recorder import ReadRecorder, use_order
from tokenmill.tasks.train.settings import OrderSettings

from tests.preparing_sft import chat_vocabulary
from tests.train.small_data import texts
from tests.train.test_order import here

BATCH, STEPS = 6, 12


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    found = prepared_data(texts(folder, chat_vocabulary(folder))[0])
    make_order(found, OrderSettings(sequence_length=16, global_batch=BATCH, steps=STEPS, seed=7), here)
    return found


@pytest.fixture
def dataset(data):
    """The train split as Megatron-LM builds it from blend.json, with a tokenizer of its own and the order's indices."""
    blend = (
        [file for source in data.of("train") for file in source.files],
        [weight for source in data.of("train") for weight in source.weights],
    )
    config = GPTDatasetConfig(
        random_seed=7, sequence_length=16, blend_per_split=[blend, None, None], reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False, path_to_cache=None,
        tokenizer=NullTokenizer(data.vocabulary_size),
    )  # fmt: skip
    before = {path.name for path in Path(data.path, INDICES).iterdir()}
    use_order(config, data.path)
    with joined("cpu"):
        found = BlendedMegatronDatasetBuilder(GPTDataset, [STEPS * BATCH, 0, 0], lambda: True, config).build()[0]
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


def test_a_restart_that_skips_rows_is_caught(dataset, data, tmp_path):
    train(dataset, data, tmp_path, range(1, 6))
    train(dataset, data, tmp_path, range(6, STEPS), shift=BATCH)
    assert prove(str(tmp_path)).problem == (
        "step 6 did not read what was planned: from its first sample on, it read what was planned for step 7"
    )


def test_rows_read_twice_are_caught(dataset, data, tmp_path):
    train(dataset, data, tmp_path, range(1, 6))
    train(dataset, data, tmp_path, range(6, STEPS), shift=-1)
    problem = prove(str(tmp_path)).problem
    assert problem is not None
    assert problem.startswith("step 6 did not read what was planned")
