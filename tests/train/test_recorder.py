"""A loop over megatron-core's own datasets, with a loader's processes, records what it reads."""

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import torch
from megatron.core import num_microbatches_calculator
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.train.engine import joined
from tokenmill.tasks.train.launchers import launch_of
from tokenmill.tasks.train.launchers.launch import write_files
from tokenmill.tasks.train.order import INDICES, make_order, with_quotas
from tokenmill.tasks.train.preflight import plan_training
from tokenmill.tasks.train.prepared import prepared_data
from tokenmill.tasks.train.proof import prove
from tokenmill.tasks.train.recorder import ReadRecorder, use_order
from tokenmill.tasks.train.settings import OrderPlan, OrderSettings, TrainSettings

from tests import preparing
from tests.flows.cloning import REPOSITORY
from tests.peers import megatron_in_turn
from tests.preparing_sft import chat_vocabulary
from tests.train.small_data import TEXTS, texts
from tests.train.test_order import here

BATCH, STEPS = 6, 12
ORDER = OrderSettings(
    sequence_length=16, global_batch=BATCH, steps=STEPS, seed=7, validate_every=5, validation_batches=2
)
MEGATRON_LM = (STEPS * BATCH, 3 * 2 * BATCH, 2 * BATCH)
"""The samples of train, valid and test that Megatron-LM asks for with these settings: it validates after steps 5, 10 and 12."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    found = prepared_data(texts(folder, chat_vocabulary(folder), holdout={"valid": 0.2, "test": 0.1})[0])
    make_order(found, ORDER, here)
    return found


def blend_of(data, split="train"):
    """The prefixes and weights of a split, as in blend.json."""
    return (
        [file for source in data.of(split) for file in source.files],
        [weight for source in data.of(split) for weight in source.weights],
    )


def configured(data, cache, blends, **changed):
    """The configuration of Megatron-LM, with a tokenizer of its own."""
    return GPTDatasetConfig(
        blend_per_split=blends, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, path_to_cache=cache and str(cache), tokenizer=NullTokenizer(data.vocabulary_size),
        **{"random_seed": 7, "sequence_length": 16, **changed},
    )  # fmt: skip


def built(config, sizes=(STEPS * BATCH, 0, 0)):
    with joined("cpu"):
        return BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, config).build()


def names_in(folder):
    return {path.name for path in Path(folder).iterdir()}


@pytest.fixture(scope="module")
def dataset(data, tmp_path_factory):
    """The train split of blend.json."""
    config = configured(data, tmp_path_factory.mktemp("cache"), [blend_of(data), None, None])
    use_order(config, data.path)
    return built(config)[0]


def test_all_splits_find_their_indices_and_others_go_to_the_cache_of_the_training_run(data, tmp_path):
    prepared = names_in(Path(data.path, INDICES))
    blends = [blend_of(data, split) for split in ("train", "valid", "test")]
    config = configured(data, tmp_path, blends)
    use_order(config, data.path)
    built(config, MEGATRON_LM)
    assert names_in(tmp_path) == names_in(Path(data.path, INDICES)) == prepared
    other = configured(data, tmp_path, blends, random_seed=8)
    use_order(other, data.path)
    built(other, MEGATRON_LM)
    assert len(names_in(tmp_path)) > len(prepared)
    assert names_in(Path(data.path, INDICES)) == prepared


@pytest.mark.parametrize("cache", [None, "s3://bucket/cache"])
def test_cache_outside_the_run_is_rejected(data, cache):
    with pytest.raises(InputError, match=f"path_to_cache={cache}: .*--data-cache-path"):
        use_order(configured(data, cache, [blend_of(data), None, None]), data.path)


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
    [(BATCH, "was skipped: not recorded"), (-1, "did not read its planned samples")],
    ids=["rows skipped by a restart", "rows read twice"],
)
def test_other_rows_after_a_restart_are_caught(dataset, data, tmp_path, shift, words):
    train(dataset, data, tmp_path, range(1, 6))
    train(dataset, data, tmp_path, range(6, STEPS), shift=shift)
    problem = prove(str(tmp_path)).problem
    assert problem is not None
    assert problem.startswith(f"step 6 {words}")


@pytest.mark.parametrize("seen", [True, False])
def test_a_step_that_the_trainer_skips_is_recorded_so(dataset, data, tmp_path, seen):
    """Megatron-LM takes the batches of --iterations-to-skip from the loader, past the function that a script may watch."""
    for replica in (0, 1):
        recorder = ReadRecorder(
            dataset,
            data.path,
            str(tmp_path),
            global_batch=BATCH,
            steps=STEPS,
            skipped=[5, 7],
            replica=replica,
            replicas=2,
        )
        for step in range(1, STEPS + 1):
            if seen or step not in {5, 7}:
                recorder.add([(step - 1) * BATCH + row for row in range(replica, BATCH, 2)])
    proof = prove(str(tmp_path))
    assert (proof.steps, proof.skipped, proof.problem) == (STEPS - 2, [5, 7], None)


def test_growing_batch_size_is_rejected(dataset, data, tmp_path):
    num_microbatches_calculator.init_num_microbatches_calculator(0, [2, 2, 12], BATCH, 1, 1, False)
    try:
        with pytest.raises(InputError, match=r"--rampup-batch-size.*give one --global-batch-size"):
            ReadRecorder(dataset, data.path, str(tmp_path), global_batch=BATCH, steps=STEPS)
    finally:
        num_microbatches_calculator.unset_num_microbatches_calculator()


def test_dataset_of_foreign_prefixes_is_rejected(data, tmp_path):
    files, weights = blend_of(data)
    swapped = built(configured(data, tmp_path / "cache", [(files[::-1], weights[::-1]), None, None]))[0]
    with pytest.raises(InputError, match=rf"the dataset reads {files[-1]} where .*blend.json has {files[0]}; build it"):
        ReadRecorder(swapped, data.path, str(tmp_path), global_batch=BATCH, steps=STEPS)


@pytest.mark.parametrize(
    ("batch", "given", "words"),
    [
        (
            BATCH // 2,
            {"first_step": 3},
            "a different training run was recorded here: global_batch was 6, now 3; choose",
        ),
        (BATCH, {"replica": 0, "replicas": 4}, "replica=0, replicas=4, global_batch=6: give"),
        (BATCH, {"replica": 3, "replicas": 3}, "replica=3, replicas=3, global_batch=6: give"),
    ],
)
def test_impossible_record_is_rejected(dataset, data, tmp_path, batch, given, words):
    train(dataset, data, tmp_path, range(1, 3))
    with pytest.raises(InputError, match=words):
        ReadRecorder(dataset, data.path, str(tmp_path), global_batch=batch, steps=STEPS, **given)


def test_data_with_a_budget_is_rejected(dataset, tmp_path, vocabulary):
    blend = preparing.blend_of(preparing.write_lines(tmp_path / "a.jsonl", TEXTS))
    chosen = {"tokenizer": {"model": str(vocabulary)}, "holdout": {"valid": 0, "test": 0}}
    preparing.prepare({**blend, "tokens": 200}, tmp_path / "out", **chosen)
    with pytest.raises(InputError, match="has a budget, which only tokenmill train follows exactly"):
        ReadRecorder(dataset, str(tmp_path / "out"), str(tmp_path / "model"), global_batch=BATCH, steps=STEPS)


def test_phases_that_a_launcher_starts_one_by_one_are_proven(tmp_path):
    blend = preparing.blend_of(preparing.write_lines(tmp_path / "a.jsonl", TEXTS))
    phases = {"tokens": 1500, "phases": [{"name": "main", "share": 0.6}, {"name": "end", "share": 0.4}]}
    tokenizer = {"model": str(chat_vocabulary(tmp_path))}
    preparing.prepare({**blend, **phases}, tmp_path / "out", tokenizer=tokenizer, holdout={"valid": 0, "test": 0})
    data = with_quotas(prepared_data(str(tmp_path / "out")), 16, BATCH)
    begin, steps = 0, sum(phase.samples for phase in data.phases) // BATCH
    for number, phase in enumerate(data.phases):
        config = configured(data, tmp_path / "cache", [blend_of(data.in_phase(number)), None, None])
        recorder = ReadRecorder(
            built(config, (phase.samples, 0, 0))[0], data, str(tmp_path / "model"), global_batch=BATCH, steps=steps,
            first_step=begin // BATCH + 1,
        )  # fmt: skip
        recorder.add([recorder.dataset[row]["sample_number"] for row in range(phase.samples)])
        begin += phase.samples
    proof = prove(str(tmp_path / "model"))
    assert (proof.steps, proof.problem) == (steps, None)


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


def test_missing_records_from_other_machines_are_reported(dataset, data, tmp_path):
    train(dataset, data, tmp_path, range(1, 2), replicas=3)
    without_last_lines(tmp_path, lambda lines: lines[0])
    with pytest.raises(InputError, match=r"no step of 6 samples is recorded whole; .* copy the files of all machines"):
        prove(str(tmp_path))


def test_a_line_that_a_kill_has_cut_off_is_removed_by_the_restart(dataset, data, tmp_path):
    train(dataset, data, tmp_path, range(1, 8))
    without_last_lines(tmp_path, lambda lines: b"".join(lines)[:-9])
    train(dataset, data, tmp_path, range(7, STEPS + 1))
    proof = prove(str(tmp_path))
    assert (proof.steps, proof.problem) == (STEPS, None)


def test_files_next_to_the_blend_suit_megatron_lm(data, tmp_path):
    sequences, full = (
        orjson.loads(Path(data.path, f"blend.{name}.json").read_bytes()) for name in ("sequences", "full-validation")
    )
    for prefix, counts in sequences.items():
        index = IndexedDataset(prefix).index
        assert counts == [index.sequence_count, index.document_count]
    assert sequences.keys() == {file for source in data.sources for file in source.files}
    blends = [blend_of(data), (full["valid"], None), full["test"]]
    config = configured(data, tmp_path, blends, full_validation=True, multiple_validation_sets=True)
    _, valid, _ = built(config, (STEPS * BATCH, None, None))
    assert [each.dataset_path for each in valid] == blend_of(data, "valid")[0]
    assert full["train"] == orjson.loads(Path(data.path, "blend.json").read_bytes())["train"]


@pytest.mark.weekly
def test_two_processes_of_megatron_lm_build_no_index_and_are_proven(tmp_path):
    """By a script that knows nothing of tokenmill."""
    plan = {**ORDER.model_dump(include=set(OrderPlan.model_fields)), "global_batch": 8}
    out, _ = texts(tmp_path, chat_vocabulary(tmp_path), holdout={"valid": 0.2, "test": 0.1})
    make_order(prepared_data(out), OrderSettings(**plan), here)
    settings = TrainSettings(**plan, micro_batch=2, launcher="megatron-lm", precision="float32")
    model, before = tmp_path / "model", sorted(Path(out).rglob("*"))
    write_files(launch_of(plan_training(out, settings, str(model)), 2), str(model))
    megatron_lm = Path(megatron_in_turn.__file__).parent / "megatron_lm"
    environment = {
        "MEGATRON_LM": str(megatron_lm), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    subprocess.run(["bash", model / "train.sh"], env={**os.environ, **environment}, check=True)
    proof = prove(str(model))
    assert (proof.steps, proof.problem, proof.plan) == (12, None, f"{model}/order.json")
    assert names_in(model / "cache") == names_in(Path(out, INDICES))
    assert sorted(Path(out).rglob("*")) == before
