"""What trains a model, whichever library does it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .batch import Batch


@dataclass(frozen=True, slots=True)
class Shape:
    """How a step is cut: replicas, rows of a micro-batch, and how many of these a replica adds up."""

    replica: int
    replicas: int
    micro_batch: int
    accumulated: int

    def numbers(self, step: int) -> list[list[int]]:
        """The rows, by number, of each micro-batch of this replica in a step, counted from 0."""
        size = self.micro_batch
        first = step * self.replicas * self.accumulated * size
        begins = [first + (turn * self.replicas + self.replica) * size for turn in range(self.accumulated)]
        return [list(range(begin, begin + size)) for begin in begins]


@dataclass(frozen=True, slots=True)
class Losses:
    """The summed loss in nats, and the number of tokens trained on that it is of, over all replicas."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.total / self.tokens if self.tokens else 0.0


class Engine(Protocol):
    """A model and its optimizer, cut over the processes in whatever way; every method is called by all of them at once."""

    shape: Shape

    def step(self, batches: Sequence[Batch], learning_rate: float) -> tuple[Losses, float]:
        """Train on this replica's micro-batches of a global batch; the losses before the step, and the gradient's norm.

        The gradient is that of the mean over all tokens trained on in the global batch.
        """
        ...

    def losses(self, batches: Sequence[Batch]) -> Losses:
        """The losses on a global batch, without training."""
        ...

    def save(self, folder: str) -> None:
        """Write all that `load` needs to go on as if nothing had happened.

        The state is restored exactly. What follows is the same bit by bit on a CPU, and to rounding on a GPU, where kernels
        such as FlashAttention's backward add in no fixed order.
        """
        ...

    def load(self, folder: str) -> None:
        """Take up the state that `save` wrote."""
        ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The model under Llama's names, on the CPU, in the precision of training; whole in the first process alone."""
        ...


def attended(batch: Batch, device: torch.device) -> torch.Tensor | None:
    """Which tokens each token sees, bool [rows, 1, length, length]; None where it is all before it in the row."""
    if batch.segments is None:
        return None
    segments = torch.from_numpy(batch.segments).to(device)
    same = segments[:, :, None] == segments[:, None, :]
    return same.tril()[:, None]
