"""The front door of the room: plan, score and publish as Prefect tasks.

`score-slices` is mapped over batches of slices, on workers with a GPU each where the model computes on GPUs. It retries
what may pass (storage, network), and each try only scores what is still missing. Runs share GPUs by the concurrency
limit `gpu`, where somebody has made one (`prefect gcl create gpu --limit 8`).
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.concurrency.sync import concurrency
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.shards.books import OnBadRow
from tokenmill.tasks.shards.cluster import cores, worker_number
from tokenmill.tasks.shards.stage import build_and_announce, shard_task
from tokenmill.tasks.shards.store import Store

from .engines import gpus
from .planning import ScorePlan, plan_scores
from .preparation import build_score_shard, publish_scores, score_header
from .publication import failure_noted
from .settings import EmbedSettings, NllSettings, Where

LIMIT = "gpu"
"""The concurrency limit of Prefect by which runs share GPUs."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What scoring needs of a cluster: how many workers a local one starts, with how many threads each computes (None: as
    it is), and the resources that a worker must have.
    """

    workers: int
    threads: int | None
    resources: Mapping[str, float]


def needs_of(prepared: ScorePlan) -> Needs:
    """One worker per GPU; on a CPU one for a model, which then has all cores, and one per core where there is none."""
    settings = prepared.settings
    if prepared.device == "cuda":
        return Needs(settings.workers or (gpus() if settings.cluster == "local" else 1), None, {"GPU": 1})
    workers = settings.workers or (1 if settings.model else cores())
    return Needs(workers, max(1, cores() // workers) if settings.cluster == "local" else None, {})


@task(name="plan", cache_policy=NO_CACHE, persist_result=False)
def plan(blend: Blend, settings: NllSettings | EmbedSettings, output_dir: str) -> ScorePlan:
    """Every slice that is to be scored, and which are proven already."""
    return plan_scores(blend, settings, output_dir)


@shard_task(name="score-slices")
def score_slices(
    number: int,  # noqa: ARG001 - names the task run
    batch: Sequence[Mapping[str, Any]],
    topic: str,
    store: str,
    kind: str,
    device: str,
    where: Mapping[str, Any],
    on_bad_row: OnBadRow,
    threads: int | None,
    rebuild: bool,
) -> State[Any]:
    """Score a batch of slices; receipts, not this task, say that they are done."""
    build = partial(
        build_score_shard, where=Where(**where), on_bad_row=on_bad_row, worker=worker_number(), threads=threads
    )
    with gpu_turn(device):
        return build_and_announce(batch, Store(store, kind), build, topic, rebuild=rebuild)


def common_of(prepared: ScorePlan, needs: Needs) -> dict[str, Any]:
    """What all batches have in common."""
    store, settings = prepared.plan.store, prepared.settings
    return {
        "store": store.place,
        "kind": store.kind,
        "device": prepared.device,
        "where": asdict(prepared.where),
        "on_bad_row": settings.on_bad_row,
        "threads": needs.threads,
        "rebuild": settings.force,
    }


@contextmanager
def gpu_turn(device: str) -> Generator[None]:
    """Hold one of the GPUs that all runs share, waiting for it, where a limit says how many there are."""
    if device != "cuda":
        yield
        return
    with concurrency(LIMIT, occupy=1, strict=False):
        yield


def noting_failure(prepared: ScorePlan) -> AbstractContextManager[None]:
    """A context that leaves a manifest of a failed run behind if it fails."""
    return failure_noted(prepared.output_dir, score_header(prepared), prepared.plan.store)


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish(prepared: ScorePlan, started: float) -> dict[str, Any]:
    """Check every slice against the plan and publish; the manifest."""
    return publish_scores(prepared, started)
