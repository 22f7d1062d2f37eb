"""`tokenmill doctor`: the state of this environment, missing or optional parts, and the commands that need them.

It doesn't change anything, and asks only the configured Prefect server. A check never fails the command: parts that a user doesn't need
may be missing. CUDA is found by `nvidia-smi`, because importing torch takes seconds.
"""

import os
import platform
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil
from huggingface_hub import get_token
from rich.console import Console
from tokenmill.tasks.errors import pip_install
from tokenmill.tasks.kit.parts import Table
from tokenmill.tasks.kit.terminal import print_table
from tokenmill.tasks.storage import absolute, is_local

from .autotokenizer import check_autotokenizer

State = Literal["ok", "optional", "missing", "broken"]

# Free bytes below which a disk is too small for all but small blends: an output has 0.5 to 1 bytes per byte of source.
LEAST_DISK = 10e9

WORKER_BYTES = 1e9  # memory that a worker should have
ANSWER_SECONDS = 3.0

# Optional packages: the commands that need each, and the extra that installs it
PACKAGES = {
    "s3fs": ("data on S3", "s3"),
    "gcsfs": ("data on Google Cloud Storage", "gcs"),
    "fasttext-community": ("language and classifiers of tokenmill filter", "filter"),
    "wandb": ("logging to Weights & Biases", "wandb"),
    "torch": ("tokenmill train, evaluate, and score with a model", "train"),
    "transformers": ("tokenmill score with a model", "score"),
    "megatron-core": ("tokenmill train with megatron-core", "train"),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One part: its state, the findings, the commands that need it, and the remedy if it isn't ok."""

    name: str
    state: State
    found: str
    needed_for: str
    remedy: str = ""


def examine(place: str, server: str | None, tokenizer: str | None = None) -> list[Check]:
    """Check everything. Outputs would go to `place`; `server` is the URL of the configured Prefect server, None without one.

    Raises InputError for a `tokenizer` that can't be found.
    """
    needed = "tokenmill push, and private or gated datasets and tokenizers"
    token = Check("Hub token", "ok", "found; it was not tried", needed)
    if not get_token():
        token = Check("Hub token", "optional", "none", needed, "set HF_TOKEN, or run hf auth login")
    packages: list[Check] = []
    for name, (of, extra) in PACKAGES.items():
        try:
            packages.append(Check(name, "ok", version(name), of))
        except PackageNotFoundError:
            packages.append(Check(name, "optional", "not installed", of, pip_install(extra)))
    return [
        Check("Python", "ok", platform.python_version(), "everything"),
        _memory(),
        *([_disk(absolute(place))] if is_local(absolute(place)) else []),
        _prefect(server),
        Check("Dask", "ok", f"distributed {version('distributed')}", "workers on this machine and on clusters"),
        token,
        _cuda(),
        *packages,
        *([_tokenizer(tokenizer)] if tokenizer else []),
    ]


def _memory() -> Check:
    # In a container, fewer cores than the machine has
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = psutil.virtual_memory().available
    found = f"{cores} cores, {free / 1e9:,.1f} GB of memory available"
    if free / cores >= WORKER_BYTES:
        return Check("cores and memory", "ok", found, "a worker for each core, with 1 GB each")
    remedy = f"use --workers {max(1, int(free / WORKER_BYTES))}"
    return Check("cores and memory", "missing", found, "a worker for each core, with 1 GB each", remedy)


def _disk(place: str) -> Check:
    # The output folder needn't exist yet
    folder = next(each for each in (Path(place), *Path(place).parents) if each.is_dir())
    free = shutil.disk_usage(folder).free
    found = f"{free / 1e9:,.1f} GB free in {folder}"
    if not os.access(folder, os.W_OK):
        return Check("disk", "broken", f"{folder} is not writable", "every output", "choose a different --output-dir")
    enough = free >= LEAST_DISK
    return Check(
        "disk", "ok" if enough else "missing", found, "shards and outputs", "" if enough else "free some space"
    )


def _prefect(server: str | None) -> Check:
    needed = "deployments, nightly runs and their UI; commands run without a server"
    if server is None:
        return Check("Prefect server", "optional", "none configured", needed, "make up, or set PREFECT_API_URL")
    try:
        with urllib.request.urlopen(f"{server}/health", timeout=ANSWER_SECONDS):  # noqa: S310 - the user's own server
            return Check("Prefect server", "ok", server, needed)
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        remedy = "start it with prefect server start, or unset PREFECT_API_URL"
        return Check("Prefect server", "broken", f"{server} does not answer: {reason}", needed, remedy)


def _cuda() -> Check:
    needed = "training and scoring at speed; both also run on the CPU"
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check("CUDA", "optional", "no nvidia-smi", needed, "use a machine with an NVIDIA GPU and its driver")
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=True).stdout  # noqa: S603 - the driver's own program
    except (OSError, subprocess.SubprocessError) as error:
        return Check("CUDA", "broken", f"nvidia-smi fails: {error}", needed, "repair the NVIDIA driver")
    devices = [line.partition(" (UUID")[0] for line in listed.splitlines() if line.startswith("GPU ")]
    if devices:
        return Check("CUDA", "ok", "; ".join(devices), needed)
    return Check("CUDA", "optional", "nvidia-smi lists no GPU", needed, "use a machine with an NVIDIA GPU")


def _tokenizer(model: str) -> Check:
    found = check_autotokenizer(model)
    state: State = "missing" if found.not_compared else "broken" if found.differences else "ok"
    remedy = {
        "ok": "",
        "missing": "compare it where transformers can load it",
        "broken": "tokenmill prepares data with the ids of the tokenizer's files; train and serve with a transformers that reads them alike, or "
        "save what AutoTokenizer makes of it with save_pretrained, and prepare the data with that folder",
    }[state]
    return Check("tokenizer", state, found.line, "trainers and vLLM, which load it by AutoTokenizer", remedy)


def print_checks(checks: Sequence[Check], console: Console) -> None:
    """Print a row per check, then the remedies."""
    rows = [(check.name, check.state, check.found, check.needed_for) for check in checks]
    print_table(console, Table("environment", ("", "state", "found", "needed for"), rows))
    for check in checks:
        if check.remedy:
            console.print(f"{check.name}: {check.remedy}", markup=False, highlight=False)


def doctor_record(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the checks as a JSON record."""
    return {"doctor": {"type": "doctor", "checks": [asdict(check) for check in checks]}}
