"""What only a GPU shows, in one command: `python -m bench gpu`, or `make gpu WHEELS=FOLDER` on a machine without an index.

The parts of `bench/gpu_parts.py` run one after the other, the most valuable first, each in its own process and within its own
time limit. A part that hangs is killed, and the measures that it took before count. After each part, results are written to
`bench/gpu-results.json` and, with the device's name, into the table of `bench/RESULTS.md`; earlier parts of the same device stay.
Output is in `build/bench/gpu-PART.log`.

`--dry-run` runs every part on the CPU at toy size, all at once, and writes only `build/bench/gpu-dry-run.json`. Its speeds mean
nothing, but its checks are those of a GPU. `--prepare` makes the data ahead, on any machine; `--seconds=N` limits the whole run.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import distributions
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from bench import child, record
from bench.record import Measure

PARTS = {"train": 600, "scores": 240, "server": 180, "trainers": 120, "loading": 150}
"""The most seconds of each part. `make gpu` has some 200 more to install."""

SECONDS = 1500
RESULTS = child.ROOT / "bench/gpu-results.json"
DRY = child.ROOT / "build/bench/gpu-dry-run.json"
FORK = multiprocessing.get_context("fork")  # each part would import the same libraries for 10 s

Found = Iterator[Measure | str]
"""What a part measures, and the reasons for what it doesn't run."""


def main(arguments: list[str]) -> int:
    """Run the named parts, or all; the exit code."""
    end = time.monotonic() + next((float(each[10:]) for each in arguments if each.startswith("--seconds=")), SECONDS)
    dry, names = "--dry-run" in arguments, [each for each in arguments if not each.startswith("--")] or [*PARTS]
    if unknown := sorted(set(names) - set(PARTS)):
        print(f"unknown part: {', '.join(unknown)}; known: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    os.environ.update(
        child.ENVIRONMENT, PYTORCH_NVML_BASED_CUDA_CHECK="1"
    )  # or torch starts CUDA, which no fork can use
    warnings.simplefilter("ignore")  # of missing optional libraries
    if dry:
        os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    device = "cpu" if dry or "--prepare" in arguments else _device()
    if device is None:
        return 1
    from bench import gpu_parts  # noqa: PLC0415 - imports torch, after the environment is set

    scale = gpu_parts.TOY if dry else gpu_parts.REAL
    if "--prepare" in arguments:
        print(gpu_parts.prepared(scale))
        return 0
    started = (Part(name, lambda folder, name=name: gpu_parts.PARTS[name](scale, folder)) for name in names)
    console, load, found = Console(stderr=True), os.getloadavg()[0], {} if dry else _known(device)
    for part in [*started] if dry else started:
        seconds = max(0.0, min(PARTS[part.name], end - time.monotonic()))
        console.print(f"{part.name}, at most {seconds:.0f} s …")
        found[part.name] = result = part.result(seconds)
        for reason in [*result["not_run"], *result["failed"]]:
            console.print(f"{part.name}: {reason}", markup=False, soft_wrap=True)
        _write(DRY if dry else RESULTS, device, found)
        if not dry:
            named = [Measure(**{**row, "name": f"{row['name']} ({device})"}) for row in result["measures"]]
            record.document(child.ROOT / "bench/RESULTS.md", named, load)
    record.show([Measure(**row) for name in names for row in found[name]["measures"]], load)
    return 1 if any(found[name]["failed"] for name in names) else 0


class Part:
    """A part that runs, in a process group of its own."""

    def __init__(self, name: str, work: Callable[[Path], Found]) -> None:
        self.name, self._began = name, time.perf_counter()
        self._log = child.ROOT / f"build/bench/gpu-{name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._folder = TemporaryDirectory(dir=self._log.parent, ignore_cleanup_errors=True)
        self._told, telling = FORK.Pipe(duplex=False)
        self._process = FORK.Process(target=_work, args=(work, Path(self._folder.name), telling, self._log))
        self._process.start()
        telling.close()

    def result(self, seconds: float) -> dict[str, Any]:
        """What it has measured within so many seconds from now, what it didn't run, and why it failed."""
        end, found, failed = time.monotonic() + seconds, list[Measure | str](), list[str]()
        try:
            while self._told.poll(max(0.0, end - time.monotonic())):
                found.append(self._told.recv())
            failed.append(f"stopped after {seconds:g} s")
            with suppress(ProcessLookupError):  # it is too new to have a group
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        except EOFError:
            pass  # it has ended
        self._process.join()
        self._folder.cleanup()
        if self._process.exitcode and not failed:
            failed.append(f"exit code {self._process.exitcode}: {self._log.read_text(errors='replace')[-2000:]}")
        measures = [each for each in found if isinstance(each, Measure)]
        failed += [f"{each.name}: {each.reached}, not {each.wanted}" for each in measures if not each.holds]
        return {
            "seconds": round(time.perf_counter() - self._began, 1),
            "measures": [asdict(each) for each in measures],
            "not_run": [f"not run: {each}" for each in found if isinstance(each, str)],
            "failed": failed,
        }


def _work(work: Callable[[Path], Found], folder: Path, telling: Connection, log: Path) -> None:
    """Run a part in this process, which is new, and tell what it finds."""
    os.setsid()
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for output in (1, 2):  # also of the processes that it starts
        os.dup2(sys.stdout.fileno(), output)
    for found in work(folder):
        telling.send(found)


def _device() -> str | None:
    """The name of the GPU, if torch can compute on it."""
    program = "import torch; torch.ones(1, device='cuda').sum().item(); print(torch.cuda.get_device_name())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        reason = (done.stderr.splitlines() or ["no output"])[-1]
        print(f"torch finds no GPU here: {reason}; --dry-run runs every part on the CPU", file=sys.stderr)
        return None
    return done.stdout.strip()


def _known(device: str) -> dict[str, Any]:
    """The results of earlier runs on the same device."""
    known = json.loads(RESULTS.read_bytes()) if RESULTS.exists() else {}
    return known["parts"] if known.get("device") == device else {}


def _write(path: Path, device: str, parts: dict[str, Any]) -> None:
    """Write the results so far."""
    installed = {each.name: each.version for each in distributions()}
    names = [name for name in (*record.PACKAGES, "vllm", "transformer_engine") if name in installed]
    found = {
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: installed[name] for name in names},
        "parts": parts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
