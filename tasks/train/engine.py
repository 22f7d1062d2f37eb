"""The processes that train together, and how they share a step."""

import os
import resource
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, cast

import numpy as np
import torch
from tokenmill.tasks.errors import InputError
from torch import distributed
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] - part of its documented API

from .settings import Device

Reduction = Literal["sum", "max"]
OPERATIONS = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}

# How long processes wait for one that works for all: laying out packs takes a day for 8 TB, and NCCL would time out
# after 10 minutes. If that process dies, the others stop waiting at once.
PATIENCE = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class World:
    """A process among those that train together."""

    rank: int
    size: int
    device: torch.device
    patient: distributed.ProcessGroup  # all processes, for long waits

    @property
    def first(self) -> bool:
        """Whether this process reports and writes for all."""
        return self.rank == 0

    def reduced(self, values: list[float], how: Reduction) -> list[float]:
        """Return the sum or maximum of each value over all processes, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(tensor, OPERATIONS[how])
        return tensor.tolist()

    def gathered(self, values: Sequence[int]) -> list[list[int]]:
        """Return the values of every process, in int64."""
        own = torch.tensor(values, dtype=torch.int64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(found, own)
        return [each.tolist() for each in found]

    def broadcast(self, text: str | None) -> str:
        """Return the text of the first process, in every process."""
        texts = [text]
        distributed.broadcast_object_list(texts, src=0, device=self.device)
        return texts[0] or ""

    def wait(self) -> None:
        """Wait for all processes, for up to PATIENCE."""
        distributed.barrier(self.patient)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def memory(self) -> int:
        """Peak memory in bytes: of the device, or the resident memory on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def device_name(self) -> str:
        """Return the name that the driver gives the device."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"


@contextmanager
def joined(device: Device | None) -> Generator[World]:
    """Join the processes that `torchrun` started; without it, a world of one. Raises InputError for a missing GPU."""
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise InputError("device=cuda: this machine doesn't have a GPU; set device=cpu, or train where there is one")
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if chosen == "cuda" else torch.device("cpu")
    if chosen == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if chosen == "cuda" else "gloo"
    if "RANK" in os.environ:
        distributed.init_process_group(backend)
    else:
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        patient = cast("distributed.ProcessGroup", distributed.new_group(timeout=PATIENCE, backend="gloo"))
        yield World(distributed.get_rank(), distributed.get_world_size(), place, patient)
    finally:
        distributed.destroy_process_group()


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How a step is split."""

    replica: int
    replicas: int
    micro_batch: int  # rows
    accumulated: int  # micro-batches per replica

    def numbers(self, step: int) -> list[list[int]]:
        """Return the row numbers of each micro-batch of this replica in a step, counted from 0."""
        size = self.micro_batch
        first = step * self.replicas * self.accumulated * size
        begins = [first + (turn * self.replicas + self.replica) * size for turn in range(self.accumulated)]
        return [list(range(begin, begin + size)) for begin in begins]


@dataclass(frozen=True, slots=True)
class Losses:
    """The sum of losses in nats and the number of trained tokens, over all replicas."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else 0.0


def attended(sequences: np.ndarray | None, device: torch.device) -> torch.Tensor | None:
    """Which tokens each token attends to, bool [rows, 1, length, length]; None for plain causal attention.

    `sequences` numbers those in each row, int32 [rows, length]; None if each row is one.
    """
    if sequences is None:
        return None
    segments = torch.from_numpy(sequences).to(device)
    same = segments[:, :, None] == segments[:, None, :]
    return same.tril()[:, None]
