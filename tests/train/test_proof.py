"""What every step read is what was planned, or the first step and sample that differ are named."""

import re
from pathlib import Path

import numpy as np
import orjson
import pytest
from tokenmill.flows.cli import run
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.train.blocks import block_calls, hash_blocks
from tokenmill.tasks.train.engine import BatchShape, joined
from tokenmill.tasks.train.events import Saved, TrainStep, event_in
from tokenmill.tasks.train.history import METRICS, History
from tokenmill.tasks.train.job import JOB, Job, contents_of
from tokenmill.tasks.train.order import ORDER, followed_order, keep_order, make_order, read_order, sentence_on_order
from tokenmill.tasks.train.prepared import prepared_data
from tokenmill.tasks.train.proof import prove
from tokenmill.tasks.train.rows import PackedRows, document_rows, flat_packs, lay_out, layout_folder
from tokenmill.tasks.train.samples import step_digest, step_sums
from tokenmill.tasks.train.settings import OrderSettings, TrainSettings

from tests.train.small_data import packs, texts
from tests.train.test_order import here
from tests.train.training_runs import train, training

BATCH, STEPS = 6, 20
SETTINGS = TrainSettings(
    sequence_length=16, global_batch=BATCH, micro_batch=1, steps=STEPS, seed=7, max_epochs=None, validate_every=None
)
ORDERED = OrderSettings(sequence_length=16, global_batch=BATCH, steps=STEPS, seed=7)


@pytest.fixture(scope="module")
def data(tmp_path_factory, vocabulary):
    """Documents with an order."""
    found = prepared_data(texts(tmp_path_factory.mktemp("data"), vocabulary)[0])
    make_order(found, ORDERED, here)
    return found


def rows_of(job):
    with joined("cpu"):
        sizes, folder = (job.settings.steps * job.settings.global_batch, 0), f"{job.output_dir}/cache"
        return document_rows(job.data, job.settings.sequence_length, sizes, job.settings.seed, folder)[0]


def recorded(data, folder, settings=SETTINGS, shapes=((1, 1),), change=lambda numbers: numbers, rows=None):
    """A training's folder with the order of its data, as a recorder leaves it; each step is split over (replicas, rows per micro-batch) in turn.

    `change` turns the numbers of the rows to read into those that are read.
    """
    job = Job(settings=settings, data=data, output_dir=str(folder))
    keep_order(read_order(data.path), job.output_dir)
    Path(folder).mkdir(exist_ok=True)
    Path(folder, JOB).write_bytes(orjson.dumps(job.model_dump()))
    history, rows, batch = History(str(folder)), rows or rows_of(job), settings.global_batch
    for step in range(1, settings.steps + 1):
        replicas, size = shapes[step % len(shapes)]
        sums = []
        for replica in range(replicas):
            numbers = BatchShape(replica, replicas, size, batch // (replicas * size)).numbers(step - 1)
            reads = np.concatenate([rows.batch(change(each)).reads for each in numbers])
            sums.append(step_sums(reads, np.concatenate(numbers) % batch))
        history.add(
            TrainStep(
                step=step, loss=1.0, learning_rate=1.0, gradient_norm=1.0, tokens=1, loss_tokens=1, padding=0, seconds=1.0,
                waited=0.0, mfu=None, memory=1, read=step_digest(sums),
            )
        )  # fmt: skip
    history.publish()
    return str(folder)


def test_training_that_read_the_plan_is_proven_for_any_number_of_processes(data, tmp_path):
    proof = prove(recorded(data, tmp_path / "model", shapes=((1, 1), (2, 3), (3, 1), (1, 6))))
    assert (proof.problem, proof.steps) == (None, STEPS)
    assert proof.plan == f"{tmp_path}/model/{ORDER}"


def test_a_later_order_of_the_data_changes_no_proof(data, tmp_path):
    place = recorded(data, tmp_path / "model")
    own = Path(place, ORDER).read_bytes()
    make_order(data, ORDERED.model_copy(update={"seed": 9}), here)
    try:
        assert prove(place).problem is None
        keep_order(read_order(data.path), place)
        assert Path(place, ORDER).read_bytes() == own
    finally:
        make_order(data, ORDERED, here)


def test_a_run_in_its_own_order_is_proven_beside_an_order_for_a_different_run(data, tmp_path):
    other = SETTINGS.model_copy(update={"seed": 8})
    assert followed_order(data, other) is None
    place = recorded(data, tmp_path / "model", other)
    Path(place, ORDER).unlink()  # the trainer keeps only the order that it follows
    proof = prove(place)
    assert (proof.problem, proof.plan) == (None, f"{place}/{JOB}")


def swapped(data):
    """The trainer finds the files of two shards under each other's names."""
    a, b = (source for source in data.of("train"))
    sources = [
        a.model_copy(update={"contents": [b.contents[0], *a.contents[1:]]}),
        b.model_copy(update={"contents": [a.contents[0], *b.contents[1:]]}),
    ]
    return data.model_copy(update={"sources": sources, "made_from": "xxh3_128:0"})


def test_a_run_with_steps_of_a_different_size_reads_in_the_order_and_is_proven(data, tmp_path):
    other = SETTINGS.model_copy(update={"global_batch": 2 * BATCH, "steps": STEPS // 2})
    assert followed_order(data, other) is not None
    assert sentence_on_order(data, other)[0].endswith("its indices are used")
    proof = prove(recorded(data, tmp_path / "model", other))
    assert (proof.problem, proof.steps) == (None, STEPS // 2)
    wrong = recorded(
        data, tmp_path / "wrong", other, change=lambda numbers: [3 if n == 5 * BATCH else n for n in numbers]
    )
    assert "step 3 did not read its planned samples: sample 7 was to be" in prove(wrong).problem
    fewer = other.model_copy(update={"steps": STEPS // 2 - 1})
    assert "global_batch is 12 in the training run and 6 in the order" in sentence_on_order(data, fewer)[0]


NOT_PLANNED = "did not read its planned samples"
WRONG = {
    "another seed": ({"settings": SETTINGS.model_copy(update={"seed": 8})}, f"step 1 {NOT_PLANNED}: sample .* was to be .*seed is 8 in the training run and 7 in the order"),
    "a step skipped on resumption": (
        {"change": lambda numbers: [n if n < 8 * BATCH else n + BATCH for n in numbers]},
        f"step 9 {NOT_PLANNED}: from its first sample on, it read the samples planned for step 10$",
    ),
    "a single other sample": ({"change": lambda numbers: [n if n != 6 * BATCH - 1 else 3 for n in numbers]}, f"step 6 {NOT_PLANNED}: sample 6 was to be "),
    "two other samples": ({"change": lambda numbers: [3 if 5 * BATCH < n < 5 * BATCH + 3 else n for n in numbers]}, f"step 6 {NOT_PLANNED}: more than one of its samples differ$"),
    "the samples of steps in reverse": ({"change": lambda numbers: [n + BATCH - 1 - 2 * (n % BATCH) for n in numbers]}, f"step 1 {NOT_PLANNED}: its samples were read in a different order$"),
    "swapped shards": ({"data": swapped}, f"step 1 {NOT_PLANNED}: sample .*content is xxh3_128:0 in the training"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_the_first_step_that_read_something_else_is_named(data, tmp_path, what):
    changed, words = WRONG[what]
    given = changed.pop("data")(data) if "data" in changed else data
    problem = prove(recorded(given, tmp_path / "model", **changed)).problem
    assert problem is not None
    assert re.match(words, problem), problem


def test_a_step_without_a_record_is_named(data, tmp_path):
    place = recorded(data, tmp_path / "model")
    lines = Path(place, METRICS).read_bytes().splitlines(keepends=True)
    Path(place, METRICS).write_bytes(b"".join(lines[:4] + lines[5:]))
    assert prove(place).problem == "step 5 was skipped: not recorded"


def test_files_swapped_on_disk_end_in_a_sentence_and_nothing_is_left_of_them(tmp_path, vocabulary):
    data = prepared_data(texts(tmp_path, vocabulary)[0])
    (first, *_), (second, *_) = (source.files for source in data.of("train"))
    right = recorded(
        data, tmp_path / "right", rows=rows_of(Job(settings=SETTINGS, data=data, output_dir=f"{tmp_path}/a"))
    )

    def swap():
        for ending in ("bin", "idx"):
            Path(f"{first}.{ending}").rename(tmp_path / "kept")
            Path(f"{second}.{ending}").rename(f"{first}.{ending}")
            (tmp_path / "kept").rename(f"{second}.{ending}")

    make_order(data, ORDERED.model_copy(update={"steps": STEPS + 1}), here)
    swap()
    wrong = recorded(
        data, tmp_path / "wrong", rows=rows_of(Job(settings=SETTINGS, data=data, output_dir=f"{tmp_path}/b"))
    )
    for _ in range(2):
        try:
            assert prove(wrong).problem is not None
        except InputError as error:
            assert "do not fit the published files" in str(error)  # noqa: PT017 - one of two sentences
        swap()
    swap()
    assert prove(right).problem is None


def test_without_an_order_the_job_is_the_plan(data, tmp_path):
    elsewhere = data.model_copy(update={"path": str(tmp_path)})
    assert prove(recorded(elsewhere, tmp_path / "right")).problem is None
    place = recorded(elsewhere, tmp_path / "wrong", change=lambda numbers: [n if n < 60 else n - 60 for n in numbers])
    assert prove(place).problem == (
        "step 11 did not read its planned samples: from its first sample on, it read the samples planned for step 1"
    )


def test_indices_that_are_cut_off_are_named(data, tmp_path):
    place = recorded(data.model_copy(update={"path": str(tmp_path)}), tmp_path / "model")
    array = next(Path(place, "cache/indices").glob("*sample_index.npy"))
    array.write_bytes(array.read_bytes()[:-8])
    with pytest.raises(InputError, match=f"{place}/cache/indices: its arrays cannot be read .*; remove the folder"):
        prove(place)


def test_packs_are_proven_and_a_skipped_step_of_them_named(tmp_path, vocabulary):
    data = prepared_data(packs(tmp_path, vocabulary)[0])
    settings = SETTINGS.model_copy(update={"sequence_length": 64})

    def packed(folder):
        place = layout_folder(data, "train", f"{folder}/cache")
        lay_out([file for source in data.of("train") for file in source.files], place)
        return PackedRows(flat_packs(place), 64, 0, 7, " ".join(contents_of(data, "train")))

    right = recorded(data, tmp_path / "right", settings, rows=packed(tmp_path / "right"))
    assert prove(right).problem is None
    other = packed(tmp_path / "wrong")
    wrong = recorded(data, tmp_path / "wrong", settings, change=lambda n: [each + BATCH for each in n], rows=other)
    problem = prove(wrong).problem
    assert problem is not None
    assert "step 1 did not read its planned samples" in problem
    assert "step 2" in problem


def test_the_command_ends_with_1_for_a_model_that_read_something_else(data, tmp_path, capfd):
    right = recorded(data, tmp_path / "right")
    assert run(["verify", right]) == 0
    assert f'"steps":{STEPS}' in capfd.readouterr().out
    assert run(["verify", recorded(data, tmp_path / "wrong", change=lambda numbers: [n + 1 for n in numbers])]) == 1
    assert "step 1 did not read its planned samples" in capfd.readouterr().err


def test_folder_without_steps_is_rejected(data, tmp_path):
    job = Job(settings=SETTINGS, data=data, output_dir=str(tmp_path))
    (tmp_path / JOB).write_bytes(orjson.dumps(job.model_dump()))
    with pytest.raises(InputError, match="no steps here yet"):
        prove(str(tmp_path))


def killed_after(job, step, history):
    """Run a trainer until it has saved a step, and kill it."""
    with training(job) as running:
        for line in running.stdout:
            event = event_in(line)
            if event is not None:
                history.add(event)
            if isinstance(event, Saved) and event.step == step:
                return


@pytest.mark.slow
def test_training_killed_twice_and_resumed_by_two_processes_read_the_plan(data, tmp_path):
    settings = SETTINGS.model_copy(update={"checkpoint_every": 5})
    job = Job(settings=settings, data=data, output_dir=str(tmp_path))
    keep_order(followed_order(data, settings), job.output_dir)
    history = History(job.output_dir)
    killed_after(job, 5, history)
    killed_after(job, 10, history)
    ended = train(job, processes=2)
    assert (ended.started.step, ended.code) == (10, 0)
    for event in ended.events:
        history.add(event)
    history.publish()
    proof = prove(job.output_dir)
    assert (proof.steps, proof.problem) == (STEPS, None)
    assert not (tmp_path / "cache" / "indices").exists()


@pytest.mark.slow
def test_a_flipped_bit_stops_the_trainer_before_any_step_on_it(data, tmp_path):
    here("", hash_blocks, block_calls(data))
    settings = SETTINGS.model_copy(update={"check_reads": True})
    for ending in ("bin", "idx"):
        place = Path(f"{data.of('train')[0].files[0]}.{ending}")
        before = place.read_bytes()
        place.write_bytes(bytes([before[0] ^ 1]) + before[1:])
        try:
            ended = train(Job(settings=settings, data=data, output_dir=str(tmp_path / ending)))
        finally:
            place.write_bytes(before)
        assert ended.code == 2
        assert f"{place}: changed between bytes 0 and 65,536" in ended.reasons[0]
        assert not ended.losses
    assert train(Job(settings=settings, data=data, output_dir=str(tmp_path / "whole"))).code == 0
