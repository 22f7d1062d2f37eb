"""A reference for the trainer's engine: plain `transformers` and AdamW in one process, from the same weights."""

import torch
from safetensors.torch import load_file, save_file
from tokenmill.tasks.train.engine import BatchShape, Losses, attended
from transformers import LlamaForCausalLM


class PlainEngine:
    def __init__(self, settings, precision, world, config, weights):
        self._settings, self._world = settings, world
        self._autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=precision == "bfloat16")
        self.shape = BatchShape(0, 1, settings.micro_batch, settings.global_batch // settings.micro_batch)
        self._model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights(name))
        chosen, parameters = settings.optimizer, list(self._model.parameters())
        matrices, norms = ([each for each in parameters if (each.dim() > 1) == has] for has in (True, False))
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": chosen.weight_decay}, {"params": norms, "weight_decay": 0.0}],
            lr=chosen.learning_rate, betas=(chosen.beta1, chosen.beta2), eps=chosen.epsilon,
        )  # fmt: skip

    def step(self, batches, learning_rate):
        self._optimizer.zero_grad()
        found = []
        for batch in batches:
            loss, tokens = self._summed(batch)
            loss.backward()
            found.append((float(loss.detach()), int(tokens)))
        losses = Losses(*(sum(each) for each in zip(*found, strict=True)))
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad /= max(1, losses.tokens)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.optimizer.clip)
        self._optimizer.step()
        return losses, float(norm)

    def losses(self, batches):
        with torch.inference_mode():
            found = [(float(loss), int(tokens)) for loss, tokens in map(self._summed, batches)]
        return Losses(*(sum(each) for each in zip(*found, strict=True)))

    def save(self, folder):
        state = {f"weight/{name}": parameter.detach() for name, parameter in self._model.named_parameters()}
        for name, parameter in self._model.named_parameters():
            state |= {f"{part}/{name}": tensor for part, tensor in self._optimizer.state[parameter].items()}
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, f"{folder}/state.safetensors")

    def load(self, folder):
        stored = load_file(f"{folder}/state.safetensors")
        for name, parameter in self._model.named_parameters():
            state = {part: stored[f"{part}/{name}"] for part in ("step", "exp_avg", "exp_avg_sq")}
            self._optimizer.state[parameter].update(state)
            with torch.no_grad():
                parameter.copy_(stored[f"weight/{name}"])

    def weights(self):
        return {name: each.detach().contiguous() for name, each in self._model.named_parameters()}

    def _summed(self, batch):
        device = self._world.device
        arrays = (batch.tokens, batch.labels, batch.loss_mask, batch.positions.copy())
        tokens, labels, mask, positions = (torch.from_numpy(each) for each in arrays)
        with self._autocast:
            output = self._model(
                tokens, attention_mask=attended(batch.segments, device), position_ids=positions, use_cache=False
            )
        losses = torch.nn.functional.cross_entropy(
            output.logits.float().flatten(0, 1), labels.flatten(), reduction="none"
        )
        return (losses * mask.flatten()).sum(), mask.sum()
