"""Whole trainings by the trainer: from what was prepared to a model that others read, and from that to the next."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenmill.tasks.score.models import CausalScorer
from tokenmill.tasks.score.nll import Completions
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from tokenmill.tasks.train.engine import joined
from tokenmill.tasks.train.events import Exported, Failed, Saved, Started, TrainStep
from tokenmill.tasks.train.job import Job
from tokenmill.tasks.train.prepared import prepared_data
from tokenmill.tasks.train.rows import PackedRows, TrainBatch, document_rows, flat_packs, lay_out
from tokenmill.tasks.train.settings import TrainSettings
from tokenmill.tasks.train.training import learning_rate
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.preparing_sft import CHATML
from tests.tokenize.small_vocabularies import EOS
from tests.train.engines_in_turn import alone
from tests.train.small_data import TALKS, packs, texts
from tests.train.training_runs import train

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

EXACT = 1e-5
MODEL = {"layers": 2, "hidden": 32, "heads": 4, "key_value_heads": 2, "feed_forward": 64}
SEED = 7
PACK = 160


@pytest.fixture(scope="module")
def documents(tmp_path_factory, vocabulary):
    return prepared_data(texts(tmp_path_factory.mktemp("texts"), vocabulary)[0])


@pytest.fixture(scope="module")
def packed(tmp_path_factory, vocabulary):
    return prepared_data(packs(tmp_path_factory.mktemp("packs"), vocabulary, pack_size=PACK)[0])


def job(data, folder, **settings):
    chosen = {
        "model": MODEL, "sequence_length": 48, "global_batch": 8, "micro_batch": 2, "steps": 10, "seed": SEED,
        "device": "cpu", "validation_batches": 2, "max_epochs": None, **settings,
    }  # fmt: skip
    return Job(settings=TrainSettings.model_validate(chosen), data=data, output_dir=str(folder))


@pytest.fixture(scope="module")
def pretraining(documents, tmp_path_factory):
    """megatron-core, on documents; the job and what it told."""
    asked = job(
        documents, tmp_path_factory.mktemp("pretraining"), validate_every=4, checkpoint_every=5,
        optimizer={"warmup_steps": 2, "distributed": True},
    )  # fmt: skip
    return asked, train(asked)


@pytest.fixture(scope="module")
def finetuning(packed, pretraining, tmp_path_factory):
    """On packs, from what was pretrained: the job of that, its own, and what it told."""
    asked = job(
        packed, tmp_path_factory.mktemp("finetuning"), start_from=pretraining[0].output_dir,
        sequence_length=PACK, steps=6, validate_every=6,
    )  # fmt: skip
    return pretraining[0], asked, train(asked)


@pytest.fixture(scope="module")
def other(packed, pretraining, tmp_path_factory):
    """The same with two processes that share each matrix; from the folder of a model."""
    before = pretraining[0]
    asked = job(
        packed, tmp_path_factory.mktemp("after"), start_from=f"{before.output_dir}/model", sequence_length=PACK, steps=6,
        validate_every=6, parallel={"tensor": 2},
    )  # fmt: skip
    return before, asked, train(asked, processes=2)


def document_batches(asked, folder):
    """The rows of both splits, as the trainer reads them."""
    settings = asked.settings
    sizes = (settings.steps * settings.global_batch, settings.validation_batches * settings.global_batch)
    with joined("cpu"):
        return document_rows(asked.data, settings.sequence_length, sizes, settings.seed, str(folder))


def pack_rows(asked, split, folder):
    lay_out([file for source in asked.data.of(split) for file in source.files], str(folder / split))
    return PackedRows(
        flat_packs(str(folder / split)), asked.settings.sequence_length, asked.data.eos, asked.settings.seed
    )


def scored(model, batch):
    """The mean NLL, by the scorer, of what is trained on in a batch: rows of one sequence each."""
    model.config.max_position_embeddings = batch.tokens.shape[1] + 1  # so that the last label is scored, too
    ids = np.concatenate([batch.tokens, batch.labels[:, -1:]], 1)
    loss = np.concatenate([np.zeros((len(ids), 1), bool), batch.loss_mask], 1)
    offsets = np.arange(len(ids) + 1) * ids.shape[1]
    flat = Completions(ids.ravel().astype(np.int32), offsets, loss.ravel().astype(np.int8), np.zeros(ids.size, np.int8))
    table = CausalScorer(model).score(flat)
    return sum(table["nll_sum"].to_pylist()) / sum(table["completion_token_count"].to_pylist())


def exported(asked):
    return AutoModelForCausalLM.from_pretrained(f"{asked.output_dir}/model", local_files_only=True).eval()


def test_training_events_are_in_order(pretraining):
    asked, ended = pretraining
    assert ended.code == 0
    told = [(event.event, getattr(event, "step", None)) for event in ended.events]
    steps = [("step", step) for step in range(1, 11)]
    steps[10:10] = [("validated", 10), ("saved", 10)]
    steps[8:8] = [("validated", 8)]
    steps[5:5] = [("saved", 5)]
    steps[4:4] = [("validated", 4)]
    assert told == [("started", 0), *steps, ("exported", None)]
    assert ended.of(Exported) == [Exported(path=f"{asked.output_dir}/model")]
    assert [event.path for event in ended.of(Saved)] == [
        f"{asked.output_dir}/checkpoints/step_{step:08d}" for step in (5, 10)
    ]


def test_start_event_matches_the_training_run(pretraining):
    asked, ended = pretraining
    assert ended.started == Started(
        step=0, steps=10, parameters=sum(each.numel() for each in exported(asked).parameters()), device="cpu",
        processes=1, engine="megatron-core",
    )  # fmt: skip


def test_steps_count_read_and_trained_tokens(pretraining):
    asked, ended = pretraining
    for event in ended.of(TrainStep):
        assert (event.tokens, event.loss_tokens, event.padding) == (8 * 48, 8 * 48, 0)
        assert event.learning_rate == learning_rate(event.step, 10, asked.settings.optimizer)
        assert event.mfu is None
        assert event.memory > 100_000_000
        assert 0 <= event.waited <= event.seconds
        assert event.gradient_norm > 0


def test_the_loss_falls(pretraining, finetuning):
    for ended in (pretraining[1], finetuning[2]):
        losses = list(ended.losses.values())
        assert losses[-1] < losses[0] - 0.2


def test_the_exported_model_scores_held_out_rows_as_the_trainer_did(pretraining, tmp_path):
    asked, ended = pretraining
    _, valid = document_batches(asked, tmp_path)
    assert scored(exported(asked), valid.batch(range(16))) == pytest.approx(ended.validated[10], abs=EXACT)


def sequences_of(batch):
    """The sequences of packs, as rows of one sequence each."""
    rows = alone(batch)
    return TrainBatch(
        *(np.concatenate([getattr(row, name) for row in rows]) for name in ("tokens", "labels", "loss_mask")), None
    )


@pytest.fixture(params=["other", "finetuning"])
def finetuned(request):
    """The job that weights came from, the one that began with them, and what that told."""
    return request.getfixturevalue(request.param)


def test_first_loss_is_of_the_initial_weights(finetuned, tmp_path):
    before, asked, ended = finetuned
    batch = sequences_of(pack_rows(asked, "train", tmp_path).batch(range(8)))
    assert len(batch.tokens) > 16
    assert scored(exported(before), batch) == pytest.approx(ended.losses[1], abs=EXACT)


def test_the_exported_model_scores_held_out_packs_as_the_trainer_did(finetuned, tmp_path):
    _, asked, ended = finetuned
    batch = sequences_of(pack_rows(asked, "valid", tmp_path).batch(range(16)))
    assert scored(exported(asked), batch) == pytest.approx(ended.validated[6], abs=EXACT)


def test_padding_and_trained_tokens_are_counted(finetuned, tmp_path):
    _, asked, ended = finetuned
    rows = pack_rows(asked, "train", tmp_path)
    for event in ended.of(TrainStep):
        batch = rows.batch(range(8 * (event.step - 1), 8 * event.step))
        assert (event.tokens, event.loss_tokens, event.padding) == (8 * PACK, batch.loss_mask.sum(), batch.padding)
    assert any(event.padding for event in ended.of(TrainStep))


def test_the_tokenizer_of_the_data_is_exported_with_the_model(pretraining, finetuned, vocabulary):
    known = find_vocabulary(TokenizerSource(model=str(vocabulary)))
    for asked in (pretraining[0], finetuned[1]):
        tokenizer = AutoTokenizer.from_pretrained(f"{asked.output_dir}/model", local_files_only=True)
        column = pa.array(["A text, é 中 \U0001f600 of  many\n kinds.", f"{EOS} as text"])
        assert tokenizer(column.to_pylist(), split_special_tokens=True).input_ids == [
            known.reference(True).encode(column).ids[begin:end].tolist()
            for begin, end in itertools.pairwise(known.reference(True).encode(column).offsets.tolist())
        ]
        assert (tokenizer.eos_token, tokenizer.eos_token_id) == (EOS, known.eos)
        assert exported(asked).config.eos_token_id == known.eos


def test_the_template_that_was_trained_with_is_exported(finetuned, vocabulary):
    tokenizer = AutoTokenizer.from_pretrained(f"{finetuned[1].output_dir}/model", local_files_only=True)
    assert tokenizer.chat_template == CHATML
    said = tokenizer.apply_chat_template(TALKS[0]["messages"], tokenize=False)
    assert said == "<|im_start|>user\nQuestion 0?<|im_end|>\n<|im_start|>assistant\nAnswer 0, and so on.<|im_end|>\n"


def test_nan_loss_ends_all_processes(documents, tmp_path):
    ended = train(job(documents, tmp_path, optimizer={"learning_rate": 1e30}), processes=2)
    assert ended.code == 1
    assert list(ended.losses) == [1]
    assert ended.of(Exported) == []
    assert all("step 2: the loss is" in reason for reason in ended.reasons)
    assert {event.wrong_call for event in ended.of(Failed)} == {False}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_job_with_an_input_error_is_reported(documents, tmp_path):
    ended = train(job(documents, tmp_path, device="cuda"))
    assert ended.code == 2
    assert ended.events == [
        Failed(
            reason="device=cuda: this machine doesn't have a GPU; set device=cpu, or train where there is one",
            wrong_call=True,
        )
    ]


def test_training_that_is_done_is_exported_again_and_nothing_else(finetuning):
    _, asked, _ = finetuning
    before = LlamaForCausalLM.from_pretrained(f"{asked.output_dir}/model").state_dict()
    again = train(asked)
    assert (again.code, again.started.step, again.losses) == (0, 6, {})
    after = LlamaForCausalLM.from_pretrained(f"{asked.output_dir}/model").state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
