"""The front door of the room: run a mapped Prefect task over batches of shards, and publish what they made.

One Prefect task per batch, on Dask. The wait is where a run can go wrong without a word, so it is strict: the result
of every future is asked for (a task whose worker died again and again never reaches a failed state by itself), all
batches are allowed to finish so that their receipts are kept, and then one error names everything that failed.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, cast
from uuid import UUID, uuid4

from prefect import Task, get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import MissingContextError
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed
from prefect.tasks import exponential_backoff
from prefect_dask.task_runners import DaskTaskRunner, PrefectDaskFuture
from tokenmill.tasks import artifact
from tokenmill.tasks.errors import RunError

from .build import BuildShard, batches, build_batch
from .cluster import announce, asking_for, listen, require_reached, slots, started, task_runner
from .plan import PlannedShard, shard_record
from .progress import ProgressBar, ProgressDisplay, Tally, say
from .store import Store
from .wait import ClusterWatch, wait_for

MOST_REPORTED = 5

BuildShards = Callable[["Task[Any, Any]", Sequence[PlannedShard], Mapping[str, Any]], None]
"""Maps a task over batches of shards, and waits for all of them.

Each call of the task gets its `number`, its `batch` of records, the `topic` to announce finished shards under, and what
all calls have in common. Raises RunError naming the batches that failed, after all others have finished.
"""

PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def transient(_task: object, _run: object, state: State[Any]) -> bool:
    """Whether a failed batch is worth another try: storage and network errors are, everything else is not."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, (OSError, TimeoutError)) and not isinstance(error, PERMANENT)


def artifact_key(what: str) -> str:
    """The key of an artifact of this flow run: names the flow and its output folder, so that each has its own history."""
    context = FlowRunContext.get()
    if context is None or context.flow is None:
        raise MissingContextError("an artifact's key is that of a flow run")
    name = f"{context.flow.name}-{what}"
    output_dir = (context.parameters or {}).get("output_dir")
    return artifact.artifact_key(name, output_dir) if output_dir else name


def tell(sentence: str) -> None:
    """Say in the run's log, and at the terminal if there is one, what the run waits for."""
    get_run_logger().warning(sentence)
    say(sentence)


def shard_task(name: str) -> "Callable[[Callable[..., State[Any]]], Task[..., State[Any]]]":
    """Makes the task of a kind of shards, which `build_shards` maps over batches."""
    return task(
        name=name,
        task_run_name=f"{name}-{{number}}",
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=3,
        retry_delay_seconds=exponential_backoff(2),
        retry_jitter_factor=0.5,
        retry_condition_fn=transient,
    )


def build_and_announce(
    batch: Sequence[Mapping[str, Any]], store: Store, build: BuildShard, topic: str, *, rebuild: bool
) -> State[Any]:
    """The body of such a task: build what has no receipt, tell the run after each, and end as `Cached` if nothing was."""
    done = build_batch(batch, store, build, partial(announce, topic), rebuild=rebuild)
    built = sum(not shard.reused for shard in done)
    tokens, seconds = sum(shard.tokens for shard in done), sum(shard.seconds for shard in done)
    message = f"{built} shards built in {seconds:.1f} s, {len(done) - built} had valid receipts; {tokens:,} tokens"
    get_run_logger().info(message)
    return Completed(message=message, name="Completed" if built else "Cached")


@contextmanager
def shard_workers(
    cluster: str, workers: int | None, resources: Mapping[str, float] | None = None
) -> Generator[BuildShards]:
    """What builds shards, on one cluster for all rounds of a run; it starts when there is a first shard to build.

    `resources` are what a worker must have to build, such as `{"GPU": 1}`.
    """
    needed = resources or {}
    with ExitStack() as stack:

        @cache
        def runner() -> DaskTaskRunner:
            stack.enter_context(_one_server())
            runner = stack.enter_context(started(task_runner(cluster, workers, needed)))
            require_reached(runner.client, str(PREFECT_API_URL.value()))
            return runner

        def build_shards(build: "Task[Any, Any]", pending: Sequence[PlannedShard], common: Mapping[str, Any]) -> None:
            if pending:
                with asking_for(runner().client, needed):
                    _build(runner(), build, pending, common, needed)

        yield build_shards


def _build(
    runner: DaskTaskRunner,
    build: "Task[Any, Any]",
    pending: Sequence[PlannedShard],
    common: Mapping[str, Any],
    resources: Mapping[str, float],
) -> None:
    tally = Tally(len(pending), sum(shard.part.size for shard in pending))
    client = runner.client
    topic = f"shards-{uuid4()}"  # a standing cluster may carry other runs
    listen(client, topic, tally.add)
    work = [
        [shard_record(shard) for shard in batch]
        for batch in batches(pending, slots(client, runner.adapt_kwargs.get("maximum", 0)))
    ]
    get_run_logger().info(
        "%s: %d shards (%.2f GB) in %d batches", build.name, len(pending), tally.source_bytes / 1e9, len(work)
    )
    futures = [
        runner.submit(build, {"number": number, "batch": batch, "topic": topic, **common})
        for number, batch in enumerate(work, 1)
    ]
    watch = ClusterWatch(client, resources, bool(runner.adapt_kwargs), tell)
    failures = _wait(futures, tally, watch, build.name)
    if failures:
        require_reached(client, str(PREFECT_API_URL.value()))  # workers that came later have not been asked
        shown = "; ".join(failures[:MOST_REPORTED])
        raise RunError(
            f"{len(failures)} of {len(work)} batches failed: {shown}; finished shards are kept: fix the cause and run the "
            "same command again"
        )
    get_run_logger().info(tally.sentence())


@contextmanager
def _one_server() -> Generator[None]:
    """Make all workers report to the Prefect server of this run.

    Without a configured address Prefect starts a server for this process, and then another one in every process of
    the cluster (some 5 CPU-seconds each), so the address is handed on with the settings that travel with each task.
    """
    if PREFECT_API_URL.value() is not None:
        yield
        return
    from prefect.server.api.server import SubprocessASGIServer  # 2 s to import; no worker needs it

    server = SubprocessASGIServer()
    server.start()
    with temporary_settings({PREFECT_API_URL: server.api_url}):
        yield


def _wait(futures: Sequence[PrefectDaskFuture[Any]], tally: Tally, watch: ClusterWatch, name: str) -> list[str]:
    """Wait for every batch, showing progress; the failures, in words. Raises as `ClusterWatch.look`."""
    artifact = cast("UUID", create_progress_artifact(0.0, artifact_key(name), "share of source bytes built"))
    bar = ProgressBar(partial(update_progress_artifact, artifact), time.monotonic())
    with ProgressDisplay(tally) as display:

        def show() -> None:
            display.refresh()
            bar.show(tally.share, time.monotonic())

        wait_for([future.wrapped_future for future in futures], watch.look, show)
    failures = [f"batch {number}: {failure}" for number, failure in enumerate(map(_failure, futures), 1) if failure]
    bar.end(tally.share if failures else 1.0, time.monotonic())
    return failures


def _failure(future: PrefectDaskFuture[Any]) -> str | None:
    """Why the batch failed, or None. The one place where any exception at all is turned into words: it comes from
    another process, may be of any kind, and every other batch must still be waited for.
    """
    try:
        future.result()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return None
