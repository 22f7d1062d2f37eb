"""What only a GPU shows, in one command: `python -m bench gpu`, or `make gpu WHEELS=FOLDER` on a machine without an index.

Each part of `bench/gpu_parts.py` runs in a process of its own, within its own time limit, the most valuable first; all limits
together are 25 minutes. What a part has measured before it fails or is stopped counts. Results go to `bench/gpu-results.json`
and, with the device's name, into the table of `bench/RESULTS.md`.

`--dry-run` runs every part on the CPU at toy size, with four times the time, and writes `build/bench/gpu-dry-run.json` alone: it
shows that the code runs.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import child, record
from bench.record import Measure

PARTS = {"train": 780, "scores": 300, "server": 150, "trainers": 150, "loading": 120}
"""The most seconds of each part."""

RESULTS = child.ROOT / "bench/gpu-results.json"
DRY = child.ROOT / "build/bench/gpu-dry-run.json"


def main(arguments: list[str]) -> int:
    """Run the named parts, or all; the exit code."""
    dry, names = "--dry-run" in arguments, [each for each in arguments if each != "--dry-run"]
    if unknown := sorted(set(names) - set(PARTS)):
        print(f"unknown part: {', '.join(unknown)}; known: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    device = "cpu" if dry else _device()
    if device is None:
        print("no GPU here: nvidia-smi lists none; --dry-run runs every part on the CPU", file=sys.stderr)
        return 1
    console, load, parts = Console(stderr=True), os.getloadavg()[0], dict[str, Any]()
    for name in names or PARTS:
        seconds = PARTS[name] * (4 if dry else 1)
        console.print(f"{name}, at most {seconds} s …")
        parts[name] = run_part(name, seconds, dry=dry)
        _write(DRY if dry else RESULTS, device, parts)
    measures = [Measure(**each) for part in parts.values() for each in part["measures"]]
    record.show(measures, load)
    for name, part in parts.items():
        for reason in [*part["skipped"], *([part["failed"]] if part["failed"] else [])]:
            console.print(f"{name}: {reason}", markup=False, soft_wrap=True)
    if not dry:
        record.document(child.ROOT / "bench/RESULTS.md", measures, load)
    return 1 if any(part["failed"] for part in parts.values()) else 0


def run_part(name: str, seconds: float, *, dry: bool) -> dict[str, Any]:
    """Run a part in a process group of its own; what it measured, what it left out and why, and why it failed."""
    command = [sys.executable, "-m", "bench.gpu_parts", name, *(["--dry-run"] if dry else [])]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if dry else {}
    started, failed = time.perf_counter(), None
    with subprocess.Popen(
        command, cwd=child.ROOT, env={**os.environ, **child.ENVIRONMENT, **hidden}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            failed = f"failed: stopped after {seconds:g} s"
    if process.returncode and failed is None:
        failed = f"failed: exit code {process.returncode}: {err[-2000:]}"
    told = [json.loads(line) for line in out.splitlines() if line.startswith(('{"measure"', '{"skipped"'))]
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "measures": [each["measure"] for each in told if "measure" in each],
        "skipped": [each["skipped"] for each in told if "skipped" in each],
        "failed": failed,
    }


def tell(found: Measure | str) -> None:
    """A line of a part's output: a measure, or what is skipped and why."""
    print(
        json.dumps({"skipped": f"skipped: {found}"} if isinstance(found, str) else {"measure": asdict(found)}),
        flush=True,
    )


def _device() -> str | None:
    """The name of the first GPU, as its driver tells it."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return names[0].strip() if names else None


def _write(path: Path, device: str, parts: dict[str, Any]) -> None:
    """The results so far: a run that is cut off has left them."""
    installed = {each.name: each.version for each in distributions()}
    found = {
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            name: installed[name] for name in (*record.PACKAGES, "vllm", "transformer_engine") if name in installed
        },
        "parts": parts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
