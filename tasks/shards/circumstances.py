"""The circumstances of a run: what may differ between two preparations that are equal in everything else."""

import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from .plan import Plan
from .settings import WHERE_NOT_WHAT, PreparationSettings


def circumstances(
    plan: Plan, settings: PreparationSettings, started: float, libraries: Sequence[str]
) -> dict[str, Any]:
    """When, where, how much was reused, and with which versions; the volatile part of a manifest.

    `started` is a Unix time, `libraries` are those whose versions matter to the bytes.
    """
    total, built = len(set(plan.keys)), len(plan.pending)
    return {
        "created_at": time.time(),
        "seconds": time.time() - started,
        "store": plan.store.place,
        "shards": {"total": total, "built": built, "reused": total - built},
        "settings": settings.model_dump(include=WHERE_NOT_WHAT),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in libraries}},
    }
