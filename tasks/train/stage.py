"""Prefect tasks of training: check, train, evaluate.

Training and evaluation are processes that are started and watched here; this process never imports torch. A training run that fails
is retried and resumes from its checkpoint, unless the user must fix something first. Cancelling the flow run ends all of its
processes. A table of the flow run shows the last steps.
"""

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast
from uuid import UUID

import orjson
from prefect import get_client, get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.objects import State
from prefect.tasks import exponential_backoff
from tokenmill.tasks.artifact import artifact_key
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.progress import say
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.storage import absolute, is_local, join

from .events import Event, Saved, TrainStep
from .history import (
    History,
    ended_training,
    history_of,
    made_from,
    publish_training,
    read_training,
    training_record,
)
from .job import MODEL, Evaluation, Job, read_job
from .launchers import launch_of
from .launchers.launch import Launch, process_count, require_program, write_files
from .launchers.nemo_rl import rl_launch
from .order import followed_order, keep_order
from .preflight import check, plan_training
from .progress import TrainingProgress, UpdateSchedule, sentence, step_rows
from .results import artifact_record, markdown, read_results
from .settings import EvaluateSettings, TrainSettings
from .watch import LOG, Log, logged, run

SHOWN_STEPS = 20
MAX_LINES = 1_000  # the maximum number of a trainer's lines sent to Prefect's server, which keeps them forever


def should_retry(_task: object, _run: object, state: State[Any]) -> bool:
    """Return whether to retry a failed training: not if the user must fix something first."""
    return not isinstance(state.result(raise_on_failure=False), InputError)


@task(name="check", cache_policy=NO_CACHE, persist_result=False)
def checked_job(data: str, settings: TrainSettings, output_dir: str) -> Job:
    """Plan and check a training run. Raises InputError."""
    require_program(settings.launcher)
    job = plan_training(data, settings, output_dir)
    for line in check(job):
        log_and_say(line)
    return job


def log_and_say(sentence: str) -> None:
    """Log a sentence for Prefect, and show it on stderr, where Prefect's own log is switched off."""
    get_run_logger().info(sentence)
    say(sentence)


@task(
    name="train",
    cache_policy=NO_CACHE,
    persist_result=False,
    retry_delay_seconds=exponential_backoff(2),
    retry_condition_fn=should_retry,
)
def train(job: Job) -> dict[str, Any]:
    """Train to the end, resuming from the last checkpoint; returns the artifact record.

    A finished training run is not repeated. For a different trainer, only its files are written.
    """
    ended = ended_training(job.output_dir)
    if ended is not None:
        log_and_say(f"{job.output_dir}: this training run has already finished")
        return training_record(ended, job.output_dir)
    launch = launch_of(job, process_count(job.settings))
    write_files(launch, job.output_dir)
    if not launch.runs:
        return handed_over(job.output_dir, launch, made_from(job))
    keep_order(followed_order(job.data, job.settings), job.output_dir)
    history, began = history_of(job.output_dir), time.time()
    progress, table = TrainingProgress(), StepsTable(job)
    with logged(join(job.output_dir, LOG)) as log:

        def handle(event: Event) -> None:
            # Log and metrics hold everything, Prefect a limited part: its server keeps it forever.
            history.add(event)
            progress.handle(event)
            log.write(sentence(event))
            if isinstance(event, TrainStep):
                table.offer(history)
            else:
                get_run_logger().info(sentence(event))
            if isinstance(event, Saved):
                history.publish()

        log.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {shlex.join(launch.command)}")
        try:
            with progress:
                run(launch, handle, Lines(log).handle)
        except RunError:
            table.show(history)
            raise
        finally:
            history.publish()
        record = publish_training(job, history, time.time() - began)
        table.show(history)
        return training_record(record, job.output_dir)


@task(name="hand-over", cache_policy=NO_CACHE, persist_result=False)
def hand_over_rl(data: str, settings: TrainSettings, output_dir: str) -> dict[str, Any]:
    """Write the files that NeMo-RL needs to train on rows for reinforcement learning. Raises InputError as `rl_launch` does."""
    launch, place = rl_launch(data, settings, output_dir), absolute(output_dir)
    write_files(launch, place)
    return handed_over(place, launch, [{"type": "rl", "path": absolute(data)}])


def handed_over(output_dir: str, launch: Launch, sources: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the artifact record of a training run by a different program."""
    command = shlex.join(launch.command)
    get_run_logger().info("written to %s; run: %s", output_dir, command)
    files = {"path": output_dir, "type": "job", "files": list(launch.files), "command": command}
    return {"train": {**files, "made_from": [dict(each) for each in sources]}}


class Lines:
    """Log lines of a process: all go to its log, and the first MAX_LINES to Prefect."""

    def __init__(self, log: Log) -> None:
        self._log, self._count = log, 0

    def handle(self, line: str) -> None:
        self._log.write(line)
        self._count += 1
        if self._count <= MAX_LINES:
            get_run_logger().info(line)
        if self._count == MAX_LINES:
            get_run_logger().info("further lines are in %s only", self._log.path)


class StepsTable:
    """One table of the flow run with the last steps of a training run, which is updated."""

    def __init__(self, job: Job) -> None:
        self._job, self._schedule = job, UpdateSchedule(time.monotonic())
        self._shown: list[dict[str, Any]] = []
        self._artifact: UUID | None = None

    def offer(self, history: History) -> None:
        """Show the last steps, unless it is too early for an update."""
        if self._schedule.due(time.monotonic()):
            self.show(history)

    def show(self, history: History) -> None:
        """Show the last steps, unless they are shown already."""
        rows = step_rows(list(history.steps.values())[-SHOWN_STEPS:])
        if rows == self._shown:
            return
        self._shown = rows
        title = f"step {rows[-1]['step']:,} of {self._job.settings.steps:,}"
        if self._artifact is None:
            key = artifact_key("training", self._job.output_dir)
            self._artifact = cast("UUID", create_table_artifact(rows, key=key, description=title))
            return
        with get_client(sync_client=True) as client:
            update = ArtifactUpdate(data=orjson.dumps(rows).decode(), description=title)
            client.update_artifact(self._artifact, update)


@task(name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def evaluate(asked: Evaluation) -> dict[str, Any]:
    """Evaluate the model of a finished training on held-out data; returns the artifact record."""
    output_dir = asked.output_dir
    request = join(output_dir, "request.json")
    publish_bytes(request, orjson.dumps(asked.model_dump()))
    command = [sys.executable, "-m", "tokenmill.tasks.train.evaluate", request]  # one process with all cores
    with logged(join(output_dir, "evaluation.log")) as log:
        run(Launch({}, command, runs=True), lambda _: None, Lines(log).handle)
    results = read_results(output_dir)
    key = artifact_key("results", output_dir)
    create_markdown_artifact(markdown(results), key=key, description="perplexity by source, and continuations")
    return artifact_record(results, output_dir)


def evaluation_of(training: str, settings: EvaluateSettings, output_dir: str) -> Evaluation:
    """Plan an evaluation. Raises InputError unless `training` is the folder of a finished one and `output_dir` a path."""
    training, output_dir = absolute(training), absolute(output_dir)
    if not is_local(output_dir):
        raise InputError(f"output_dir={output_dir}: an evaluation writes its results to a file system; name a folder")
    read_training(training)
    data = read_job(training).data
    return Evaluation(model=join(training, MODEL), data=data, settings=settings, output_dir=output_dir)
