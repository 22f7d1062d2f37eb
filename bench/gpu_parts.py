"""The parts of `bench gpu`: generators of measures, and of reasons for what isn't run.

They run tokenmill's commands, and its trainer as `tokenmill train` starts it, but without a Prefect server, which takes some
10 s of each run. A dry run differs only in its `Scale`. Whatever a part yields first counts even if the rest fails.
"""

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import psutil
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenmill.flows.cli import run
from tokenmill.flows.options import choices_of
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.harmony.vocabulary import encoding
from tokenmill.tasks.score.conversations import HarmonyTexts
from tokenmill.tasks.score.models import load_embedder, load_scorer
from tokenmill.tasks.score.nll import Completions
from tokenmill.tasks.score.server import PROBE
from tokenmill.tasks.score.settings import NllSettings
from tokenmill.tasks.score.tables import NonFiniteError
from tokenmill.tasks.score.weights import find_model
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from tokenmill.tasks.train import (
    megatron,  # noqa: F401 - for trainers that are forked
    training,
    watch,
)
from tokenmill.tasks.train.benchmark import LOSS_BOUND, BenchmarkRecord, compare, summarise
from tokenmill.tasks.train.engine import joined
from tokenmill.tasks.train.events import Event, Saved, Started, TrainStep, event_in
from tokenmill.tasks.train.history import history_of
from tokenmill.tasks.train.job import Job
from tokenmill.tasks.train.launchers import launch_of
from tokenmill.tasks.train.launchers.launch import write_files
from tokenmill.tasks.train.model import configuration
from tokenmill.tasks.train.orphans import with_parent
from tokenmill.tasks.train.preflight import check, plan_training
from tokenmill.tasks.train.rows import document_rows
from tokenmill.tasks.train.settings import TrainSettings
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench import child, nll_speed, nll_worker
from bench.bench import Bench
from bench.gpu import FORK, Found
from bench.record import Measure

Trained = tuple[Job, Started, list[TrainStep]]
Trainer = Callable[[Job, Callable[[Event], None]], None]

COMPARED, EPSILON = 200, {"float32": 1e-6, "bfloat16": 2e-2}
"""Rows that are scored on a CPU too, and the difference that each precision may have, relative to the largest value."""

PORT = 8123
"""Of the vLLM server."""


@dataclass(frozen=True)
class Scale:
    """What a dry run does smaller: settings, steps and most seconds of a training, the step of its checkpoint; the shape of a
    model that scores, the rows to score, the sequences for `nll_worker`, and the sequences and tokens of batches.
    """

    device: str
    model: tuple[str, ...]
    rows: tuple[str, ...]
    steps: int
    seconds: float
    saved: int
    scored: dict[str, int]
    count: int
    sequences: int
    batch: tuple[int, int]


TOY = Scale(
    "cpu", ("model.layers=1", "model.hidden=16", "model.heads=2", "model.feed_forward=32", "model.tied_embeddings=true"),
    ("sequence_length=32", "global_batch=2", "micro_batch=2"), 6, 60, 2,
    {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, 24, 4, (4, 20),
)  # fmt: skip
REAL = Scale(
    "cuda", ("model.layers=16", "model.hidden=1024", "model.heads=16", "model.key_value_heads=16", "model.feed_forward=2816",
             "model.tied_embeddings=true"),
    ("sequence_length=2048", "global_batch=128", "micro_batch=8"), 380, 330, 30,
    {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 14, "num_attention_heads": 10}, 4_000, 2_000, (64, 200),
)  # fmt: skip
"""300 million parameters on 100 million tokens, or those of 330 s; half a billion that score."""


def train(scale: Scale, folder: Path) -> Found:
    """megatron-core and plain PyTorch on the same rows; planned = observed after a kill; the losses of a CPU in float32."""
    data, model, low = prepared(scale), folder / "ours", ("precision=bfloat16", f"device={scale.device}")
    chosen = (*scale.model, *scale.rows, *low, f"steps={scale.steps}")
    with suppress(RunError):  # of the kill; a different failure comes again
        trained(data, model, *chosen, f"checkpoint_every={scale.saved}", how=partial(launched, kill=True))
    job, started, steps = trained(data, model, *chosen, how=partial(launched, seconds=scale.seconds))
    ours = summarise(job, started, steps, 1)
    title = f"training in bfloat16, {ours.parameters / 1e6:,.0f} M parameters"
    yield least(
        title, figures(ours), f"{ours.steps:,} steps", ours.tokens_per_second, "tokens/s", 1, facts=ours.model_dump()
    )
    yield least("step of the checkpoint after kill -9", f"{started.step:,}", "0", started.step, "", 1, check=True)
    code = run(["verify", str(model)])
    yield most("planned = observed", f"{len(steps):,} steps proven", "the plan", code, "exit code", 0, check=True)
    yield most("waiting for data while training", f"{ours.waited:.2%}", "0 %", 100 * ours.waited, "%", 1)
    yield "Transformer Engine: the trainer's attention is PyTorch's"
    small = (data, folder / "exact", *TOY.model, *TOY.rows, f"steps={min(20, scale.steps)}")
    exact = losses(*small, "precision=float32", "device=cpu")
    found = [step.loss for step in steps] if scale is TOY else losses(data, folder / "low", *small[2:], *low)
    name, last = f"loss of {len(exact)} steps", f"{exact[-1]:.4f} (CPU, float32)"
    yield most(name, f"{found[-1]:.4f}", last, apart(found, exact), "nats", LOSS_BOUND, check=True)
    plain = plain_speed(job, scale.device, min(10, scale.steps))
    other, ratio = f"{plain:,.0f} tokens/s (PyTorch SDPA)", ours.tokens_per_second / plain
    yield least(f"{title}, speed", figures(ours), other, ratio, "x", 1)


def losses(*training: Any) -> list[float]:
    """The loss of each step of `trained`."""
    return [step.loss for step in trained(*training)[2]]


def trained(data: str, folder: Path, *chosen: str, how: Trainer | None = None) -> Trained:
    """Train; the job, its last start, and its steps. Raises RunError if it fails."""
    job = plan_training(data, choices_of(TrainSettings, ["max_epochs=null", "processes=1", *chosen]), str(folder))
    check(job)
    history = history_of(job.output_dir)
    write_files(launch_of(job, 1), job.output_dir)
    try:
        (how or forked)(job, history.add)
    finally:
        history.publish()
    return job, cast("Started", history.started), [step for _, step in sorted(history.steps.items())]


def launched(job: Job, handle: Callable[[Event], None], *, seconds: float = math.inf, kill: bool = False) -> None:
    """Start the trainer as `tokenmill train` does; end it after so many seconds, or kill it once it has a checkpoint."""
    end = time.monotonic() + seconds

    def watched(event: Event) -> None:
        handle(event)
        if kill and isinstance(event, Saved):
            for each in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        if time.monotonic() > end:
            raise TimeoutError

    with suppress(TimeoutError):
        watch.run(launch_of(job, 1), watched, print)


def forked(job: Job, handle: Callable[[Event], None]) -> None:
    """Train in a fork of this process, which has imported all that a trainer needs: that saves 10 s."""
    reading, writing = os.pipe()
    process = FORK.Process(target=train_here, args=(job, writing))
    process.start()
    os.close(writing)
    with os.fdopen(reading) as lines:
        for event in filter(None, map(event_in, lines)):
            handle(event)
    process.join()
    if process.exitcode:
        raise RunError(f"the trainer ended with {process.exitcode}")


def train_here(job: Job, output: int) -> None:
    """Train in this process, as the only one that torchrun has started, with events written to a pipe."""
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )  # any free one
    sys.stdout = os.fdopen(output, "w")
    training.run(job)


def plain_speed(job: Job, device: str, steps: int) -> float:
    """Tokens per second of plain PyTorch with a job's model and batch, on random tokens."""
    settings = job.settings
    length, rows = settings.sequence_length, settings.micro_batch
    vocabulary = settings.model.vocabulary(job.data.vocabulary_size)
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
    """NLL and embeddings: speed, equality with a CPU, memory, NaN, and a kill."""
    facts = nll_worker.measured(scale.sequences)
    yield nll_speed.row(facts)
    yield most(
        "NLL and a plain loop's", f"{facts['sequences']:,} sequences", "the loop", facts["largest_difference"], "relative",
        1e-5 if facts["device"] == "cpu" else EPSILON["bfloat16"], check=True,
    )  # fmt: skip
    count, model = min(COMPARED, scale.count), saved_model(scale, folder / "model")
    yield from equality(scale.device, count, model)
    growth, peak = memory_growth(scale, model)
    yield most("memory of score nll", f"{peak / 1e9:.2f} GB", "after 10 batches", growth, "x", 1.05, check=True)
    rows, device = write_rows(folder / "rows.jsonl", scale.count), f"device={scale.device}"
    killed = ["score", "nll", rows, "--output-dir", str(folder / "killed"), f"model={model}", "shard_size=1000", device]
    spoiled = stops_at_nan(saved_model(scale, folder / "spoiled", spoiled=True), scale.device)
    yield least("NaN stops a model", str(spoiled), "True", spoiled, "", 1, check=True)
    torch.cuda.empty_cache()  # workers need it
    kill_when(killed, lambda: any((folder / "killed/shards/nll").glob("*/receipt.json")))
    _, seconds = timed(lambda: called(*killed))
    counts = json.loads((folder / "killed/manifest.json").read_bytes())["volatile"]["shards"]
    kept, rest = f"{counts['reused']:,} of {counts['total']:,}", f"the others in {seconds:.1f} s"
    yield least("shards kept after kill -9", kept, rest, counts["reused"], "", 1, check=True)


def stops_at_nan(model: str, device: str) -> bool:
    """Whether a model that returns NaN raises an error."""
    ids, ones = np.arange(1, 9, dtype=np.int32), np.ones(8, np.int8)
    try:
        load_scorer(find_model(model), device=device).score(Completions(ids, np.array([0, 8]), ones, ones))
    except NonFiniteError:
        return True
    return False


def equality(device: str, count: int, model: str) -> Found:
    """NLL and embeddings on the device, compared with a CPU in float32."""
    chats, files = HarmonyTexts("text", NllSettings(model=model).policy), find_model(model)
    read = cast("list[Any]", [chats.read(row) for row in harmony_rows(count)])
    given, texts = chats.sequenced(read).completions, [row["text"] for row in harmony_rows(count)]
    for name, load, scored in (
        ("NLL", load_scorer, lambda scorer: scorer.score(given)["nll_mean"].to_numpy()),
        ("embeddings", partial(load_embedder, pooling="mean"), lambda embedder: embedder.encode(texts)),
    ):
        exact = scored(load(files, device="cpu", precision="float32"))
        for precision, most_apart in EPSILON.items():
            found = scored(load(files, device=device, precision=precision))
            share = apart(found, exact) / np.abs(exact).max()
            title = f"{name} in {precision}"
            yield most(title, f"{count:,} rows", "CPU, float32", share, "relative", most_apart, check=True)


def memory_growth(scale: Scale, model: str) -> tuple[float, int]:
    """How much the memory of a scorer grows from its tenth batch to its fortieth, and its last peak in bytes."""
    scorer = load_scorer(find_model(model), device=scale.device)
    generator, used, (rows, longest) = np.random.default_rng(0), list[int](), scale.batch
    on_gpu = scale.device == "cuda"
    for _ in range(40):
        lengths = generator.integers(2, longest, rows)
        ids, ones = generator.integers(1, 90, int(lengths.sum())).astype(np.int32), np.ones(int(lengths.sum()), np.int8)
        scorer.score(Completions(ids, np.cumsum([0, *lengths]), ones, ones))
        used.append(torch.cuda.memory_allocated() if on_gpu else psutil.Process().memory_info().rss)
    return used[-1] / used[9], torch.cuda.max_memory_allocated() if on_gpu else used[-1]


def server(scale: Scale, folder: Path) -> Found:
    """A vLLM server, compared with the engine of this process."""
    rows, model = write_rows(folder / "rows.jsonl", scale.count), saved_model(scale, folder / "model")
    vocabulary = find_vocabulary(TokenizerSource(model="o200k_harmony"))
    Path(model, "tokenizer.json").write_bytes(vocabulary.definition())
    chosen = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|return|>"}
    Path(model, "tokenizer_config.json").write_text(json.dumps(chosen))
    ids = Tokenizer.from_file(f"{model}/tokenizer.json").encode(PROBE, add_special_tokens=False).ids
    yield least("the server's tokenizer is Harmony's", "equal", "", ids == encoding().encode(PROBE), "", 1, check=True)
    vllm = shutil.which("vllm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if vllm is None:
        yield "vLLM isn't installed here"
        return
    here, own = timed(lambda: scored_nll(rows, folder / "here", model, f"device={scale.device}"))
    with serving(vllm, model) as url:
        there, its = timed(lambda: scored_nll(rows, folder / "there", "tiny", "engine=server", f"server={url}"))
    share = apart(here, there) / np.abs(here).max()
    yield most(
        "NLL of a vLLM server",
        f"{scale.count:,} rows",
        "this process",
        share,
        "relative",
        EPSILON["bfloat16"],
        check=True,
    )
    yield least("score nll by a vLLM server", f"{its:.1f} s", f"{own:.1f} s in this process", own / its, "x", 1)


def trainers(scale: Scale, folder: Path) -> Found:
    """Megatron-LM's own pretrain_gpt.py on our data, by the script that `launcher=megatron-lm` writes."""
    chosen = (
        *scale.model,
        *scale.rows,
        "global_batch=16",
        "micro_batch=2",
        "launcher=megatron-lm",
        "processes=1",
        "steps=200",
    )
    called("train", prepared(scale), "--output-dir", str(folder), "max_epochs=null", *chosen, "--dry-run")
    code = subprocess.run(["bash", "-n", str(folder / "train.sh")], check=False).returncode
    yield most("the script for Megatron-LM", f"exit code {code}", "bash -n", code, "", 0, check=True)
    if scale is TOY or "MEGATRON_LM" not in os.environ:
        yield "Megatron-LM needs a GPU, and MEGATRON_LM=FOLDER of its sources"
    else:
        _, seconds = timed(lambda: subprocess.run(["bash", str(folder / "train.sh")], check=True))
        code = run(["verify", str(folder)])
        yield most(
            "Megatron-LM, planned = observed",
            f"200 steps in {seconds:.0f} s",
            "the order",
            code,
            "exit code",
            0,
            check=True,
        )
    yield "Megatron-Bridge needs its container, and a model's own tokenizer: run the script of launcher=megatron-bridge there"


def loading(scale: Scale, folder: Path) -> Found:
    """A benchmark compared with the same one before, and how fast loaders of 1 and 8 processes, as Megatron-LM starts them, read
    the same rows.
    """
    data, chosen = (
        prepared(scale),
        (*scale.model, *scale.rows, f"steps={min(12, scale.steps)}", f"device={scale.device}"),
    )
    ended = [trained(data, folder / name, *chosen) for name in ("first", "second")]
    first, second = (summarise(*each) for each in ended)
    change = compare(second, first)
    ratio = second.tokens_per_second / first.tokens_per_second
    yield least("the same benchmark again", figures(second), figures(first), ratio, "x", 0.95)
    losses = f"{second.loss:.4f}", f"{first.loss:.4f}"
    yield most("its loss", *losses, abs(change.loss_difference), "nats", LOSS_BOUND, check=True)
    job, needed = ended[1][0], second.tokens_per_second
    for processes in (1, 8):
        read = loader_speed(job, processes, folder / f"loaders-{processes}")
        speeds = f"{read:,.0f} tokens/s", f"{needed:,.0f} (training)"
        yield least(f"reading in {processes} loader processes", *speeds, read / needed, "x", 1)
    yield "near-duplicates: no library that tokenmill uses finds them on a GPU"


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
    """The bundled blend, or the corpus of the other benchmarks, tokenized once for all parts and runs."""
    bench = Bench.from_environment()
    blend = str(child.ROOT / "blends/tiny.json") if scale is TOY else bench.corpus().path
    data = str(bench.folder / f"gpu-data-{scale.device}")
    called("pretrain", blend, "--output-dir", data, "tokenizer.model=cl100k_base")
    return data


def harmony_rows(count: int) -> list[dict[str, str]]:
    """Questions and answers of different lengths in Harmony."""
    text = "<|start|>user<|message|>Count to {}.<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"
    return [
        {"row_id": str(n), "text": text.format(n % 97, " ".join(map(str, range(n % 97 + 1))))} for n in range(count)
    ]


def write_rows(path: Path, count: int) -> str:
    """A file of rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in harmony_rows(count)))
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


def scored_nll(rows: str, out: Path, model: str, *chosen: str) -> np.ndarray:
    """The NLL that `tokenmill score` finds, in the order of the rows."""
    called("score", "nll", rows, "--output-dir", str(out), f"model={model}", *chosen)
    return pq.read_table(sorted(out.rglob("part-*.parquet")))["nll_mean"].to_numpy()


def called(*arguments: str) -> None:
    """Run a command of tokenmill here. Raises RuntimeError if it fails."""
    if code := run([*arguments]):
        raise RuntimeError(f"tokenmill {' '.join(arguments)}: exit code {code}")


def kill_when(arguments: list[str], ready: Callable[[], bool]) -> None:
    """Start a command of tokenmill, and kill it and all that it started once `ready()`, unless it has ended."""
    command = with_parent([child.TOKENMILL, *arguments])
    with subprocess.Popen(command, start_new_session=True) as process:
        while process.poll() is None and not ready():
            time.sleep(0.02)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def serving(vllm: str, model: str) -> Generator[str]:
    """The URL of a vLLM server of a model, called tiny, once it answers. Raises RuntimeError if it ends before."""
    url = f"http://127.0.0.1:{PORT}"
    command = [
        vllm, "serve", model, "--served-model-name", "tiny", "--port", str(PORT), "--dtype", "bfloat16", "--enforce-eager",
        "--no-enable-prefix-caching", "--max-model-len", "2048",
    ]  # fmt: skip
    with subprocess.Popen(with_parent(command), start_new_session=True) as process:
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


def least(name: str, ours: str, other: str, result: float, unit: str, target: float, **more: Any) -> Measure:
    """A measure that shall be at least its target."""
    return Measure(name, ours, other, float(result), unit, target, at_least=True, **more)


def most(name: str, ours: str, other: str, result: float, unit: str, target: float, **more: Any) -> Measure:
    """A measure that shall be at most its target."""
    return Measure(name, ours, other, float(result), unit, target, at_least=False, **more)


PARTS = {part.__name__: part for part in (train, scores, server, trainers, loading)}
