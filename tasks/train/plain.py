"""The engine of plain `transformers`: LlamaForCausalLM, AdamW, and data-parallel replicas.

It reads the same rows and starts from the same weights as megatron-core's engine, so that each verifies the other. Weights
are float32; with bfloat16, torch's autocast computes products in it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

from .engine import Losses, Shape, World, attended
from .model import Weights
from .rows import Batch
from .settings import Precision, TrainSettings


class PlainEngine:
    """See Engine."""

    def __init__(
        self, settings: TrainSettings, precision: Precision, world: World, config: LlamaConfig, weights: Weights
    ) -> None:
        self._settings, self._world = settings, world
        self._autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=precision == "bfloat16")
        self.shape = Shape(
            world.rank, world.size, settings.micro_batch, settings.global_batch // (settings.micro_batch * world.size)
        )
        self._model: Any = LlamaForCausalLM(config)
        self._model.to(world.device)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights(name))
        chosen = settings.optimizer
        matrices, norms = (
            [each for each in self._model.parameters() if (each.dim() > 1) == has] for has in (True, False)
        )
        groups = [{"params": matrices, "weight_decay": chosen.weight_decay}, {"params": norms, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            groups, lr=chosen.learning_rate, betas=(chosen.beta1, chosen.beta2), eps=chosen.epsilon
        )

    def step(self, batches: Sequence[Batch], learning_rate: float) -> tuple[Losses, float]:
        """See Engine."""
        self._optimizer.zero_grad()
        totals = [self._trained(batch) for batch in batches]
        losses = self._reduced(totals)
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= max(1, losses.tokens)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.optimizer.clip)
        self._optimizer.step()
        return losses, float(norm)

    def losses(self, batches: Sequence[Batch]) -> Losses:
        """See Engine."""
        with torch.inference_mode():
            totals = [self._summed(batch) for batch in batches]
            return self._reduced([(float(loss), float(tokens)) for loss, tokens in totals])

    def save(self, folder: str) -> None:
        """See Engine."""
        if self._world.first:
            save_file(self._state(), f"{folder}/state.safetensors")

    def load(self, folder: str) -> None:
        """See Engine."""
        stored = load_file(f"{folder}/state.safetensors")
        for name, parameter in self._model.named_parameters():
            state = self._optimizer.state[parameter]
            for part in ("exp_avg", "exp_avg_sq"):
                state[part] = stored[f"{part}/{name}"].to(self._world.device)
            state["step"] = stored[f"step/{name}"]
            with torch.no_grad():
                parameter.copy_(stored[f"weight/{name}"])

    def weights(self) -> Mapping[str, torch.Tensor]:
        """See Engine."""
        return {name: each.detach().cpu().contiguous() for name, each in self._model.named_parameters()}

    def _state(self) -> dict[str, torch.Tensor]:
        named = list(self._model.named_parameters())
        weights = {f"weight/{name}": parameter.detach() for name, parameter in named}
        moments = {
            f"{part}/{name}": tensor
            for name, parameter in named
            for part, tensor in self._optimizer.state[parameter].items()
        }
        return {name: tensor.cpu().contiguous() for name, tensor in (weights | moments).items()}

    def _trained(self, batch: Batch) -> tuple[float, float]:
        loss, tokens = self._summed(batch)
        loss.backward()
        return float(loss.detach()), float(tokens)

    def _summed(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed loss of a micro-batch, and its number of trained tokens."""
        device = self._world.device
        tokens, labels, mask, positions = (
            torch.from_numpy(each).to(device)
            for each in (batch.tokens, batch.labels, batch.loss_mask, batch.positions.copy())
        )
        with self._autocast:
            output = self._model(
                tokens, attention_mask=attended(batch, device), position_ids=positions, use_cache=False
            )
        losses = torch.nn.functional.cross_entropy(
            output.logits.float().flatten(0, 1), labels.flatten(), reduction="none"
        )
        return (losses * mask.flatten()).sum(), mask.sum()

    def _reduced(self, totals: Sequence[tuple[float, float]]) -> Losses:
        loss, tokens = self._world.reduced([sum(each) for each in zip(*totals, strict=True)], "sum")
        return Losses(loss, int(tokens))
