"""A whole preparation as users start it, `tokenmill pretrain`, with a Prefect home and a cache of its own.

Prefect makes its database on first use, so `warm_up` runs one tiny preparation that is not measured.
"""

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import child
from bench.bench import Bench
from bench.child import Child

START_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Preparation:
    """A finished run: its process, and the wall seconds from the first shard's beginning to the last one's end."""

    process: Child
    stage_seconds: float


def environment(bench: Bench) -> dict[str, str]:
    """Where Prefect and tokenmill keep what they remember between runs."""
    return {"PREFECT_HOME": str(bench.folder / "prefect"), "XDG_CACHE_HOME": str(bench.folder / "cache")}


def write_blend(path: Path, source: Path | str) -> Path:
    """A blend of one dataset."""
    path.write_text(json.dumps({"datasets": [{"name": "benchmark", "path": str(source)}]}), encoding="utf-8")
    return path


@contextmanager
def server(bench: Bench) -> Generator[str]:
    """A Prefect server on loopback, as an operator runs one; its API's address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}/api"
    command = [str(Path(child.TOKENMILL).with_name("prefect")), "server", "start", "--host", "127.0.0.1"]
    settings = {"PREFECT_SERVER_API_PORT": str(port), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    with (bench.folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **environment(bench), **settings}, stdout=log, stderr=log
        )
        try:
            _wait_for(f"{address}/health")
            yield address
        finally:
            process.terminate()
            process.wait()


def _wait_for(address: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"no answer from {address} in {START_SECONDS} s; see server.log in the folder of the benchmarks")


def pretrain(bench: Bench, source: Path | str, out: Path, *options: object, api: str | None = None) -> Preparation:
    """Prepare a source with the first of the run's vocabularies; `options` are the command's own, `api` a server's."""
    out.mkdir(parents=True, exist_ok=True)
    blend = write_blend(out / "blend_in.json", source)
    tokenizer = f"tokenizer.model={bench.vocabulary(bench.tokenizers[0]).ours}"
    command = [child.TOKENMILL, "pretrain", blend, "--output-dir", out / "prepared", *options, tokenizer]
    process = child.run([str(word) for word in command], environment(bench) | ({"PREFECT_API_URL": api} if api else {}))
    return Preparation(process, _stage_seconds(out / "prepared"))


def warm_up(bench: Bench) -> None:
    """A preparation of one document."""
    with bench.scratch() as out:
        pretrain(bench, bench.one_document().path, out, "--workers", 1)


def _stage_seconds(prepared: Path) -> float:
    """From the receipts: every shard says when it was begun and how long it took."""
    times = [json.loads(path.read_bytes())["volatile"] for path in prepared.rglob("receipt.json")]
    return max(time["built_at"] + time["seconds"] for time in times) - min(time["built_at"] for time in times)
