"""Run the steps of a preparation as Prefect tasks: plan, shards mapped over a Dask cluster, publication.

One Prefect task per batch, on Dask. The run asks for the result of every future, because a task whose worker keeps dying
never reaches a failed state. It lets all batches finish, so that their receipts are kept, and then raises one
error that names every failure.
"""

import re
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast
from uuid import UUID

from distributed import Future
from prefect import Task, get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.concurrency.sync import concurrency
from prefect.context import FlowRunContext
from prefect.exceptions import MissingContextError
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed
from prefect.types.names import MAX_ASSET_KEY_LENGTH
from prefect_dask.task_runners import DaskTaskRunner, PrefectDaskFuture
from tokenmill.tasks import artifact
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.storage import absolute

from .cluster import asking_for, local_size, require_reached, require_tokenmill, started
from .executor import RunAll, Submitted, build_work, building_on, in_words, results_of
from .kind import BuildShards, Needs
from .planning import data_sets
from .progress import say
from .receipt import Receipt
from .retry import retrying
from .runner import task_runner
from .settings import ClusterSettings
from .wait import ClusterWatch
from .workers import WorkerPool, pool_for

P = ParamSpec("P")
R = TypeVar("R")


def artifact_key(what: str) -> str:
    """Return the key of a Prefect artifact: it names the flow and its output folder, so that each has its own history."""
    context = FlowRunContext.get()
    if context is None or context.flow is None:
        raise MissingContextError("an artifact key needs a flow run")
    name = f"{context.flow.name}-{what}"
    output_dir = (context.parameters or {}).get("output_dir")
    return artifact.artifact_key(name, output_dir) if output_dir else name


def tell(sentence: str) -> None:
    """Log a sentence, and show it at the terminal if there is one."""
    get_run_logger().warning(sentence)
    say(sentence)


def step_task(name: str, run_name: str | None = None) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Turn a function into a task of that name, whose result is neither cached nor stored."""
    return task(name=name, task_run_name=run_name, cache_policy=NO_CACHE, persist_result=False)


def materializing(blend: Blend, output_dir: str) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Turn a function that publishes into a task that materialises the output as an asset, made of the blend's sources."""
    sources = dict.fromkeys(path for _, path in data_sets(blend))
    return materialize(
        asset_of(output_dir),
        by="tokenmill",
        name="publish",
        asset_deps=[asset_of(path) for path in sources],
        cache_policy=NO_CACHE,
        persist_result=False,
    )


def asset_of(place: str) -> str:
    """Return the key of the asset at a path or URI; `_` replaces forbidden characters, and a long path keeps its start."""
    uri = absolute(place)
    key = uri if "://" in uri else f"file://{uri}"
    return re.sub(r"[^\w:/@=.+-]", "_", key, flags=re.ASCII)[:MAX_ASSET_KEY_LENGTH]


def holding(limit: str | None) -> AbstractContextManager[object]:
    """Return a context that holds one slot of a Prefect concurrency limit, waiting for it, if a limit of that name exists."""
    return concurrency(limit, occupy=1, strict=False) if limit else nullcontext()


def _build_batch(number: int, limit: str | None, work: Callable[[], list[Receipt]]) -> State[Any]:  # noqa: ARG001 - names the task run
    """Build shards without a receipt, report each to the run, and end as `Cached` if nothing was built."""
    started = time.time()
    with holding(limit):
        done = work()
    # A receipt from before this task was reused, as after a retry.
    made = [receipt for receipt in done if receipt.volatile.get("built_at", started) >= started]
    tokens, seconds = sum(receipt.tokens for receipt in done), time.time() - started
    message = f"built {len(made):,} shard{'s' * (len(made) != 1)}, reused {len(done) - len(made):,}, in {seconds:.1f} s; {tokens:,} tokens"
    get_run_logger().info(message)
    return Completed(message=message, name="Completed" if made else "Cached", data=done)


@contextmanager
def shard_workers(settings: ClusterSettings, needs: Needs) -> Generator[BuildShards]:
    """A context that builds shards on one cluster for all steps of a run, each batch as a Prefect task."""

    @contextmanager
    def start(workers: int) -> Generator[_Tasks]:
        with _runner(settings, workers, needs.resources) as runner:
            yield _Tasks(runner, needs, settings.cluster_timeout)

    with pool_for(settings, needs, start) as pool:
        yield building_on(pool, needs.libraries)


@contextmanager
def _runner(settings: ClusterSettings, workers: int, resources: Mapping[str, float]) -> Generator[DaskTaskRunner]:
    """Prefect's task runner, whose workers have tokenmill and reach the Prefect server of this run."""
    with ExitStack() as stack:
        if PREFECT_API_URL.value() is None:
            # Prefect would start a server in every worker process (about 5 CPU-seconds each), so the address of this
            # process's server is set: it travels with the settings of each task.
            from prefect.server.api.server import SubprocessASGIServer  # 2 s to import, and workers do not need it

            server = SubprocessASGIServer()
            server.start()
            stack.enter_context(temporary_settings({PREFECT_API_URL: server.api_url}))
        runner = stack.enter_context(started(task_runner(settings.cluster, workers, resources)))
        require_tokenmill(runner.client)
        require_reached(runner.client, str(PREFECT_API_URL.value()))
        yield runner


class _Tasks(WorkerPool):
    """Workers to which batches are submitted as Prefect tasks."""

    def __init__(self, runner: DaskTaskRunner, needs: Needs, timeout: float | None) -> None:
        most = runner.adapt_kwargs.get("maximum", 0)
        super().__init__(runner.client, needs.resources, most, adaptive=bool(runner.adapt_kwargs), timeout=timeout)
        self._runner, self._limit = runner, needs.limit
        self._progress: UUID | None = None

    def submit(self, name: str, calls: Sequence[Mapping[str, Any]]) -> list[Submitted]:
        self.require_same_code(calls)
        build = step_task(name, f"{name}-{{number}}")(_build_batch)
        with asking_for(self.client, self.resources):
            return [
                _submitted(
                    self._runner.submit(
                        build, {"number": number, "limit": self._limit, "work": partial(build_work, **call)}
                    )
                )
                for number, call in enumerate(calls, 1)
            ]

    def bar(self, name: str) -> Callable[[float], object]:
        """All steps of a run share an artifact, which names the last one."""
        shown = f"{name}: share of source bytes built"
        if self._progress is None:
            self._progress = cast("UUID", create_progress_artifact(0.0, artifact_key("progress"), shown))
        return partial(update_progress_artifact, self._progress, description=shown)

    def log(self, sentence: str) -> None:
        get_run_logger().info(sentence)

    def tell(self, sentence: str) -> None:
        tell(sentence)

    def explain(self) -> None:
        """Raise InputError for workers that joined later and can't reach the server."""
        require_reached(self.client, str(PREFECT_API_URL.value()))


def _submitted(future: PrefectDaskFuture[Any]) -> Submitted:
    return Submitted(cast("Future[Any]", future.wrapped_future), partial(_failure, future), future.result)


@contextmanager
def function_workers(settings: ClusterSettings) -> Generator[RunAll]:
    """A context that runs functions on one cluster, each call as a Prefect task."""
    workers = local_size(sys.maxsize, settings.workers)
    with _runner(settings, workers, {}) as runner:

        def run_all(name: str, function: Callable[..., Any], calls: Sequence[Mapping[str, Any]]) -> list[Any]:
            called = step_task(name)(retrying(function))
            futures = [_submitted(runner.submit(called, dict(call))) for call in calls]
            check = ClusterWatch(runner.client, {}, bool(runner.adapt_kwargs), tell, settings.cluster_timeout).check
            return results_of(futures, name, check)

        yield run_all


def _failure(future: PrefectDaskFuture[Any]) -> str | None:
    """The error that failed the batch, or None. This is the one place that catches every exception: a worker may raise any
    type, and the other batches must still be awaited.
    """
    try:
        future.result()
    except Exception as error:  # noqa: BLE001
        return in_words(error)
    return None
