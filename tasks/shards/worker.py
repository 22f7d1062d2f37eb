"""The identity of a process as a Dask worker. Dask is not imported: a worker has already imported it."""

import logging
import multiprocessing
import re
import sys
from typing import Any

from tokenmill.tasks.arrow import set_up_arrow

CALLED_WHILE_IMPORTED = 99
"""Exit code of a worker whose imported main script starts a run at import time."""


def dask_setup(_worker: object) -> None:
    """Called by Dask in the workers of a local cluster, which serve one run. The run itself names a batch that failed."""
    set_up_arrow()
    logging.getLogger("distributed.worker").addFilter(
        lambda record: not record.getMessage().startswith("Compute Failed")
    )


def exit_if_imported() -> None:
    """Exit from a worker that starts a run while it imports the script that started it; the script reports the reason.

    Python marks a process as `_inheriting` while it imports its parent's main module, and doesn't start processes then.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(CALLED_WHILE_IMPORTED)


def worker_number() -> int | None:
    """The number at the end of this worker's name; 0 outside a cluster, None for a name without a number.

    The name of an unnamed worker is its address, and a port is not a worker number.
    """
    worker = _this_worker()
    if worker is None:
        return 0
    name = str(worker.name)
    found = None if "://" in name else re.search(r"\d+$", name)
    return int(found[0]) if found else None


def announce(topic: str, record: dict[str, Any]) -> None:
    """Report a finished shard to the run; without effect outside a Dask worker."""
    worker = _this_worker()
    if worker is not None:
        worker.log_event(topic, record)


def _this_worker() -> Any:  # noqa: ANN401 - distributed.Worker, or None
    distributed = sys.modules.get("distributed")
    try:
        return distributed.get_worker() if distributed else None
    except ValueError:
        return None
