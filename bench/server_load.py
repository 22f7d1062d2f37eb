"""What a Prefect server takes: 20 runs of a deployment at once with 10,000 shards in all, on SQLite and on PostgreSQL.

A request is what a run sends (the update of its progress) or what the UI asks (the latest runs), by turns, ten times a second
beside the runs. Beside them stands the same request to the idle server. The runs share a Dask cluster of two workers; a row says
how many of them completed, because SQLite locks writers out and a run whose request fails for long crashes. Twenty clients
without a pause then show how many requests the server takes. On few cores the runs and the server compete, so that their start-up
is most of the slowest hundredth.

PostgreSQL is Debian's (`bench/databases.py`); without it there is no row for it.
"""

import json

from bench import child
from bench.bench import Bench
from bench.record import Measure

RUNS, SHARDS = 20, 500
MOST_MILLISECONDS = 1_000.0
DATABASES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}


def measure(bench: Bench) -> list[Measure]:
    """Three rows for each database that there is."""
    from bench.databases import MISSING  # noqa: PLC0415 - it imports pytest, and the process that measures stays small

    return [row for database in DATABASES if database == "sqlite" or not MISSING for row in _measured(database)]


def _measured(database: str) -> list[Measure]:
    found = json.loads(child.python("bench.server_load_worker", database, RUNS, SHARDS, "calm").stdout)
    completed = found["states"].get("Completed", 0)
    name, (idle, under, full) = DATABASES[database], (found[part] for part in ("idle", "under", "full"))
    return [
        Measure(
            f"{RUNS} runs at once, {name}: completed", f"{completed} of {RUNS}", f"{found['shards']:,} shards built",
            completed / RUNS * 100, "%", 100, at_least=True,
        ),
        Measure(
            f"API request under {RUNS} runs, {name}: p99", f"p50 {under['p50']:.0f} ms, p99 {under['p99']:.0f} ms",
            f"p50 {idle['p50']:.0f} ms, p99 {idle['p99']:.0f} ms (idle)", under["p99"], "ms", MOST_MILLISECONDS,
            at_least=False, facts=found,
        ),
        Measure(
            f"API requests of {RUNS} clients, {name}: p99", f"p50 {full['p50']:.0f} ms, {full['failed']} failed",
            f"{full['rate']:.0f} requests per second", full["p99"], "ms", MOST_MILLISECONDS, at_least=False,
        ),
    ]  # fmt: skip
