"""Dask's SSHCluster, which here first names the hosts that cannot be used, and ends with its run.

Dask learns the address of the scheduler from its log, at level INFO, and sends its own configuration to the hosts. A quiet
configuration would make it wait forever.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dask import config  # pyright: ignore[reportPrivateImportUsage]
from distributed import SpecCluster, SSHCluster
from tokenmill.tasks.errors import RunError

from . import on_host

REACH_SECONDS = 30.0
"""How long a host may take to answer and to start Python."""

PRELOADED = ("distributed.scheduler.preload", "distributed.nanny.preload")


def ssh_cluster(
    hosts: list[str],
    connect_options: dict[str, Any] | list[dict[str, Any]] | None = None,
    remote_python: str | list[str] | None = None,
    **others: Any,  # noqa: ANN401 - the arguments of SSHCluster
) -> SpecCluster:
    """Start a scheduler on the first host and workers on the others. Raises RunError for hosts that cannot be used."""
    options, pythons = connect_options or {}, remote_python or sys.executable
    each_options = options if isinstance(options, list) else [options] * len(hosts)
    each_python = pythons if isinstance(pythons, list) else [pythons] * len(hosts)
    checked = _require_hosts([*zip(hosts, each_options, each_python, strict=True)])
    with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has an event loop already
        thread.submit(asyncio.run, checked).result()
    preload = {key: [*config.get(key), on_host.__name__] for key in PRELOADED}
    with config.set({"logging.distributed": "info", **preload}):
        return SSHCluster(hosts, options, remote_python=pythons, **others)


async def _require_hosts(hosts: Sequence[tuple[str, Mapping[str, Any], str]]) -> None:
    """Raises RunError that names every host that cannot be used; each has its options and its Python."""
    problems = await asyncio.gather(*(_problem(*host) for host in hosts))
    unusable = [f"{host}: {problem}" for (host, *_), problem in zip(hosts, problems, strict=True) if problem]
    if unusable:
        raise RunError(
            f"hosts that cannot be used: {'; '.join(dict.fromkeys(unusable))}; check that `ssh HOST` works "
            "without a question, and that this installation is on the host (or name its Python in remote_python)"
        )


async def _problem(host: str, options: Mapping[str, Any], python: str) -> str | None:
    """Why a host cannot be used, or None."""
    import asyncssh  # an SSH cluster alone needs it

    try:
        async with asyncio.timeout(REACH_SECONDS), asyncssh.connect(host, **options) as connection:
            ran = await connection.run(f"{python} -c 'import {on_host.__name__}'")
    except TimeoutError:
        return f"no answer within {REACH_SECONDS:.0f} s"
    except (OSError, asyncssh.Error) as error:
        return str(error)
    if not ran.exit_status:
        return None
    return str(ran.stderr).strip().rpartition("\n")[2] or f"{python} ended with exit code {ran.exit_status}"
