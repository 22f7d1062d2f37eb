"""The engine, split over processes in every way, computes what plain PyTorch does."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.train.engine import BatchShape
from tokenmill.tasks.train.training import Training, train
from transformers import LlamaForCausalLM

from tests.train.engines_in_turn import VOCABULARY, Progressions, engine_of, settings_of
from tests.train.training_runs import engines_in_turn, found

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

EXACT = 1e-5
"""How far figures may be from each other that are the same but for the order of additions."""

PLAIN = {"engine": "plain"}
TIED = {"model": {"key_value_heads": 4, "tied_embeddings": True}}
DISTRIBUTED = {"optimizer": {"distributed": True}}
TENSOR, PIPELINE = ({"parallel": {name: 2}} for name in ("tensor", "pipeline"))


def case(name, *settings, **fields):
    return {"name": name, "settings": {key: value for each in settings for key, value in each.items()}, **fields}


ONE = [
    case("plain", PLAIN),
    case("plain tied", PLAIN, TIED),
    case("plain packed", PLAIN, rows="packed"),
    case("megatron"),
    case("megatron tied", TIED),
    case("megatron packed", rows="packed"),
    case("megatron alone", rows="alone"),
    case("megatron isolated", what="isolate"),
    case("row by row", {"micro_batch": 1}),
    case("at once", {"micro_batch": 4}),
    case("in bfloat16", precision="bfloat16"),
]


def shared(name, *settings, **fields):
    return case(name, *settings, processes=2, **fields)


TWO = [
    shared("replicas"),
    shared("replicas, packed", rows="packed"),
    shared("replicas, distributed optimizer", DISTRIBUTED),
    shared("replicas, distributed optimizer, packed", DISTRIBUTED, rows="packed"),
    shared("tensor", TENSOR),
    shared("tensor, tied", TENSOR, TIED),
    shared("tensor, packed", TENSOR, rows="packed"),
    shared("pipeline", PIPELINE),
    shared("pipeline, tied", PIPELINE, TIED),
    shared("pipeline, packed", PIPELINE, rows="packed"),
]


def alone_case(name):
    """The case of one process that a case of two must equal."""
    return "megatron" + next((f" {word}" for word in ("tied", "packed") if name.endswith(word)), "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What all engines have found."""
    folder = tmp_path_factory.mktemp("engines")
    engines_in_turn(folder, [*ONE, *TWO])
    return folder


def trajectory(folder, name):
    """The loss and the gradient's norm of each step, and the loss afterwards."""
    known = found(folder, name)
    return np.array([figure for loss, _, norm in known["steps"] for figure in (loss, norm)] + [known["after"]])


def weights(folder, name):
    return load_file(folder / name / "model" / "model.safetensors")


def assert_same(folder, one, other):
    assert trajectory(folder, one) == pytest.approx(trajectory(folder, other), abs=EXACT)
    assert [tokens for _, tokens, _ in found(folder, one)["steps"]] == [
        tokens for _, tokens, _ in found(folder, other)["steps"]
    ]
    left, right = weights(folder, one), weights(folder, other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.allclose(tensor, right[name], rtol=0, atol=EXACT), name


@pytest.mark.parametrize("kind", ["", " tied", " packed"])
def test_both_engines_train_alike(folder, kind):
    assert_same(folder, f"megatron{kind}", f"plain{kind}")
    losses = [loss for loss, _, _ in found(folder, f"megatron{kind}")["steps"]]
    assert losses[0] == pytest.approx(math.log(VOCABULARY + 56), abs=0.1)  # nothing is known, of so many rows
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", [each["name"] for each in TWO])
def test_two_processes_train_as_one_does(folder, name):
    assert_same(folder, name, alone_case(name))


def test_packs_train_like_separate_sequences(folder):
    assert_same(folder, "megatron packed", "megatron alone")


def test_sequences_of_a_pack_do_not_see_each_other(folder):
    known = found(folder, "megatron isolated")
    assert known["sequences"] > 1
    assert known["apart"][0] == known["apart"][1]
    assert abs(known["together"][0] - known["together"][1]) > 1e-4


@pytest.mark.parametrize("name", ["row by row", "at once"])
def test_micro_batches_change_nothing(folder, name):
    assert_same(folder, name, "megatron")


def test_bfloat16_is_near_float32_and_exported(folder):
    difference = np.abs(trajectory(folder, "in bfloat16") - trajectory(folder, "megatron"))
    assert 0 < difference.max() < 0.05
    assert {tensor.dtype for tensor in weights(folder, "in bfloat16").values()} == {torch.bfloat16}
    assert LlamaForCausalLM.from_pretrained(folder / "in bfloat16/model").dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["megatron", "megatron tied"])
def test_exported_model_matches_the_trained_one(folder, name):
    model = LlamaForCausalLM.from_pretrained(folder / name / "model")
    tokens = torch.from_numpy(Progressions().batch([999]).tokens)
    with torch.inference_mode():
        said = model(tokens).logits[0]
    assert torch.allclose(said, torch.tensor(found(folder, name)["logits"]), rtol=0, atol=EXACT)


def test_every_row_of_a_global_batch_is_read_once_in_any_shape():
    for replicas, micro_batch, accumulated in [(1, 1, 8), (2, 2, 2), (4, 2, 1), (8, 1, 1), (2, 1, 4)]:
        for step in range(3):
            shapes = [BatchShape(replica, replicas, micro_batch, accumulated) for replica in range(replicas)]
            numbers = [number for shape in shapes for turn in shape.numbers(step) for number in turn]
            assert sorted(numbers) == list(range(8 * step, 8 * step + 8))


def test_nan_loss_ends_training_and_names_the_step(world):
    broken, said = case("broken", PLAIN, {"optimizer": {"learning_rate": 1e30, "warmup_steps": 0}}), []
    engine, settings = engine_of(broken, world), settings_of(broken)
    training = Training(settings, engine, world, Progressions(), None, 1.0, None, said.append, lambda step: "")
    with pytest.raises(RunError, match=r"step 2: the loss is .*nan.* lower optimizer\.learning_rate"):
        train(training, 0)
    assert [event.step for event in said] == [1]
