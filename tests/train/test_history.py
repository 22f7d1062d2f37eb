"""The steps of a training, over all its starts: none is lost with who watched, and none is counted twice."""

import pytest
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.train.checkpoints import folder_of, write_facts
from tokenmill.tasks.train.events import Saved, Started, TrainStep, Validated
from tokenmill.tasks.train.history import METRICS, History, history_of, publish_training
from tokenmill.tasks.train.job import Job, TrainData
from tokenmill.tasks.train.settings import TrainSettings


def step(number, loss=None):
    return TrainStep(
        step=number, loss=loss or 10.0 - number, learning_rate=0.1, gradient_norm=1.0, tokens=64, loss_tokens=60,
        padding=0, seconds=0.5, waited=0.0, mfu=None, memory=1_000,
    )  # fmt: skip


def started(done):
    return Started(step=done, steps=8, parameters=100, device="cpu", processes=1, engine="transformers")


def watched(folder, *events):
    """A history of what was told, written down."""
    history = History(str(folder))
    for event in events:
        history.add(event)
    history.publish()
    return history


def checkpoint(folder, number, *told):
    write_facts(folder_of(str(folder), number), number, 1, told)


def test_history_round_trips(tmp_path):
    history = watched(tmp_path, started(0), step(1), Validated(step=1, loss=9.5), step(2), Saved(step=2, path="x"))
    found = history_of(str(tmp_path))
    assert (found.steps, found.validated) == (history.steps, history.validated)
    assert list(found.steps) == [1, 2]


def test_steps_that_were_done_again_count_once_with_the_last_word(tmp_path):
    watched(tmp_path, started(0), *map(step, range(1, 6)))
    found = history_of(str(tmp_path))
    found.add(started(3))
    assert list(found.steps) == [1, 2, 3]
    found.add(step(4, loss=2.5))
    assert found.steps[4].loss == 2.5


def test_what_who_watched_had_no_time_to_write_down_is_in_the_checkpoints(tmp_path):
    watched(tmp_path, started(0), *map(step, range(1, 4)), Validated(step=2, loss=9.0))
    checkpoint(tmp_path, 4, started(0), step(3), Validated(step=4, loss=8.0), step(4), Saved(step=2, path="x"))
    checkpoint(tmp_path, 8, *map(step, range(5, 9)))
    found = history_of(str(tmp_path))
    assert sorted(found.steps) == list(range(1, 9))
    assert found.validated == {2: Validated(step=2, loss=9.0), 4: Validated(step=4, loss=8.0)}


def test_history_precedes_checkpoint_records(tmp_path):
    watched(tmp_path, step(1, loss=3.0))
    checkpoint(tmp_path, 1, step(1, loss=4.0))
    assert history_of(str(tmp_path)).steps[1].loss == 3.0


@pytest.mark.parametrize("content", [b'{"event":"step"', b'{"event":"step","step":1}\n', b"\xff\n", b"[]\n"])
def test_a_damaged_file_is_named_with_the_remedy(tmp_path, content):
    (tmp_path / METRICS).write_bytes(content)
    with pytest.raises(InputError, match=r"metrics\.jsonl:[12]: damaged .* remove this line"):
        history_of(str(tmp_path))


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"step":4}', b'{"events":[{"event":"step","step":1}]}'])
def test_a_damaged_checkpoint_is_named(tmp_path, content):
    checkpoint(tmp_path, 4, step(4))
    (tmp_path / "checkpoints/step_00000004/checkpoint.json").write_bytes(content)
    with pytest.raises(InputError, match=r"step_00000004/checkpoint\.json"):
        history_of(str(tmp_path))


def test_the_first_and_the_last_loss_are_of_steps_that_were_trained_on(tmp_path):
    history = watched(tmp_path, *(step(number) for number in range(1, 5)))
    for left_out in (1, 4):
        history.steps[left_out] = step(left_out).model_copy(update={"loss": 0.0, "loss_tokens": 0})
    data = TrainData(
        path="/data", kind="pretrain", made_from="xxh3_128:1", tokenizer={}, fingerprint="sha256:1", vocabulary_size=8,
        eos=0, sources=[],
    )  # fmt: skip
    job = Job(settings=TrainSettings(), data=data, output_dir=str(tmp_path))
    record = publish_training(job, history, 1.0)
    assert (record["steps"], record["first_loss"], record["final_loss"]) == (4, 8.0, 7.0)
