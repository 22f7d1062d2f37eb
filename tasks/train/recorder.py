"""Record the reads of a different trainer: Megatron-LM, Megatron-Bridge, or any loop over megatron-core's datasets.

    use_order(config, "OUT")            # before the datasets are built: take the indices that `tokenmill order` has built
    recorder = ReadRecorder(train_dataset, "OUT", "MODEL", global_batch=1024, steps=…, first_step=iteration + 1)
    loader = DataLoader(recorder.dataset, …)             # its samples carry their own number
    batch = next(recorder.watch(iterator))               # takes the number out again, and records it

`peer` does this for scripts of Megatron-LM and Megatron-Bridge.

A batch counts as read when the training loop takes it, not when a process of the loader prepares it. MODEL/reads-RANK.jsonl
has a line per step, with the sums of `samples.step_sums` over the samples of one replica; after a restart, later lines
replace earlier ones. A step that the trainer skips has a line about it. `tokenmill verify MODEL` adds up the replicas,
whose number may change, and compares with the order.
"""

import itertools
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.manifest import BLEND
from tokenmill.tasks.shards.publish import open_log, publish_bytes
from tokenmill.tasks.shards.receipt import difference
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, is_local, join
from torch import distributed

from .job import JOB, Job, TrainData, contents_of, job_of
from .order import INDICES, fetch_indices, followed_order, keep_order, read_order
from .prepared import prepared_data
from .samples import content_numbers, parts_of, pieces_of, sample_hashes, step_sums
from .settings import TrainSettings

NUMBER = "sample_number"


class _Identified:
    """A tokenizer by whose content, not class and path, megatron-core names its index caches."""

    def __init__(self, tokenizer: Any, fingerprint: str) -> None:  # noqa: ANN401 - any tokenizer
        self._tokenizer = tokenizer
        self.unique_identifiers = {"fingerprint": fingerprint}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name == "_tokenizer":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def use_order(config: Any, data: str | TrainData) -> None:  # noqa: ANN401 - megatron-core has no types
    """Make a GPTDatasetConfig find the indices that `tokenmill order` has built for `data`, in its own `path_to_cache`.

    All others are built there: of a training run or a split that the order does not cover. All processes of the training run call
    this. Raises InputError if the cache is not a local folder.
    """
    found = prepared_data(data) if isinstance(data, str) else data
    order, cache = read_order(found.path), config.path_to_cache
    if cache is None or not is_local(str(cache)):
        raise InputError(
            f"path_to_cache={cache}: indices are kept on a disk that all processes share; set it (in Megatron-LM "
            "--data-cache-path) to a folder of this training run"
        )
    if order is None or order.content != found.made_from:
        return
    config.tokenizer = _Identified(config.tokenizer, found.fingerprint)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        fetch_indices(join(found.path, INDICES), absolute(str(cache)))
    if distributed.is_initialized():
        distributed.barrier()


class Numbered(torch.utils.data.Dataset[dict[str, Any]]):
    """A dataset of megatron-core whose samples carry their own number, counted from `first`."""

    def __init__(self, samples: Any, first: int = 0) -> None:  # noqa: ANN401
        self._samples, self._first = samples, first

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """The sample, with its number as `sample_number`."""
        return {**self._samples[number], NUMBER: self._first + number}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name == "_samples":
            raise AttributeError(name)
        return getattr(self._samples, name)


class ReadRecorder:
    """Records the samples that one process takes.

    `dataset` is the train split, built from the blend.json in the folder `data`, or from the blend that a launcher has written
    for the phase of `first_step`; `output_dir` a local folder. `replica` of `replicas` is the data-parallel rank of this
    process. Without `first_step`, the first sample determines it. The trainer skips the steps `skipped`. Raises InputError for data
    that cannot be trained on, a dataset from other data, a batch size that changes, and a folder with a different training run.
    """

    def __init__(
        self, dataset: Any, data: str | TrainData, output_dir: str, *, global_batch: int, steps: int,  # noqa: ANN401
        first_step: int | None = None, replica: int = 0, replicas: int = 1, skipped: Collection[int] = (),
    ) -> None:  # fmt: skip
        _require_one_batch_size()
        if getattr(dataset, "dataset_index", 0) is None:
            raise InputError("--dataloader-defer-npy-index-mmap: samples can't be recorded with it; remove it")
        if global_batch % replicas or not 0 <= replica < replicas:
            raise InputError(
                f"replica={replica}, replicas={replicas}, global_batch={global_batch}: give the rank and the number of data-parallel "
                "replicas, which divides the rows of a step"
            )
        found, config = prepared_data(data) if isinstance(data, str) else data, parts_of(dataset)[0].config
        if found.phases and isinstance(data, str):
            raise InputError(
                f"{data}: has a budget, which only tokenmill train follows exactly; train with it, or prepare the blend without "
                "'tokens' and 'phases', which doesn't tokenize again"
            )
        # The phase that is read now, and how many samples are read before it.
        phase, self._first, done = found, 0, ((first_step or 1) - 1) * global_batch
        ends = itertools.accumulate(each.samples for each in found.phases)
        for number, (each, end) in enumerate(zip(found.phases, ends, strict=True)):
            if done < end:
                phase, self._first = found.in_phase(number), end - each.samples
                break
        self._samples = dataset
        _require_prefixes(dataset, phase)
        self.dataset = Numbered(dataset, self._first)
        settings = TrainSettings(
            sequence_length=config.sequence_length, global_batch=global_batch, micro_batch=1, steps=steps,
            seed=config.random_seed, launcher="megatron-lm",
        )  # fmt: skip
        self._contents = content_numbers(contents_of(phase, "train"))
        self._global_batch, self._replica, self._own = global_batch, replica, global_batch // replicas
        self._step, self._numbers, self._skipped = first_step, list[int](), skipped
        place = absolute(output_dir)
        rank = distributed.get_rank() if distributed.is_initialized() else int(os.environ.get("RANK", "0"))
        if rank == 0:
            _keep_job(Job(settings=settings, data=found, output_dir=place))
        log = Path(place, f"reads-{rank:05d}.jsonl")
        content = log.read_bytes() if log.exists() else b""
        if content and not content.endswith(b"\n"):  # a killed process has begun a line, in which the next would go on
            publish_bytes(str(log), content[: content.rfind(b"\n") + 1])
        self._log = open_log(str(log))

    def watch(self, iterator: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the batches of `iterator` as the trainer knows them, recorded when they are taken."""
        for batch in iterator:
            numbers = batch.pop(NUMBER, None)
            if numbers is not None:  # absent from batches of other splits
                self.add(numbers.tolist())
            yield batch

    def add(self, numbers: list[int]) -> None:
        """Record the numbers of samples that are trained on now."""
        self._numbers += numbers
        while len(self._numbers) >= self._own:
            own, self._numbers = np.array(self._numbers[: self._own]), self._numbers[self._own :]
            read = int(own.min()) // self._global_batch + 1
            step = self._step or read
            while step < read and step in self._skipped:  # the trainer doesn't take the samples of a skipped step
                self._write(step, None)
                step += 1
            step = max(step, read)
            hashes = sample_hashes(pieces_of(self._samples, own - self._first), self._contents)
            self._write(step, None if step in self._skipped else step_sums(hashes, own % self._global_batch))
            self._step = step + 1

    def _write(self, step: int, sums: tuple[int, int] | None) -> None:
        line = {"step": step, "replica": self._replica, "samples": self._own, "time": time.time(), "sums": sums}
        self._log.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def _require_one_batch_size() -> None:
    """Raise InputError if the batch size of megatron-core changes during the training run: steps lack fixed samples then."""
    from megatron.core import num_microbatches_calculator as sizes  # noqa: PLC0415 - a trainer may add its folder first

    calculator = sizes._GLOBAL_NUM_MICROBATCHES_CALCULATOR  # pyright: ignore[reportPrivateUsage] # noqa: SLF001 - no other way
    if not isinstance(calculator, sizes.ConstantNumMicroBatchesCalculator | None):
        raise InputError(
            "--rampup-batch-size, --step-batch-size-schedule: what steps read cannot be recorded while their size changes; "
            "give one --global-batch-size"
        )


def _require_prefixes(dataset: Any, data: TrainData) -> None:  # noqa: ANN401
    """Raises InputError unless the dataset reads the prefixes of `data`, in this order; their paths name their content."""
    files = [file for source in data.of("train") for file in source.files]
    contents, paths = contents_of(data, "train"), [str(part.dataset_path) for part in parts_of(dataset)]
    for file, content, path in itertools.zip_longest(files, contents, paths, fillvalue=""):
        if not content or (path != file and content[:8] not in path):
            raise InputError(
                f"the dataset reads {path or 'nothing'} where {join(data.path, BLEND)} has {file or 'nothing'}; build it from "
                "this blend.json, in its order"
            )


def _keep_job(job: Job) -> None:
    """Write the job and its order, once. Raises InputError if a different training run was recorded in the folder."""
    place = join(job.output_dir, JOB)
    known = read_bytes(place)
    if known is None:
        publish_bytes(place, orjson.dumps(job.model_dump()))
        keep_order(read_order(job.data.path), job.output_dir)  # also one that differs, so that the proof shows it
        return
    changed = difference(_plan(job_of(known, place)), _plan(job))
    if changed:
        differences = "; ".join(f"{name} was {old!r}, now {new!r}" for name, (old, new) in changed.items())
        raise InputError(
            f"{place}: a different training run was recorded here: {differences}; choose a different folder, or give tokenmill train the "
            "settings of this one"
        )
    keep_order(followed_order(job.data, job.settings), job.output_dir)


def _plan(job: Job) -> dict[str, Any]:
    names = {"seed", "sequence_length", "global_batch", "steps"}
    return {**job.settings.model_dump(include=names), "data": job.data.made_from}
