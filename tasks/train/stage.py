"""The front door of the room: check, train, evaluate, as Prefect tasks.

Training and evaluation are processes, started here and watched; this process never imports torch. A training that died is
started again and goes on from its checkpoint, and one that says what has to be mended is not. Cancelling the flow run ends
the process and all that it has started. The loss, tokens per second, MFU and memory of the last steps stand in a table of the
flow run while it trains.
"""

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast
from uuid import UUID

import orjson
from prefect import Task, get_run_logger, task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.tasks import exponential_backoff

from tasks.errors import InputError
from tasks.shards.publish import publish_bytes
from tasks.shards.store import read_bytes
from tasks.storage import absolute, join
from tasks.train.evaluation import REQUEST, Evaluation
from tasks.train.evaluation_settings import EvaluateSettings
from tasks.train.events import Event, Saved, Started, Step, Validated
from tasks.train.history import (
    History,
    ended_training,
    history_of,
    made_from,
    publish_training,
    read_training,
    training_record,
)
from tasks.train.job import JOB, MODEL, Job
from tasks.train.launch import run
from tasks.train.launchers import launch_of
from tasks.train.launchers.evaluation import evaluation_launch
from tasks.train.launchers.launch import Launch
from tasks.train.launchers.nemo_rl import rl_launch
from tasks.train.planning import plan_training
from tasks.train.preflight import check
from tasks.train.processes import process_count
from tasks.train.progress import TrainingProgress
from tasks.train.results import artifact_record, markdown, read_results
from tasks.train.settings import TrainSettings
from tasks.train.start_check import job_of

SHOWN_STEPS = 20
REFRESH_SECONDS = 5.0


def worth_another_try(_task: object, _run: object, state: State[Any]) -> bool:
    """Whether a training that failed is started again: unless it said that something must be mended first."""
    return not isinstance(state.result(raise_on_failure=False), InputError)


@task(name="check", cache_policy=NO_CACHE, persist_result=False)
def checked_job(data: str, settings: TrainSettings, output_dir: str) -> Job:
    """The job, once everything about it that can be checked beforehand is."""
    job = plan_training(data, settings, output_dir)
    for line in check(job):
        get_run_logger().info(line)
    return job


def train_task(job: Job) -> "Task[..., dict[str, Any]]":
    """The task that trains, with as many retries as the job asks for."""
    return train.with_options(retries=job.settings.retries)


@task(
    name="train",
    cache_policy=NO_CACHE,
    persist_result=False,
    retry_delay_seconds=exponential_backoff(2),
    retry_condition_fn=worth_another_try,
)
def train(job: Job) -> dict[str, Any]:
    """Run a job's training to its end, from its last checkpoint on; the artifact record.

    One that has ended is not run again. Where the launcher only writes files for another trainer, they are written, and the
    command is told.
    """
    ended = ended_training(job.output_dir)
    if ended is not None:
        get_run_logger().info("%s: this training has ended before", job.output_dir)
        return training_record(ended, job.output_dir)
    launch = launch_of(job, process_count(job.settings))
    publish_bytes(join(job.output_dir, JOB), orjson.dumps(job.model_dump(), option=orjson.OPT_INDENT_2))
    write_files(job.output_dir, launch)
    if not launch.runs:
        return handed_over(job.output_dir, launch, made_from(job))
    watched, began = _Watched(job, history_of(job.output_dir)), time.time()
    try:
        with watched.progress:
            run(launch, watched.hear, get_run_logger().info)
    finally:
        watched.history.publish()
    record = publish_training(job, watched.history, time.time() - began)
    watched.leave()
    return training_record(record, job.output_dir)


@task(name="hand-over", cache_policy=NO_CACHE, persist_result=False)
def hand_over_rl(data: str, settings: TrainSettings, output_dir: str) -> dict[str, Any]:
    """Write what NeMo-RL needs to train on rows for reinforcement learning; the artifact record, of absolute places.

    Errors as in `rl_launch`.
    """
    launch, place = rl_launch(data, settings, output_dir), absolute(output_dir)
    write_files(place, launch)
    return handed_over(place, launch, [{"type": "rl", "path": absolute(data)}])


def write_files(output_dir: str, launch: Launch) -> None:
    """Write what a launch needs into the output folder."""
    for name, text in launch.files.items():
        publish_bytes(join(output_dir, name), text.encode())


def handed_over(output_dir: str, launch: Launch, sources: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The artifact record of a training that is another program's to run, and how."""
    command = shlex.join(launch.command)
    get_run_logger().info("written to %s; run: %s", output_dir, command)
    files = {"path": output_dir, "type": "job", "files": list(launch.files), "command": command}
    return {"train": {**files, "made_from": [dict(each) for each in sources]}}


class _Watched:
    """What a running training shows in Prefect."""

    def __init__(self, job: Job, history: History) -> None:
        self.history, self._job = history, job
        self.progress = TrainingProgress()
        self._shown = 0.0
        self._artifact = cast("UUID", create_progress_artifact(0.0, key="training", description="share of steps done"))

    def hear(self, event: Event) -> None:
        """Keep an event, and show it."""
        self.history.add(event)
        self.progress.hear(event)
        get_run_logger().info(sentence(event))
        if isinstance(event, Saved):
            self.history.publish()
        if isinstance(event, Step) and time.monotonic() - self._shown > REFRESH_SECONDS:
            self._shown = time.monotonic()
            self._show(event.step)

    def leave(self) -> None:
        """Show how it ended."""
        self._show(self._job.settings.steps)

    def _show(self, step: int) -> None:
        update_progress_artifact(self._artifact, round(100 * step / self._job.settings.steps, 1))
        latest = list(self.history.steps.values())[-SHOWN_STEPS:]
        create_table_artifact(step_rows(latest), key="steps", description="the last steps of the training")


def sentence(event: Event) -> str:
    """An event in words."""
    if isinstance(event, Step):
        row = step_rows([event])[0]
        return ", ".join(f"{name} {value}" for name, value in row.items())
    if isinstance(event, Started):
        where = f"{event.processes} process(es) on {event.device}"
        return f"{event.engine}: {event.parameters:,} parameters, {where}, from step {event.step} to {event.steps}"
    if isinstance(event, Validated):
        return f"step {event.step}: loss {event.loss:.4f} on the valid split"
    return f"{event.event}: {getattr(event, 'path', '') or getattr(event, 'reason', '')}"


def step_rows(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """One row per step, for tables."""
    return [
        {
            "step": step.step,
            "loss": round(step.loss, 4),
            "gradient norm": round(step.gradient_norm, 3),
            "tokens/s": round(step.tokens / step.seconds),
            "MFU": "-" if step.mfu is None else f"{step.mfu:.1%}",
            "waited": f"{step.waited / step.seconds:.1%}",
            "memory": f"{step.memory / 1e9:.1f} GB",
        }
        for step in steps
    ]


@task(name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def evaluate(training: str, settings: EvaluateSettings, output_dir: str) -> dict[str, Any]:
    """Evaluate the model of a training that ended on what its data holds out; the artifact record."""
    output_dir = absolute(output_dir)
    asked = evaluation_of(absolute(training), settings, output_dir)
    publish_bytes(join(output_dir, REQUEST), orjson.dumps(asked.model_dump()))
    run(evaluation_launch(join(output_dir, REQUEST)), lambda _: None, get_run_logger().info)
    results = read_results(output_dir)
    create_markdown_artifact(markdown(results), key="results", description="perplexity by source, and continuations")
    return artifact_record(results, output_dir)


def evaluation_of(training: str, settings: EvaluateSettings, output_dir: str) -> Evaluation:
    """What is to be evaluated. Raises InputError unless `training` is the folder of one that ended."""
    read_training(training)
    place = join(training, JOB)
    job = job_of(read_bytes(place) or b"", place)
    return Evaluation(model=join(training, MODEL), data=job.data, settings=settings, output_dir=output_dir)
