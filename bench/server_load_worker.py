"""Runs of a deployment at once on a Prefect server, as a process of its own.

    python -m bench.server_load_worker sqlite|postgresql RUNS SHARDS calm|killed

Prints as JSON what a run's requests took: before the runs, while all of them work, and at a rate that saturates the server;
how the runs ended; and what the database grew by.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID

import asyncpg
import httpx
import numpy as np
from prefect.client.schemas.actions import ArtifactCreate

from bench.databases import postgresql
from bench.deployed_runs import Deployed, deployed, small_blend
from tests.flows.prefect_commands import PrefectServer, free_port, serving
from tests.flows.preparation_runs import receipts
from tests.flows.standing_clusters import scheduler, worker

ROW_BYTES, ROWS_OF_A_SHARD = 261, 15
CALM_SECONDS, FULL_SECONDS, CLIENTS = 10, 20, 20
END_SECONDS = 1_800
PAUSE_SECONDS = 0.1
FINAL = {"Completed", "Failed", "Crashed", "Cancelled"}


@dataclass
class Probe:
    """Asks a server to update the progress of a run, as runs do, and for the latest runs, as the UI does, by turns."""

    server: PrefectServer
    artifact: UUID
    taken: list[float] = field(default_factory=list[float])
    failed: list[str] = field(default_factory=list[str])

    def ask(self, until: Callable[[], bool], pause: float) -> None:
        """Ask until that is so, with a pause after each answer."""
        with httpx.Client(base_url=self.server.url, timeout=60) as http:
            for number in count():
                if until():
                    return
                self._time(http, number)
                time.sleep(pause)

    def _time(self, http: httpx.Client, number: int) -> None:
        started = time.perf_counter()
        try:
            if number % 2:
                answer = http.patch(f"/artifacts/{self.artifact}", json={"data": float(number % 100)})
            else:
                answer = http.post("/flow_runs/filter", json={"limit": 20, "sort": "START_TIME_DESC"})
            answer.raise_for_status()
        except httpx.HTTPError as error:
            self.failed.append(repr(error))
            return
        self.taken.append(time.perf_counter() - started)


def asked(server: PrefectServer, clients: int, pause: float, work: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds that requests of so many clients took during `work`: median, slowest hundredth, and requests a second."""
    with server.client() as client:
        artifact = client.create_artifact(ArtifactCreate(key="probe", type="progress", data=0.0)).id
    probes, done, started = [Probe(server, artifact) for _ in range(clients)], threading.Event(), time.monotonic()
    threads = [threading.Thread(target=probe.ask, args=(done.is_set, pause)) for probe in probes]
    for thread in threads:
        thread.start()
    try:
        work()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    taken, failed = [t for probe in probes for t in probe.taken], [e for probe in probes for e in probe.failed]
    p50, p99 = (float(np.percentile(taken, share) * 1e3) for share in (50, 99))
    seconds = time.monotonic() - started
    counts = {"requests": len(taken), "failed": len(failed), "errors": sorted(set(failed))[:3]}
    return {"p50": p50, "p99": p99, "rate": len(taken) / seconds, "seconds": seconds, **counts}


@dataclass
class Load:
    """Runs at once on a server with a database, whose process may be killed and started again."""

    folder: Path
    own: dict[str, str]
    port: int
    stack: ExitStack

    def serve(self) -> PrefectServer:
        """A server, the only one, on the same database and port."""
        return self.stack.enter_context(serving(self.folder / "home", port=self.port, **self.own))

    def size(self) -> int:
        """Bytes of the database."""
        if not self.own:
            return sum(path.stat().st_size for path in (self.folder / "home").glob("prefect.db*"))
        address = next(iter(self.own.values())).replace("+asyncpg", "")

        async def ask() -> int:
            connection = await asyncpg.connect(address)
            return await connection.fetchval("SELECT pg_database_size(current_database())")

        return asyncio.run(ask())

    def measure(self, runs: int, shards: int, *, kill: bool) -> dict[str, Any]:
        """Requests before the runs, during them, and as many as the server takes; how the runs ended."""
        server = self.serve()
        idle = asked(server, 1, PAUSE_SECONDS, lambda: time.sleep(CALM_SECONDS))
        blend = small_blend(self.folder, shards * ROWS_OF_A_SHARD)
        address, _ = self.stack.enter_context(scheduler(self.folder))
        for name in ("one", "two"):
            self.stack.enter_context(worker(address, self.folder, name))
        found = self.stack.enter_context(deployed(server, self.folder))
        outs, before = [self.folder / f"out-{number}" for number in range(runs)], self.size()
        ids = found.start(blend, outs, shard_size=ROW_BYTES * ROWS_OF_A_SHARD, cluster=address)

        def work() -> None:
            if kill:
                self.kill_and_serve(server, outs, runs * shards // 3)
            ended(found, ids)

        under = asked(server, 1, PAUSE_SECONDS, work)
        ends = {"states": found.states(ids), "shards": sum(map(receipts, outs)), "bytes": self.size() - before}
        full = asked(server, CLIENTS, 0, lambda: time.sleep(FULL_SECONDS))
        return {"idle": idle, "under": under, "full": full, **ends}

    def kill_and_serve(self, server: PrefectServer, outs: Sequence[Path], shards: int) -> None:
        """Kill the server once so many shards are built, and start another."""
        while sum(map(receipts, outs)) < shards:
            time.sleep(0.1)
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
        self.serve()


def ended(found: Deployed, ids: Sequence[UUID]) -> None:
    """Wait until all runs have ended."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline and found.states(ids).keys() - FINAL:
        time.sleep(2)


def main() -> None:
    """Measure what the arguments say."""
    database, runs, shards, mode = sys.argv[1:]
    with TemporaryDirectory() as name, ExitStack() as stack:
        Path(name, "home").mkdir()
        own = stack.enter_context(postgresql()) if database == "postgresql" else {}
        load = Load(Path(name), own, free_port(), stack)
        found = load.measure(int(runs), int(shards), kill=mode == "killed")
        with redirect_stdout(sys.stderr):  # the logs of what has been running
            stack.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
