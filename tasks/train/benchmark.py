"""Benchmarks of training: summarize a run's steps, keep the record as a baseline, and compare runs with it.

    BASELINES/<device>-<configuration>.json     a record, as JSON

Only records with one configuration on one device are compared, so both are in the name of a baseline. The first steps (two by
default) are warm-up and not measured. Single steps vary, so the median and the 90th percentile are recorded too,
and a threshold below a few per cent finds noise.
"""

import hashlib
import math
import os
import platform
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console
from rich.markup import escape
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.kit.parts import Table
from tokenmill.tasks.kit.terminal import print_table
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.receipt import difference, flat
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import join
from tokenmill.tasks.strict import Strict, parse

from .events import Started, TrainStep
from .job import Job
from .results import perplexity
from .settings import RUNTIME_SETTINGS

WARMUP = 2
THRESHOLD = 0.05
# The allowed difference in loss between runs of one configuration, in nats per token, due to rounding.
LOSS_BOUND = 0.02

# Settings that affect neither a step nor its loss, and those that the record holds separately.
IGNORED = {*RUNTIME_SETTINGS - {"nodes"}, "device"}

LIBRARIES = ("tokenmill", "torch", "megatron-core", "transformers")
DRIVER = Path("/proc/driver/nvidia/version")


class Environment(Strict, frozen=True):
    """The machine of a record."""

    python: str
    cpus: int
    driver: str | None  # version of NVIDIA's driver, None without one
    versions: dict[str, str]


class BenchmarkRecord(Strict, frozen=True):
    """The steady state of a training run."""

    key: str  # identifies the configuration and the device
    engine: str
    device: str
    processes: int
    parameters: int
    configuration: dict[str, Any]  # settings and data that a step depends on, by dotted name
    warmup: int  # unmeasured steps before the measured ones
    steps: int
    seconds: float
    tokens: int
    loss_tokens: int
    tokens_per_second: float  # over all processes
    loss_tokens_per_second: float
    step_seconds_median: float
    step_seconds_p90: float
    waited: float  # share of time
    padding: float  # share of tokens
    mfu: float | None  # the median, None if the device's peak is unknown
    memory: int  # peak in bytes of the fullest process
    loss: float  # mean per measured token, in nats
    perplexity: float | None
    final_loss: float
    environment: Environment
    recorded_at: str


def summarise(job: Job, started: Started, steps: Sequence[TrainStep], warmup: int = WARMUP) -> BenchmarkRecord:
    """Summarize a run: `started` is its last start, `steps` are from all starts.

    Raises InputError unless more than `warmup` steps followed.
    """
    since = {step.step: step for step in steps if step.step > started.step}  # the latest of repeated steps
    measured = list(since.values())[warmup:]
    if not measured:
        raise InputError(
            f"steps: {len(since)} were run since the start, the first {warmup} of them as warm-up; train at least {warmup + 1}"
        )
    seconds = math.fsum(step.seconds for step in measured)
    tokens, loss_tokens = sum(step.tokens for step in measured), sum(step.loss_tokens for step in measured)
    nll = math.fsum(step.loss * step.loss_tokens for step in measured)
    each, rates = [step.seconds for step in measured], [step.mfu for step in measured if step.mfu is not None]
    # Settings and data that a step and its loss depend on, by dotted name: they decide which runs can be compared.
    data = {"kind": job.data.kind, "tokenizer": job.data.fingerprint, "pack_size": job.data.pack_size}
    sources = {
        source.dataset: {"tokens": source.tokens, "weight": math.fsum(source.weights)}
        for source in job.data.of("train")
    }
    settings = job.settings.model_dump(mode="json", exclude=IGNORED)
    configuration = {**dict(flat({**settings, "data": data, "source": sources})), "engine": started.engine}
    device = re.sub(r"[^a-z0-9]+", "-", started.device.lower()).strip("-")
    digest = hashlib.sha256(orjson.dumps(configuration, option=orjson.OPT_SORT_KEYS)).hexdigest()
    described = DRIVER.read_text("utf-8") if DRIVER.is_file() else ""
    driver = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", described)
    versions: dict[str, str] = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    environment = Environment(
        python=platform.python_version(), cpus=os.cpu_count() or 1, driver=driver.group(1) if driver else None,
        versions=versions,
    )  # fmt: skip
    return BenchmarkRecord(
        key=f"{device}-x{started.processes}-{digest[:16]}", engine=started.engine, device=started.device,
        processes=started.processes, parameters=started.parameters, configuration=configuration, warmup=warmup,
        steps=len(measured), seconds=seconds, tokens=tokens, loss_tokens=loss_tokens,
        tokens_per_second=tokens / seconds, loss_tokens_per_second=loss_tokens / seconds,
        step_seconds_median=statistics.median(each), step_seconds_p90=float(np.quantile(each, 0.9)),
        waited=math.fsum(step.waited for step in measured) / seconds,
        padding=sum(step.padding for step in measured) / tokens,
        mfu=statistics.median(rates) if rates else None, memory=max(step.memory for step in measured),
        loss=nll / loss_tokens if loss_tokens else 0.0, perplexity=perplexity(nll, loss_tokens),
        final_loss=measured[-1].loss, environment=environment,
        recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def record(found: BenchmarkRecord, folder: str) -> str:
    """Write a record as the baseline of its configuration and device, and return its path."""
    content = orjson.dumps(found.model_dump(), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
    return publish_bytes(_place(folder, found.key), content).path


def baseline_of(found: BenchmarkRecord, folder: str) -> BenchmarkRecord:
    """Return the baseline of the same configuration and device. Raises InputError if there is none."""
    place = _place(folder, found.key)
    if read_bytes(place) is None:
        raise InputError(
            f"{folder}: no baseline of this configuration on {found.processes} x {found.device} ({found.key}.json); record "
            "one first"
        )
    return read_record(place)


def read_record(path: str) -> BenchmarkRecord:
    """Return the record in a file. Raises InputError."""
    content = read_bytes(path)
    if content is None:
        raise InputError(f"{path}: no such file; name a record that tokenmill benchmark wrote")
    try:
        return parse(BenchmarkRecord, orjson.loads(content), path)
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON: {error}; record the baseline again") from error


def _place(folder: str, key: str) -> str:
    return join(folder, f"{key}.json")


# The compared figures, and the sign of a change for the worse.
WORSE = {
    "tokens_per_second": -1, "loss_tokens_per_second": -1, "step_seconds_median": 1, "step_seconds_p90": 1, "memory": 1,
}  # fmt: skip


class MetricChange(Strict, frozen=True):
    """A figure and its baseline."""

    name: str
    ours: float
    baseline: float
    change: float | None  # relative, None for a baseline of 0
    regressed: bool  # at least the threshold worse


class BenchmarkComparison(Strict, frozen=True):
    """A run and its baseline."""

    key: str
    threshold: float
    changes: list[MetricChange]
    loss_difference: float
    loss_differs: bool  # by more than the bound in nats per token, in either direction

    @property
    def regressed(self) -> list[str]:
        """Name metrics that are worse by the threshold or more."""
        return [change.name for change in self.changes if change.regressed]


def compare(
    found: BenchmarkRecord, baseline: BenchmarkRecord, threshold: float = THRESHOLD, loss_bound: float = LOSS_BOUND
) -> BenchmarkComparison:
    """Compare a record with a baseline; `threshold` is relative. Raises InputError unless their configurations are equal."""
    if differing := difference(_compared(baseline), _compared(found)):
        named = ", ".join(f"{name} ({ours!r} here, {theirs!r} there)" for name, (theirs, ours) in differing.items())
        raise InputError(
            f"baseline: it was recorded with a different {named}; benchmark the same configuration on the same device, or "
            "record a new baseline"
        )
    changes: list[MetricChange] = []
    for name, sign in WORSE.items():
        ours, theirs = float(getattr(found, name)), float(getattr(baseline, name))
        change = (ours - theirs) / theirs if theirs else None
        regressed = 0 < sign * (change or 0.0) >= threshold
        changes.append(MetricChange(name=name, ours=ours, baseline=theirs, change=change, regressed=regressed))
    lost = found.loss - baseline.loss
    return BenchmarkComparison(
        key=found.key, threshold=threshold, changes=changes, loss_difference=lost, loss_differs=abs(lost) > loss_bound
    )


def _compared(found: BenchmarkRecord) -> dict[str, Any]:
    """The fields that must be equal in two records."""
    return {"device": found.device, "processes": found.processes, "warmup": found.warmup, **found.configuration}


def print_record(found: BenchmarkRecord, console: Console) -> None:
    """Print a record."""
    used = "" if found.mfu is None else f", {found.mfu:.1%} of the peak"
    measured = f"{found.steps} steps measured after {found.warmup} of warm-up"
    step = f"step {found.step_seconds_median:.4g} s (median), {found.step_seconds_p90:.4g} s (90th percentile)"
    lines = (
        f"{found.engine} on {found.processes} x {found.device}, {found.parameters:,} parameters: {measured}",
        f"  {found.tokens_per_second:,.0f} tokens/s, {found.loss_tokens_per_second:,.0f} of them trained on{used}",
        f"  {step}, {found.waited:.1%} of the time waiting for data",
        f"  {found.padding:.1%} padding, {found.memory / 1e9:.2f} GB peak memory in the fullest process",
        f"  loss {found.loss:.4f} over these steps, {found.final_loss:.4f} in the last",
    )
    for line in lines:
        console.print(escape(line), highlight=False)


def print_comparison(comparison: BenchmarkComparison, console: Console) -> None:
    """Print a comparison."""
    rows = [
        (
            change.name, f"{change.ours:,.6g}", f"{change.baseline:,.6g}",
            "-" if change.change is None else f"{change.change:+.1%}", "regressed" if change.regressed else "ok",
        )
        for change in comparison.changes
    ]  # fmt: skip
    verdict = "differs" if comparison.loss_differs else "ok"
    rows.append(("loss", "", "", f"{comparison.loss_difference:+.4f} nats", verdict))
    print_table(
        console, Table(f"against the baseline {comparison.key}", ("measure", "now", "baseline", "change", ""), rows)
    )
