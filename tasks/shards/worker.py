"""What a process can say of itself as a Dask worker. Dask is not imported: a worker has imported it already."""

import re
import sys
from typing import Any


def worker_number() -> int | None:
    """The number at the end of this worker's name; 0 outside of a cluster, None for a name without a number.

    A worker without a name of its own is called by its address, whose port is no number of a worker.
    """
    worker = _this_worker()
    if worker is None:
        return 0
    name = str(worker.name)
    found = None if "://" in name else re.search(r"\d+$", name)
    return int(found[0]) if found else None


def announce(topic: str, record: dict[str, Any]) -> None:
    """Tell whoever watches the run that a shard is done; nothing when this process is not a Dask worker."""
    worker = _this_worker()
    if worker is not None:
        worker.log_event(topic, record)


def _this_worker() -> Any:  # noqa: ANN401 - distributed.Worker, or None
    distributed = sys.modules.get("distributed")
    try:
        return distributed.get_worker() if distributed else None
    except ValueError:
        return None
