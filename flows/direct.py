"""Run a preparation for a command or a Python program: as a flow if Prefect can show it, and directly otherwise.

Prefect shows a run as long as its server is there, and a temporary server would end with the run. Such a server, and Prefect
in every process, take 9 CPU-seconds. So without a configured server, the same steps run directly, on the same type of local
Dask cluster or the one at an address, and publish the same bytes.
"""

import os
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.console import never_end_by_printing
from tokenmill.tasks.report.openlineage import tell_if_asked
from tokenmill.tasks.report.summary import artifact_record
from tokenmill.tasks.report.weights_and_biases import log_if_asked
from tokenmill.tasks.shards.executor import Pool, building_on, exit_if_imported, here, is_little, run_here
from tokenmill.tasks.shards.kind import BuildShards, Kind, Needs, Stage
from tokenmill.tasks.shards.plan import PlannedShard
from tokenmill.tasks.shards.planning import check_inputs
from tokenmill.tasks.shards.progress import say
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.settings import ClusterSettings, PreparationSettings
from tokenmill.tasks.shards.store import turn_in
from tokenmill.tasks.storage import join

from .run import Steps, run_steps

if TYPE_CHECKING:
    from tokenmill.tasks.train.settings import OrderSettings

ADDRESS = "PREFECT_API_URL"

PROFILES = "profiles.toml"

MENTIONS = {
    PROFILES: ADDRESS,
    "prefect.toml": "url|profiles_path",
    "pyproject.toml": r"tool\.prefect",
    ".env": f"{ADDRESS}|PREFECT_PROFILES_PATH",
}
"""The files in which Prefect looks for settings, and a pattern in each that may name a server."""


def run_preparation(
    kind: Kind[Any, Any], blend: Blend, output_dir: str, settings: PreparationSettings
) -> dict[str, Any]:
    """Prepare a blend, and return the artifact record. Raises InputError, some before planning."""
    # Before a flow starts, so that a mistyped path does not leave a failed run on a server.
    check_inputs(blend, settings.store, output_dir)
    kind.check(blend, settings, output_dir)
    if is_shown() or not (settings.cluster == "local" or "://" in settings.cluster):
        from .preparation import preparation_flow

        # Prefect shows these as the parameters of the run, so defaults are left to the flow.
        chosen = {name: getattr(settings, name) for name in settings.model_fields_set}
        return preparation_flow(kind)(blend, output_dir, **chosen)
    exit_if_imported()
    never_end_by_printing()
    with turn_in(output_dir, say):
        return run_steps(
            kind, blend, settings, output_dir, Steps(lambda _, function, *given: function(*given), _workers, _report)
        )


def run_order(output_dir: str, settings: "OrderSettings") -> dict[str, Any]:
    """Plan the order of a training run, and return the artifact record: in this process if the data are small."""
    from tokenmill.tasks.train.order import artifact_record, checked_data, fits_in_process, make_order

    if settings.cluster == "local" and not is_shown():
        data = checked_data(output_dir, settings)
        if fits_in_process(data, settings):
            with turn_in(output_dir, say):
                return artifact_record(make_order(data, settings, run_here), data.path)
    from .order import order_samples

    return order_samples(output_dir, settings)


def is_shown() -> bool:
    """Return whether Prefect can show a run: a server is configured, or a flow makes this call."""
    if server_address() is not None:
        return True
    if "prefect" not in sys.modules:
        return False
    from prefect.context import FlowRunContext

    return FlowRunContext.get() is not None


def server_address() -> str | None:
    """Return the URL of the API of the configured Prefect server, None without one.

    Prefect takes a second to import, so it is asked only if a variable or a file may name a server.
    """
    if "prefect" not in sys.modules and not any(name.upper() == ADDRESS for name in os.environ):
        home = os.environ.get("PREFECT_HOME") or "~/.prefect"
        profiles = os.environ.get("PREFECT_PROFILES_PATH") or join(home, PROFILES)
        for name, pattern in MENTIONS.items():
            with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
                file = Path(profiles if name == PROFILES else name).expanduser()
                if re.search(pattern, file.read_text("utf-8", errors="replace"), re.IGNORECASE):
                    break
        else:
            return None
    from prefect.settings import PREFECT_API_URL

    return PREFECT_API_URL.value()


@contextmanager
def _workers(settings: ClusterSettings, needs: Needs) -> Generator[BuildShards]:
    """Builds shards here, on workers of this machine, or on a cluster. Dask takes 0.4 s to import, so it waits for work."""
    with ExitStack() as stack:

        @cache
        def on_workers() -> Callable[[Stage, Sequence[PlannedShard]], Pool]:
            from tokenmill.tasks.shards.workers import pool_for

            return stack.enter_context(pool_for(settings, needs))

        def pool(stage: Stage, pending: Sequence[PlannedShard]) -> Pool:
            little = settings.cluster == "local" and is_little(stage, pending, needs)
            return (here if little else on_workers())(stage, pending)

        yield building_on(pool, needs.libraries)


def _report(manifest: Manifest, output_dir: str, known: Mapping[str, Receipt]) -> dict[str, Any]:
    from tokenmill.tasks.report.page import leave_report

    leave_report(output_dir, say, known)
    log_if_asked(manifest, output_dir, say)
    tell_if_asked(manifest, output_dir, say)
    return artifact_record(manifest, output_dir)
