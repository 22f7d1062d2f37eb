"""Training on megatron-core, beside plain `transformers` on the same model, rows and device, in the same run.

On a GPU it is the configuration `small`, on a CPU `tiny`: what a CPU shows of a small model says nothing about a GPU, so
the device stands in the title. Both engines are trainers as users start them, on packed-in documents of the corpus that
the other benchmarks use; steady-state figures are those of `tokenmill benchmark`. The peer is no slow loop: it has torch's
own attention, autocast and fused optimizer, and nothing of ours.
"""

import json
import shutil
import tempfile
from pathlib import Path

import yaml
from tokenmill.tasks.strict import parse
from tokenmill.tasks.train.benchmark import BenchmarkRecord, summarise
from tokenmill.tasks.train.events import Started, TrainStep
from tokenmill.tasks.train.job import JOB
from tokenmill.tasks.train.launchers import launch_of
from tokenmill.tasks.train.launchers.launch import gpu_count, process_count
from tokenmill.tasks.train.pipeline_settings import config_place
from tokenmill.tasks.train.preflight import plan_training
from tokenmill.tasks.train.settings import TrainSettings
from tokenmill.tasks.train.watch import run

from bench.bench import Bench
from bench.record import Measure
from tests import preparing

STEPS = {"small": 30, "tiny": 12}
MOST_WAITED = 1.0
"""Per cent of the time that may be spent waiting for data."""

SHARE = 0.02
"""Of the corpus."""


def measure(bench: Bench) -> list[Measure]:
    """Tokens a second of both engines, the share of the peak, and the share of time spent waiting for data."""
    size = "small" if gpu_count() else "tiny"
    folder = Path(tempfile.mkdtemp())
    try:
        data = _prepared(bench, folder)
        ours, plain = (_trained(data, folder / engine, size, engine) for engine in ("megatron-core", "transformers"))
    finally:
        shutil.rmtree(folder)
    ratio = ours.tokens_per_second / plain.tokens_per_second
    facts = {"ours": ours.model_dump(), "plain": plain.model_dump()}
    title = f"training on {ours.device}, {ours.parameters / 1e6:,.0f} M parameters ({size})"
    return [
        Measure(title, _figures(ours), f"{_figures(plain)} (plain transformers)", ratio, "x", 1.0, True, facts),
        Measure(
            "waiting for data while training", f"{ours.waited:.2%}", "0 %", 100 * ours.waited, "%", MOST_WAITED, False
        ),
    ]


def _prepared(bench: Bench, folder: Path) -> str:
    with Path(bench.corpus(SHARE).path).open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    blend = preparing.blend_of(preparing.write_lines(folder / "texts.jsonl", texts))
    preparing.prepare(blend, folder / "data", tokenizer={"model": "cl100k_base"})
    return str(folder / "data")


def _trained(data: str, folder: Path, size: str, engine: str) -> BenchmarkRecord:
    """What a training by `engine` came to."""
    chosen = yaml.safe_load(config_place(size).read_text())
    chosen |= {"engine": engine, "steps": STEPS[size], "max_epochs": None}
    chosen.pop("checkpoint_every")
    chosen.pop("validate_every", None)
    if engine == "transformers":
        chosen["optimizer"] = {name: value for name, value in chosen["optimizer"].items() if name != "distributed"}
    job = plan_training(data, parse(TrainSettings, chosen, "settings"), str(folder))
    folder.mkdir()
    (folder / JOB).write_text(job.model_dump_json())
    heard: list = []
    run(launch_of(job, process_count(job.settings)), heard.append, lambda _: None)
    (started,) = [event for event in heard if isinstance(event, Started)]
    return summarise(job, started, [event for event in heard if isinstance(event, TrainStep)])


def _figures(found: BenchmarkRecord) -> str:
    mfu = "" if found.mfu is None else f", MFU {found.mfu:.0%}"
    return f"{found.tokens_per_second:,.0f} tokens/s{mfu}, {found.memory / 1e9:.1f} GB"
