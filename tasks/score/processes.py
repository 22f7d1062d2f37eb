"""Engines that run in processes of their own: vLLM and SGLang.

Dask's workers are daemons by default, and daemons may not start processes; those of a local cluster are told not to be,
those of other clusters by whoever starts them. What such an engine starts takes the first GPU that it sees, so it is let
see only the one that its worker was dealt.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from multiprocessing import current_process

from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.cluster import workers_with_children

from .engines import OWN_PROCESSES, EmbedEngine, NllEngine
from .machine import device_for_worker
from .settings import Device

VISIBLE = "CUDA_VISIBLE_DEVICES"


def workers_fit_for(engine: NllEngine | EmbedEngine) -> AbstractContextManager[object]:
    """A context in which the workers of local clusters are started so that they may start processes, if `engine` does."""
    if engine not in OWN_PROCESSES:
        return nullcontext()
    return workers_with_children()


def require_children(engine: NllEngine | EmbedEngine) -> None:
    """Raises RunError where this process may not start others."""
    if current_process().daemon:
        raise RunError(
            f"engine={engine} starts processes of its own, and this worker is a daemon, which may not; start workers with "
            "DASK_DISTRIBUTED__WORKER__DAEMON=False in the environment of `dask worker`"
        )


def see_only(device: str | None) -> None:
    """Let this process, if it has not used CUDA yet, and all that it starts see nothing but the GPU `device`.

    GPUs are counted as this process saw them at first, however often it is called. Without a number all stays as it is.
    """
    number = (device or "").partition(":")[2]
    if not number:
        return
    seen = _seen_at_first()
    os.environ[VISIBLE] = number if seen is None else seen.split(",")[int(number)].strip()


@cache
def _seen_at_first() -> str | None:
    return os.environ.get(VISIBLE)


@cache
def device_for_good(device: Device, worker: int | None) -> str:
    """`device_for_worker` as it was at first: once this process sees one GPU only, it would be another."""
    return device_for_worker(device, worker)
