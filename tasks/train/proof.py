"""Prove that a model was trained on exactly the planned tokens: compare every step's reads with the plan.

The plan is the order in the folder of the training run, which was copied there when it began, else the job's: a later
order of the same data plans a different run. A difference names the first step and, where the plan can be opened, its first
sample; megatron-core is needed to open an order of documents.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import orjson
from rich.console import Console
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.kit.parts import counted
from tokenmill.tasks.storage import absolute, is_local, join

from .history import history_of
from .job import JOB, Job, TrainData, contents_of, read_job
from .order import INDICES, ORDER, Order, prepared_indices, read_order, with_quotas
from .prepared import prepared_data
from .rows import PackedRows, flat_packs, layout_folder, split_samples
from .samples import (
    Pieces,
    content_numbers,
    parts_of,
    pieces_of,
    range_digest,
    sample_hashes,
    step_digest,
    step_digests,
    wrong_position,
)
from .settings import OrderPlan

SKIPPED = "skipped"  # in place of the digest of a step that the trainer has omitted


def recorded_reads(path: str, global_batch: int) -> dict[int, str]:
    """Return the digest of each step that all replicas have recorded in the folder of a training run, by their latest lines, or SKIPPED.

    Raises InputError for a damaged line, and if no step is whole. A line that a killed process has begun is omitted.
    """
    steps: dict[int, list[dict[str, Any]]] = {}
    for file in sorted(Path(path).glob("reads-*.jsonl")):
        lines = file.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], 1):
            try:
                found = orjson.loads(line)
                steps.setdefault(found["step"], []).append({**found, "sums": found["sums"] and tuple(found["sums"])})
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{file}:{number}: damaged; remove this line") from error
    whole: dict[int, str] = {}
    for step, found in steps.items():
        # A step may have been read several times, by different numbers of replicas: the latest ones that read all of it count.
        runs: dict[int, dict[int, tuple[int, int] | None]] = {}
        for line in sorted(found, key=lambda line: line["time"]):
            replicas = runs.pop(line["samples"], {})
            runs[line["samples"]] = {**replicas, line["replica"]: line["sums"]}
        complete = (own for samples, own in reversed(runs.items()) if samples * len(own) == global_batch)
        if parts := list(next(complete, {}).values()):
            whole[step] = SKIPPED if None in parts else step_digest(part for part in parts if part)
    if steps and not whole:
        raise InputError(
            f"{path}: no step of {global_batch} samples is recorded whole; each data-parallel replica writes its own "
            "reads-RANK.jsonl: copy the files of all machines into this folder"
        )
    return whole


@dataclass(frozen=True)
class DocumentReads:
    """The document reads of steps."""

    data: TrainData
    plan: OrderPlan
    indices: str  # folder with the index caches
    temporary: TemporaryDirectory[str] | None = None  # a folder that is removed with this object

    @cached_property
    def samples(self) -> Any:  # noqa: ANN401 - megatron-core has no types
        """megatron-core's dataset of the train split. Raises InputError for index arrays that are cut off."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # megatron-core warns about a dozen optional libraries
            from .engine import joined  # noqa: PLC0415 - imports torch

            plan = self.plan
            try:
                with joined("cpu"):
                    return split_samples(
                        self.data, "train", plan.sequence_length, plan.sizes[0], plan.seed, self.indices, self.indices
                    )
            except (ValueError, EOFError) as error:
                raise InputError(
                    f"{self.indices}: its arrays cannot be read ({error}); remove the folder: the next run builds it again"
                ) from error

    def hashes(self, step: int) -> np.ndarray:
        """Return the hashes of a step's samples; steps count from 1."""
        contents = content_numbers(contents_of(self.data, "train"))
        return sample_hashes(self._pieces(_numbers(step, self.plan.global_batch)), contents)

    def _pieces(self, numbers: Sequence[int]) -> Pieces:
        try:
            return pieces_of(self.samples, numbers)
        except IndexError as error:
            raise InputError(
                f"{self.indices}: its arrays do not fit the published files ({error}); check the files with: "
                f"tokenmill verify {self.data.path}"
            ) from error

    def sample(self, step: int, position: int) -> str:
        number = _numbers(step, self.plan.global_batch)[position]
        piece = self._pieces([number]).of(0)[0]
        prefix = parts_of(self.samples)[piece.source].dataset_path
        return f"{prefix}, document {piece.document + 1} from token {piece.offset + 1}"


@dataclass(frozen=True)
class PackReads:
    """What steps read of packs."""

    rows: PackedRows
    global_batch: int

    def hashes(self, step: int) -> np.ndarray:
        return self.rows.hashes([self.rows.pack(number) for number in _numbers(step, self.global_batch)])

    def sample(self, step: int, position: int) -> str:
        return f"pack {self.rows.pack(_numbers(step, self.global_batch)[position]) + 1}"


Opened = DocumentReads | PackReads


def opened(job: Job, path: str) -> Opened:
    """Return the reads of the training run in `path`, according to its job."""
    settings, folder = job.settings, f"{path}/cache"
    if job.data.kind == "sft":
        packs = flat_packs(layout_folder(job.data, "train", folder))
        rows = PackedRows(packs, settings.sequence_length, 0, settings.seed, " ".join(contents_of(job.data, "train")))
        return PackReads(rows, settings.global_batch)
    plan = OrderPlan(**settings.model_dump(include=set(OrderPlan.model_fields)))
    prepared = prepared_indices(job.data, "train", plan.sequence_length, plan.sizes[0], plan.seed)
    if prepared and is_local(prepared):
        return DocumentReads(job.data, plan, prepared)
    if Path(folder, "indices").is_dir():  # those that tokenmill's trainer built and read
        return DocumentReads(job.data, plan, f"{folder}/indices")
    # A different trainer has its own. They are built anew each time, because they would outlive a repair of the files.
    temporary = TemporaryDirectory(prefix="tokenmill-indices-")
    return DocumentReads(job.data, plan, temporary.name, temporary)


NEARBY_STEPS = 100  # how many steps before and after a wrong one to compare, to find out which step was read instead


def _numbers(step: int, global_batch: int) -> range:
    return range((step - 1) * global_batch, step * global_batch)


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of comparing steps with their plan."""

    steps: int  # the number of compared ones
    plan: str  # the file with the plan
    problem: str | None  # the first difference
    skipped: Sequence[int] = ()  # steps that the trainer has omitted


def prove(path: str) -> Proof:
    """Compare the steps of the training run in `path` with their plan. Raises InputError if there are none."""
    path = absolute(path)
    job = read_job(path)
    steps = {number: step.read for number, step in history_of(path).steps.items()}
    steps = steps or dict(recorded_reads(path, job.settings.global_batch))
    if not steps:
        raise InputError(
            f"{path}: no steps here yet; train first (other trainers record them with tokenmill.tasks.train.recorder)"
        )
    last, packed = max(steps), job.data.kind == "sft"
    order = None if packed else read_order(path)
    if order and order.global_batch != job.settings.global_batch and not order.differences(job.data, job.settings):
        order = None  # the job reads the same samples in steps of a different size, which have no digests in the order
    plan = join(path, JOB if order is None else ORDER)
    for number in range(1, last + 1):
        if number not in steps:
            return Proof(last, plan, f"step {number} was skipped: not recorded")
        if steps[number] is None:
            return Proof(last, plan, f"step {number}: its samples weren't recorded; an earlier version trained it")
    observed = [str(steps[number]) for number in range(1, last + 1)]
    skipped = [number for number in range(1, last + 1) if steps[number] == SKIPPED]
    compared, problem = _Comparison(job, path, order, observed), None
    wrong = (step for step in compared.unproven() if observed[step - 1] not in {SKIPPED, compared.digest(step)})
    if (step := next(wrong, None)) is not None:
        reasons = order.differences(job.data, job.settings) if order else []
        said = f"step {step} did not read its planned samples: {_explained(compared, step)}"
        problem = "; ".join([said, *reasons])
    return Proof(last - len(skipped), plan, problem, skipped)


@dataclass(frozen=True)
class _Comparison:
    """A training run beside its plan."""

    job: Job
    path: str
    order: Order | None  # None: the job is the plan
    observed: list[str]  # digests of the steps, from the first on

    @cached_property
    def own(self) -> Opened:
        return opened(self.job, self.path)

    @cached_property
    def planned(self) -> Opened:
        """Return the plan. Raises InputError if the data of the order have been replaced."""
        if self.order is None or not self.order.differences(self.job.data, self.job.settings):
            return self.own
        data = prepared_data(self.job.data.path)
        if data.made_from != self.order.content:
            raise InputError(f"{data.path}: prepared again since its order was planned")
        data = with_quotas(data, self.order.sequence_length, self.order.global_batch)
        return DocumentReads(data, self.order, join(data.path, INDICES))

    def digest(self, step: int) -> str:
        if self.order is not None and self.order.steps_per_digest == 1:
            return self.order.digests[step - 1] if step <= self.order.steps else ""
        hashes = self.planned.hashes(step)
        return step_digests(hashes, len(hashes))[0]

    def unproven(self) -> Iterator[int]:
        """Yield the steps to compare one by one: all in a range whose digest differs, or that isn't complete."""
        together = self.order.steps_per_digest if self.order else 1
        for number, begin in enumerate(range(0, len(self.observed), together)):
            steps = self.observed[begin : begin + together]
            known = self.order.digests[number] if self.order and number < len(self.order.digests) else None
            if range_digest(steps) != known:
                yield from range(begin + 1, begin + len(steps) + 1)


def _explained(compared: _Comparison, step: int) -> str:
    """Return the first sample of a step that differs from the plan, and the sample read instead, if known."""
    observed, planned = compared.observed[step - 1], compared.digest(step)
    size = compared.job.settings.global_batch
    near = range(max(1, step - NEARBY_STEPS), min(len(compared.observed), step + NEARBY_STEPS) + 1)
    try:
        instead = next((other for other in near if compared.digest(other) == observed), None)
        if instead is not None:
            return f"from its first sample on, it read the samples planned for step {instead}"
        position, found = wrong_position(planned, observed, size) if planned else None, ""
        if position is None and planned and compared.planned is not compared.own:
            own, expected = compared.own.hashes(step), compared.planned.hashes(step)
            if step_digests(own, len(own))[0] == observed:
                same = len(own) == len(expected)
                position = int(np.argmax(own != expected)) if same else 0
                found = f", but {compared.own.sample(step, position)} was read"
        if position is not None:
            return f"sample {position + 1} was to be {compared.planned.sample(step, position)}{found}"
    except (ImportError, InputError, OSError) as error:
        return f"its samples cannot be named here ({error})"
    if planned[:16] == observed[:16]:
        return "its samples were read in a different order"
    return "more than one of its samples differ" if planned else "no such step was planned"


def print_proof(proof: Proof, path: str, console: Console) -> None:
    """Show the result of a proof. Raises RunError with the first difference."""
    if proof.problem:
        raise RunError(f"{path}: {proof.problem} (compared with {proof.plan})")
    console.print(
        f"✓ {counted(proof.steps, 'step')} read exactly the samples planned in {proof.plan}",
        highlight=False,
        soft_wrap=True,
    )
    if proof.skipped:
        skipped = ", ".join(f"{step:,}" for step in proof.skipped)
        console.print(f"- skipped by the trainer: step {skipped}", highlight=False, soft_wrap=True)


def proof_record(proof: Proof, path: str) -> dict[str, Any]:
    """Return the proof as an artifact record."""
    skipped = {"skipped": list(proof.skipped)} if proof.skipped else {}
    return {"verify": {"path": path, "type": "verification", "steps": proof.steps, "plan": proof.plan, **skipped}}
