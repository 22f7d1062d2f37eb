"""The parts of `bench gpu`: `python -m bench.gpu_parts NAME [--dry-run]` prints a JSON line per measure or step left out.

They run tokenmill's commands as users type them, and take figures from the records that these leave. A dry run differs in its
`Scale` alone.
"""

import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenmill.flows.cli import run
from tokenmill.tasks.score.models import load_scorer
from tokenmill.tasks.score.nll import Completions
from tokenmill.tasks.score.weights import find_model
from tokenmill.tasks.train.benchmark import LOSS_BOUND, BenchmarkRecord, summarise
from tokenmill.tasks.train.checkpoints import steps_in
from tokenmill.tasks.train.engine import joined
from tokenmill.tasks.train.history import history_of, recorded_run
from tokenmill.tasks.train.job import Job
from tokenmill.tasks.train.model import configuration
from tokenmill.tasks.train.rows import document_rows
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench import child, nll_speed
from bench.bench import Bench
from bench.gpu import tell
from bench.record import Measure

Found = Iterator[Measure | str]

COMPARED, EPSILON = 200, {"float32": 1e-6, "bfloat16": 2e-2}
"""Rows that are scored on a CPU too, and the difference that each precision may have, relative to the largest value."""

BLENDS = child.ROOT / "blends"

PORT = 8123
"""Of the vLLM server."""


@dataclass(frozen=True)
class Scale:
    """What a dry run does smaller: the settings of a training and its steps, the shape of a model that scores, the number of rows
    to score, that of sequences for `nll_speed`.
    """

    device: str
    model: tuple[str, ...]
    rows: tuple[str, ...]
    steps: int
    scored: dict[str, int]
    count: int
    sequences: int


TOY = Scale(
    "cpu", ("model.layers=1", "model.hidden=16", "model.heads=2", "model.feed_forward=32", "model.tied_embeddings=true"),
    ("sequence_length=32", "global_batch=2", "micro_batch=2"), 6,
    {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, 24, 8,
)  # fmt: skip
REAL = Scale(
    "cuda", ("model.layers=16", "model.hidden=1024", "model.heads=16", "model.key_value_heads=16", "model.feed_forward=2816",
             "model.tied_embeddings=true"),
    ("sequence_length=2048", "global_batch=128", "micro_batch=16"), 380,
    {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 14, "num_attention_heads": 10}, 4_000, 2_000,
)  # fmt: skip
"""300 million parameters on 100 million tokens; half a billion that score."""


def train(scale: Scale, folder: Path) -> Found:
    """megatron-core and plain PyTorch on the same rows; planned = observed after a kill; the losses of a CPU in float32."""
    data, low = prepared(scale), ("precision=bfloat16", f"device={scale.device}")
    if importlib.util.find_spec("transformer_engine") is None:
        yield "Transformer Engine isn't installed; attention is torch's"
    model, saving = folder / "ours", f"checkpoint_every={scale.steps // 3}"
    command = training(data, model, *scale.model, *scale.rows, *low, f"steps={scale.steps}", saving)
    kill_when(command, lambda: bool(steps_in(str(model))))
    called(*command)
    called("verify", str(model))
    yield least("planned = observed after kill -9", f"{scale.steps:,} steps proven", "the order", 100, "%", 100)
    job, *recorded = recorded_run(str(model))
    ours, plain = summarise(job, *recorded, 1), plain_speed(job, scale.device, min(10, scale.steps))
    title = f"training in bfloat16 on {ours.device}, {ours.parameters / 1e6:,.0f} M parameters"
    other, ratio = f"{plain:,.0f} tokens/s (PyTorch SDPA)", ours.tokens_per_second / plain
    yield least(title, figures(ours), other, ratio, "x", 1.0, {"ours": ours.model_dump(), "plain": plain})
    losses: list[list[float]] = []
    for name, chosen in (("low", low), ("exact", ("precision=float32", "device=cpu"))):
        steps = f"steps={min(20, scale.steps)}"
        called(*training(data, folder / name, *TOY.model, *TOY.rows, steps, *chosen))
        losses.append([step.loss for _, step in sorted(history_of(str(folder / name)).steps.items())])
    first, last = f"loss of the first {len(losses[0])} steps", [f"{each[-1]:.4f}" for each in losses]
    yield most(f"{first} on {ours.device}", last[0], f"{last[1]} (CPU, float32)", apart(*losses), "nats", LOSS_BOUND)


def plain_speed(job: Job, device: str, steps: int) -> float:
    """Tokens per second of plain PyTorch with a job's model and batch, on random tokens."""
    settings = job.settings
    vocabulary, length, rows = (
        settings.model.vocabulary(job.data.vocabulary_size),
        settings.sequence_length,
        settings.micro_batch,
    )
    model = LlamaForCausalLM(configuration(settings.model, vocabulary, length, None)).to(device)
    optimizer, seconds = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), []
    for _ in range(steps):
        began = time.perf_counter()
        for _ in range(settings.global_batch // rows):
            ids = torch.randint(vocabulary, (rows, length), device=device)
            with torch.autocast(device, torch.bfloat16):
                loss = model(ids, labels=ids).loss
            (loss * rows / settings.global_batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    return settings.global_batch * length / statistics.median(seconds[1:])


def scores(scale: Scale, folder: Path) -> Found:
    """NLL and embeddings: speed, equality with a CPU, a kill, and NaN."""
    yield from nll_speed.measure(Bench.from_environment(), scale.sequences)
    rows, few = (write_rows(folder / f"{count}.jsonl", count) for count in (scale.count, min(COMPARED, scale.count)))
    model, device = saved_model(scale, folder / "model"), f"device={scale.device}"
    for what, column, more in (
        ("nll", "nll_mean", ()),
        ("embed", "embedding", ("engine=transformers", "pooling=mean")),
    ):
        exact = scored(what, few, folder / what, model, "device=cpu", "precision=float32", *more)[column]
        for precision in ("bfloat16",) if scale is TOY else EPSILON:
            found = scored(what, few, folder / f"{what}-{precision}", model, device, f"precision={precision}", *more)[
                column
            ]
            title, share = f"{what} in {precision} on {scale.device}", apart(found, exact) / np.abs(exact).max()
            yield most(title, f"{len(found):,} rows", "CPU, float32", share, "relative", EPSILON[precision])
    killed = ["score", "nll", rows, "--output-dir", str(folder / "killed"), f"model={model}", "shard_size=1000", device]
    kill_when(killed, lambda: any((folder / "killed/shards/nll").glob("*/receipt.json")))
    called(*killed)
    counts = json.loads((folder / "killed/manifest.json").read_bytes())["volatile"]["shards"]
    yield least(
        "shards kept after kill -9", f"{counts['reused']:,}", f"of {counts['total']:,}", counts["reused"], "", 1
    )
    _, seconds = timed(lambda: scored("nll", rows, folder / "speed", model, device))
    yield least(
        f"score nll on {scale.device}", f"{scale.count:,} rows", f"{seconds:.1f} s", scale.count / seconds, "rows/s", 1
    )
    growth, peak = memory_growth(model, scale.device)
    yield most(f"memory of score nll on {scale.device}", f"{peak / 1e9:.2f} GB", "after 10 batches", growth, "x", 1.05)
    spoiled = saved_model(scale, folder / "spoiled", spoiled=True)
    code = run(["score", "nll", few, "--output-dir", str(folder / "nan"), f"model={spoiled}", device])
    yield least("NaN ends a run", f"exit code {code}", "1", code, "", 1)


def memory_growth(model: str, device: str) -> tuple[float, int]:
    """How much the memory of a scorer grows from its tenth batch to its fortieth, and its last peak in bytes."""
    scorer, generator, used = load_scorer(find_model(model), device=device), np.random.default_rng(0), list[int]()
    for _ in range(40):
        lengths = generator.integers(2, 200, 64)
        ids, ones = generator.integers(1, 90, int(lengths.sum())).astype(np.int32), np.ones(int(lengths.sum()), np.int8)
        scorer.score(Completions(ids, np.cumsum([0, *lengths]), ones, ones))
        on_gpu = device == "cuda"
        used.append(torch.cuda.memory_allocated() if on_gpu else psutil.Process().memory_info().rss)
    return used[-1] / used[9], torch.cuda.max_memory_allocated() if on_gpu else used[-1]


def server(scale: Scale, folder: Path) -> Found:
    """A vLLM server beside the engine of this process."""
    vllm = Path(sys.executable).with_name("vllm")
    if not vllm.exists():
        yield f"vLLM isn't installed beside {sys.executable}"
        return
    rows, model = write_rows(folder / "rows.jsonl", scale.count), saved_model(scale, folder / "model")
    here, own = timed(lambda: scored("nll", rows, folder / "here", model, f"device={scale.device}"))
    with serving(vllm, model) as url:
        there, its = timed(lambda: scored("nll", rows, folder / "there", "tiny", "engine=server", f"server={url}"))
    share = apart(here["nll_mean"], there["nll_mean"]) / np.abs(here["nll_mean"]).max()
    yield most("NLL of a vLLM server", f"{scale.count:,} rows", "this process", share, "relative", EPSILON["bfloat16"])
    yield least("score nll by a vLLM server", f"{its:.1f} s", f"{own:.1f} s in this process", own / its, "x", 1)


def trainers(scale: Scale, folder: Path) -> Found:
    """Megatron-LM's own pretrain_gpt.py on our data, by the script that `launcher=megatron-lm` writes."""
    model, chosen = folder / "megatron-lm", ("launcher=megatron-lm", "processes=1", "steps=200")
    called(*training(prepared(scale), model, *scale.model, *scale.rows, *chosen))
    if scale is TOY or "MEGATRON_LM" not in os.environ:
        yield "Megatron-LM needs a GPU, and MEGATRON_LM=FOLDER of its sources"
    else:
        _, seconds = timed(lambda: subprocess.run(["bash", str(model / "train.sh")], check=True))
        called("verify", str(model))
        yield least("Megatron-LM, 200 steps", f"{seconds:.0f} s", "the order", 100, "% proven", 100)
    yield "Megatron-Bridge needs its container, and a model's own tokenizer: run the script of launcher=megatron-bridge there"


def loading(scale: Scale, folder: Path) -> Found:
    """A benchmark against its own baseline, the share of a step that waits for data (synthetic data would save no more), and how fast
    loaders of 1 and 8 processes, as Megatron-LM starts them, read the same rows.
    """
    data, kept = prepared(scale), ("--baselines", str(folder / "baselines"))
    steps, device = f"steps={min(20, scale.steps)}", f"device={scale.device}"
    for name, more in (("first", ("--record",)), ("second", ("--compare", "--threshold", "0.9"))):
        command = training(data, folder / name, *scale.model, *scale.rows, steps, device)
        called("benchmark", *command[1:], *more, *kept)
    first, second = (summarise(*recorded_run(str(folder / name))) for name in ("first", "second"))
    ratio = second.tokens_per_second / first.tokens_per_second
    yield least("the same benchmark again", figures(second), figures(first), ratio, "x", 0.95)
    yield most(
        f"waiting for data, training on {second.device}", f"{second.waited:.2%}", "0 %", 100 * second.waited, "%", 1
    )
    job, needed = recorded_run(str(folder / "second"))[0], second.tokens_per_second
    for processes in (1, 8):
        read = loader_speed(job, processes, folder / f"loaders-{processes}")
        yield least(
            f"reading in {processes} loader processes",
            f"{read:,.0f} tokens/s",
            f"{needed:,.0f} (training)",
            read / needed,
            "x",
            1,
        )
    yield "near-duplicates on a GPU: no library of tokenmill's finds them there"


def loader_speed(job: Job, processes: int, folder: Path) -> float:
    """Tokens per second that `processes` read from the rows of a job, without the first batch."""
    length, size = job.settings.sequence_length, job.settings.micro_batch
    with joined("cpu"):  # megatron-core writes its indices in the process of rank 0
        rows, _ = document_rows(job.data, length, (64 * size, 0), job.settings.seed, str(folder))
    assert rows is not None
    batches = iter(DataLoader(rows.samples, batch_size=size, num_workers=processes))
    next(batches)
    rest, seconds = timed(lambda: len(list(batches)))
    return rest * size * length / seconds


def prepared(scale: Scale) -> str:
    """The bundled blend, or the corpus of the other benchmarks, tokenized once for all parts."""
    bench = Bench.from_environment()
    blend = str(BLENDS / "tiny.json") if scale is TOY else bench.corpus().path
    data = str(bench.folder / f"gpu-data-{scale.device}")
    called("pretrain", blend, "--output-dir", data, "tokenizer.model=cl100k_base")
    return data


def write_rows(path: Path, count: int) -> str:
    """Questions and answers of different lengths in Harmony."""
    text = "<|start|>user<|message|>Count to {}.<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"
    rows = (
        {"row_id": str(n), "text": text.format(n % 97, " ".join(map(str, range(n % 97 + 1))))} for n in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def saved_model(scale: Scale, folder: Path, *, spoiled: bool = False) -> str:
    """A model of random weights that reads Harmony, with a tokenizer for embeddings; a spoiled one gives NaN."""
    words = Tokenizer(WordLevel({"<end>": 0, **{str(n): n + 1 for n in range(97)}}, unk_token="<end>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    likely = scale.scored["hidden_size"] ** -0.5  # some tokens are more likely than others
    config = LlamaConfig(vocab_size=201_088, initializer_range=likely, tie_word_embeddings=True, **scale.scored)
    model = LlamaForCausalLM(config)
    if spoiled:
        with torch.no_grad():
            model.model.norm.weight.fill_(math.nan)
    model.save_pretrained(folder)
    return str(folder)


def training(data: str, model: Path, *chosen: str) -> list[str]:
    """The words of a training."""
    return ["train", data, "--output-dir", str(model), "max_epochs=null", *chosen]


def scored(what: str, rows: str, out: Path, model: str, *chosen: str) -> dict[str, np.ndarray]:
    """The columns of `tokenmill score`, in the order of the rows."""
    called("score", what, rows, "--output-dir", str(out), f"model={model}", *chosen)
    table = pq.read_table(sorted(out.rglob("part-*.parquet")))
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


def called(*arguments: str) -> None:
    """Run a command of tokenmill here. Raises RuntimeError if it fails."""
    if code := run([*arguments]):
        raise RuntimeError(f"tokenmill {' '.join(arguments)}: exit code {code}")


def kill_when(arguments: list[str], ready: Callable[[], bool]) -> None:
    """Start a command of tokenmill, and kill it and all that it started once `ready()`, unless it has ended."""
    with subprocess.Popen([child.TOKENMILL, *arguments], start_new_session=True, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not ready():
            time.sleep(0.02)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def serving(vllm: Path, model: str) -> Generator[str]:
    """The URL of a vLLM server of a model, called tiny, once it answers. Raises RuntimeError if it ends before."""
    url, command = (
        f"http://127.0.0.1:{PORT}",
        [str(vllm), "serve", model, "--served-model-name", "tiny", "--port", str(PORT)],
    )
    with subprocess.Popen(
        [*command, "--no-enable-prefix-caching"], start_new_session=True, stdout=sys.stderr
    ) as process:
        try:
            while not answers(f"{url}/health"):
                if process.poll() is not None:
                    raise RuntimeError(f"vLLM ended with {process.returncode}")
                time.sleep(1)
            yield url
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def answers(url: str) -> bool:
    """Whether a server is up."""
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.HTTPError:
        return False


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and its seconds."""
    started = time.perf_counter()
    return call(), time.perf_counter() - started


def apart(left: Any, right: Any) -> float:
    """The largest difference."""
    return float(np.abs(np.subtract(left, right)).max())


def figures(found: BenchmarkRecord) -> str:
    """Speed, share of the peak, and memory."""
    mfu = "" if found.mfu is None else f", MFU {found.mfu:.0%}"
    return f"{found.tokens_per_second:,.0f} tokens/s{mfu}, {found.memory / 1e9:.1f} GB"


def least(name: str, ours: str, other: str, result: float, unit: str, target: float, facts: Any = None) -> Measure:
    """A measure that shall be at least its target."""
    return Measure(name, ours, other, float(result), unit, target, at_least=True, facts=facts or {})


def most(name: str, ours: str, other: str, result: float, unit: str, target: float) -> Measure:
    """A measure that shall be at most its target."""
    return Measure(name, ours, other, float(result), unit, target, at_least=False)


PARTS = {part.__name__: part for part in (train, scores, server, trainers, loading)}

if __name__ == "__main__":
    with TemporaryDirectory() as place:
        for each in PARTS[sys.argv[1]](TOY if "--dry-run" in sys.argv else REAL, Path(place)):
            tell(each)
