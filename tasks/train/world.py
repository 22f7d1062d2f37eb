"""The processes that train together, and this one among them."""

import os
import resource
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, cast

import torch
from tokenmill.tasks.errors import InputError
from torch import distributed
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] - part of its documented API

from .settings import Device

Reduction = Literal["sum", "max"]
OPERATIONS = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}

PATIENCE = timedelta(days=1)
"""How long processes wait for one that works alone. The 10 minutes in which NCCL takes a process for lost would be over
before 60 GB of packs are laid out; a day is enough for 8 TB. A process that dies meanwhile ends the wait of the others.
"""


@dataclass(frozen=True, slots=True)
class World:
    """The number of this process among `size`, the device it computes on, and the `patient` group of all in which they wait
    for each other.
    """

    rank: int
    size: int
    device: torch.device
    patient: distributed.ProcessGroup

    @property
    def first(self) -> bool:
        """Whether this is the process that speaks for all."""
        return self.rank == 0

    def reduced(self, values: list[float], how: Reduction) -> list[float]:
        """Each of `values`, summed or the largest, over all processes, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(tensor, OPERATIONS[how])
        return tensor.tolist()

    def agreed(self, text: str | None) -> str:
        """What the first process says, heard by all."""
        said = [text]
        distributed.broadcast_object_list(said, src=0, device=self.device)
        return said[0] or ""

    def wait(self) -> None:
        """Until all processes have come here, though one of them has first to do what takes hours."""
        distributed.barrier(self.patient)

    def synchronize(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def memory(self) -> int:
        """Peak memory of this process in bytes: the device's, or on a CPU what is resident."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def device_name(self) -> str:
        """What the device calls itself."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"


@contextmanager
def joined(device: Device | None) -> Generator[World]:
    """The world that `torchrun` started this process in; a world of one where it did not.

    Raises InputError where a GPU is asked for and there is none.
    """
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise InputError("device=cuda: this machine has no GPU; set device=cpu, or train where there is one")
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
