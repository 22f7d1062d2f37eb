"""Training that goes on from a checkpoint is, bit by bit, training that was never interrupted."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.seal import unsealed
from tokenmill.tasks.train import checkpoints
from tokenmill.tasks.train.checkpoints import steps_in
from tokenmill.tasks.train.events import Saved
from tokenmill.tasks.train.training import Training, train
from xxhash import xxh3_128_hexdigest

from tests.shards.damage import flip
from tests.train.engines_in_turn import Progressions, engine_of, settings_of
from tests.train.training_runs import engines_in_turn, found

torch.set_num_threads(1)

PLAIN = {"engine": "plain", "steps": 8, "checkpoint_every": 4, "model": {"tied_embeddings": True}}


def plain(**settings):
    return {"settings": {**PLAIN, **settings}}


def trained(world, folder, keep=9, **settings):
    """Train from the newest checkpoint of a folder to the end; where that was, what was told, and the engine."""
    engine, told = engine_of(plain(**settings), world), []
    done = checkpoints.resume(engine, world, str(folder))
    training = Training(
        settings_of(plain(**settings)), engine, world, Progressions(), None, 1.0, None, told.append,
        lambda step: checkpoints.save(engine, world, str(folder), step, keep),
    )  # fmt: skip
    train(training, done)
    return done, told, engine


def figures(told):
    """Of each step all that does not depend on time."""
    return [
        (event.step, event.loss, event.gradient_norm, event.learning_rate) for event in told if event.event == "step"
    ]


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.slow
def test_checkpoints_are_reported_once_complete(world, tmp_path):
    _, told, _ = trained(world, tmp_path, steps=7, checkpoint_every=3)
    order = [(event.event, event.step) for event in told]
    assert [pair for pair in order if pair[0] == "saved"] == [("saved", 3), ("saved", 6), ("saved", 7)]
    assert order.index(("saved", 3)) == order.index(("step", 3)) + 1
    saved = next(event for event in told if event.event == "saved")
    assert saved == Saved(step=3, path=str(tmp_path / "checkpoints/step_00000003"))
    place = tmp_path / "checkpoints/step_00000003"
    facts = unsealed((place / "checkpoint.json").read_bytes())
    state = xxh3_128_hexdigest((place / "state.safetensors").read_bytes())
    assert facts == {
        "step": 3, "processes": 1, "events": [], "files": {"state.safetensors": state}, "volatile": {}
    }  # fmt: skip


@pytest.mark.slow
def test_a_checkpoint_with_a_flipped_bit_is_not_taken_up_and_the_one_before_is(world, tmp_path):
    _, whole, engine = trained(world, tmp_path)
    newest = tmp_path / "checkpoints/step_00000008"
    for file in sorted(newest.iterdir()):
        flip(file, file.stat().st_size * 2 // 3)
        with pytest.raises(InputError, match=rf"{file.name}: damaged; remove this checkpoint's folder"):
            checkpoints.resume(engine_of(plain(), world), world, str(tmp_path))
        flip(file, file.stat().st_size * 2 // 3)
    shutil.rmtree(newest)
    done, rest, resumed = trained(world, tmp_path)
    assert done == 4
    assert figures(rest) == figures(whole)[4:]
    assert_same_bits(resumed.weights(), engine.weights())


@pytest.mark.slow
def test_older_checkpoints_are_removed_when_the_new_one_is_there(world, tmp_path):
    trained(world, tmp_path, keep=2, checkpoint_every=2)
    assert names(tmp_path) == ["step_00000006", "step_00000008"]


@pytest.mark.slow
def test_incomplete_checkpoints_are_removed(world, tmp_path):
    """By a save that fails, and by a process that was killed."""

    class Full:
        def save(self, folder):
            (tmp_path / folder / "state.safetensors").write_bytes(b"half")
            raise OSError("no room")

    trained(world, tmp_path)
    with pytest.raises(OSError, match="no room"):
        checkpoints.save(Full(), world, str(tmp_path), 12, keep=1)
    assert names(tmp_path) == ["step_00000004", "step_00000008"]
    half = tmp_path / "checkpoints/.step_00000012.0123456789abcdef.tmp"
    half.mkdir()
    (half / "state.safetensors").write_bytes(b"half")
    done, told, _ = trained(world, tmp_path)
    assert (done, told) == (8, [])
    assert names(tmp_path) == ["step_00000004", "step_00000008"]


def test_only_named_checkpoints_count(tmp_path):
    assert steps_in(str(tmp_path)) == []
    for name in ("step_00000020", "step_123456789", "step_00000003", "step_1", "step_00000004.old", "notes"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert steps_in(str(tmp_path)) == [3, 20, 123456789]


def case(name, processes, **fields):
    settings = {"steps": 8, **fields.pop("settings", {})}
    return {"name": name, "what": "resume", "processes": processes, "settings": settings, **fields}


DISTRIBUTED = {"optimizer": {"distributed": True}}
RESUMED = [
    case("one", 1),
    case("in bfloat16", 1, precision="bfloat16"),
    case("tied, packed", 1, rows="packed", settings={"model": {"tied_embeddings": True}}),
    case("one, distributed optimizer", 1, settings=DISTRIBUTED),
    case("replicas", 2),
    case("replicas, distributed optimizer", 2, settings=DISTRIBUTED),
    case("replicas, distributed optimizer, bfloat16", 2, settings=DISTRIBUTED, precision="bfloat16"),
    case("tensor", 2, settings={"parallel": {"tensor": 2}}),
    case("pipeline", 2, settings={"parallel": {"pipeline": 2}}),
    case("pipeline, tied", 2, settings={"parallel": {"pipeline": 2}, "model": {"tied_embeddings": True}}),
]
TAKEN_OVER = [
    ("one", 2, {}),
    ("one, distributed optimizer", 2, DISTRIBUTED),
    ("one", 2, {"parallel": {"tensor": 2}}),
    ("one", 2, {"parallel": {"pipeline": 2}}),
    ("replicas", 1, {}),
    ("replicas, distributed optimizer", 1, DISTRIBUTED),
    ("tensor", 1, {}),
    ("tensor", 2, {}),
    ("pipeline", 1, {}),
]
"""Whose checkpoint is taken up, by how many processes, and how these are cut."""


def taker(number):
    giver, processes, settings = TAKEN_OVER[number]
    return case(f"taker {number}", processes, settings=settings) | {"from": giver}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    engines_in_turn(folder, RESUMED)
    engines_in_turn(folder, [taker(number) for number in range(len(TAKEN_OVER))])
    return folder


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", [each["name"] for each in RESUMED])
def test_engines_go_on_bit_by_bit(folder, name):
    known = found(folder, name)
    assert known["done"] == 4
    assert known["resumed"] == known["whole"][4:]
    assert_same_bits(weights(folder / name), weights(folder / name / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TAKEN_OVER)))
def test_a_checkpoint_is_taken_up_by_processes_that_are_cut_otherwise(folder, number):
    giver, name = TAKEN_OVER[number][0], f"taker {number}"
    losses, wanted = (
        [loss for loss, _, _ in steps] for steps in (found(folder, name)["resumed"], found(folder, giver)["whole"][4:])
    )
    assert losses == pytest.approx(wanted, abs=1e-5)
    for tensor, other in zip(weights(folder / name).values(), weights(folder / giver).values(), strict=True):
        assert torch.allclose(tensor, other, rtol=0, atol=1e-5)
