"""The engine of megatron-core: tensor, pipeline and data parallelism, a distributed optimizer, bfloat16, and checkpoints
that a different number of processes can load.

A CPU runs the same code (see `cuda_on_cpu`). Fusions are off, because they need kernels that are not in torch. Gradients are
summed and reduced in float32, and divided by the number of trained tokens in the global batch, so that a step does not
depend on how rows are split over replicas and micro-batches.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed

from .cuda_on_cpu import compute_on_cpu
from .engine import BatchShape, Losses, World, attended
from .model import Weights, from_llama, joined_slices, name_in_layer, slice_of, to_llama
from .rows import TrainBatch
from .settings import Precision, TrainSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchAttention(MegatronModule):
    """Attention by torch's `scaled_dot_product_attention`, in place of a layer's `core_attention`.

    megatron-core's own materializes all scores, or needs Transformer Engine. torch's is FlashAttention (Dao 2023) on a GPU,
    whose backward adds in no fixed order, and a blocked, exact-order kernel on a CPU; its memory grows linearly with the
    length. Packed rows have a mask, and the kernel for masks computes the whole square.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **_: object) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,  # noqa: ARG002 - part of megatron-core's call
        attention_bias: torch.Tensor | None = None,  # noqa: ARG002
        packed_seq_params: PackedSeqParams | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Attend: [length, rows, heads, width] to [length, rows, heads x width]. The mask is `engine.attended`."""
        found = torch.nn.functional.scaled_dot_product_attention(
            *(each.permute(1, 2, 0, 3) for each in (query, key, value)),
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            enable_gqa=key.shape[2] != query.shape[2],
        )
        return found.permute(2, 0, 1, 3).flatten(2)


class MegatronEngine:
    """A model and its optimizer, split over the processes, which call each method together. One per process, because megatron-core's
    groups are global.
    """

    def __init__(
        self, settings: TrainSettings, precision: Precision, world: World, vocabulary: int, weights: Weights
    ) -> None:
        if world.device.type == "cpu":
            compute_on_cpu()
        parallel_state.initialize_model_parallel(settings.parallel.tensor, settings.parallel.pipeline)
        self._settings, self._world = settings, world
        replicas = parallel_state.get_data_parallel_world_size()
        self.shape = BatchShape(
            parallel_state.get_data_parallel_rank(), replicas, settings.micro_batch,
            settings.global_batch // (settings.micro_batch * replicas),
        )  # fmt: skip
        config = _transformer(settings, precision)
        layer: Any = get_gpt_layer_local_spec(normalization="RMSNorm")
        layer.submodules.self_attention.submodules.core_attention = ModuleSpec(TorchAttention)
        self._bare = GPTModel(
            config, layer, vocab_size=vocabulary, max_sequence_length=settings.sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=settings.model.tied_embeddings, position_embedding_type="rope",
            rotary_base=cast("int", settings.model.rope_base),  # any number will do
        ).to(world.device)  # fmt: skip
        self._first_layer = min(int(layer.layer_number) for layer in cast("Any", self._bare).decoder.layers) - 1
        rank, size = (
            parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
        )  # fmt: skip
        # Every process makes the whole tensor and keeps its slice, so that weights don't depend on the number of processes.
        for full_name, parameter in self._bare.named_parameters():
            name, number = name_in_layer(full_name, self._first_layer)
            tensor = from_llama(name, number, weights, settings.model)
            if getattr(parameter, "tensor_model_parallel", False):
                tensor = slice_of(name, tensor, int(getattr(parameter, "partition_dim")), rank, size)  # noqa: B009
            with torch.no_grad():
                parameter.copy_(tensor)
        wrapped = Float16Module(config, self._bare) if config.bf16 else self._bare
        replication = DistributedDataParallelConfig(
            use_distributed_optimizer=settings.optimizer.distributed, grad_reduce_in_fp32=True
        )
        self._model = DistributedDataParallel(config, replication, wrapped)
        chosen = settings.optimizer
        optimizer = OptimizerConfig(
            optimizer="adam", lr=chosen.learning_rate, min_lr=chosen.minimum_learning_rate,
            weight_decay=chosen.weight_decay, adam_beta1=chosen.beta1, adam_beta2=chosen.beta2, adam_eps=chosen.epsilon,
            clip_grad=chosen.clip, bf16=precision == "bfloat16", params_dtype=DTYPES[precision],
            use_distributed_optimizer=chosen.distributed,
        )  # fmt: skip
        self._optimizer = get_megatron_optimizer(optimizer, [self._model])
        if settings.optimizer.distributed:
            # torch's optimizer creates its state at its first step, but a checkpoint is loaded before that.
            for parameter, known in _states(self._optimizer):
                known["step"] = torch.zeros(())
                known |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss

    def step(self, batches: Sequence[TrainBatch], learning_rate: float) -> tuple[Losses, float]:
        """Train on this replica's micro-batches; returns the losses before the step, and the gradient's norm.

        The gradient is the mean over all trained tokens of the global batch.
        """
        self._model.train()
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = self._settings.optimizer.weight_decay * group["wd_mult"]  # 0 for norms
        losses = self._run(batches, forward_only=False)
        _, norm, _ = cast("tuple[bool, float, Any]", self._optimizer.step())
        return losses, float(norm)

    def losses(self, batches: Sequence[TrainBatch]) -> Losses:
        """Return the losses on a global batch, without training."""
        self._model.eval()
        with torch.no_grad():
            return self._run(batches, forward_only=True)

    def save(self, folder: str) -> None:
        """Write the complete state in the format of `megatron.core.dist_checkpointing`.

        After `load`, training continues exactly on a CPU, and up to rounding on a GPU.
        """
        dist_checkpointing.save(self._state(loading=False), folder)

    def load(self, folder: str) -> None:
        """Restore the state that `save` wrote."""
        state = cast("dict[str, Any]", dist_checkpointing.load(self._state(loading=True), folder))
        self._bare.load_state_dict(state["model"])
        saved, optimizer = state["optimizer"], cast("Any", self._optimizer)
        distributed_state = saved.pop("param_state", None)
        optimizer.load_state_dict(saved)
        # megatron-core loads torch's step counters for a distributed optimizer as a single counter shared by all parameters,
        # which would count each step once per parameter, and then misses them among the tensors of its checkpoint.
        counters = [(known, known.pop("step").clone()) for _, known in _states(optimizer)]
        if distributed_state is not None:
            optimizer.chained_optimizers[0].load_parameter_state_from_fully_reshardable(distributed_state)
        for known, step in counters:
            known["step"] = step

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the model with Llama's names, on the CPU, in the precision of training; complete only in the first process."""
        found: dict[str, torch.Tensor] = {}
        for full_name, parameter in self._bare.named_parameters():
            name, layer = name_in_layer(full_name, self._first_layer)
            tensor = parameter.detach()
            if getattr(parameter, "tensor_model_parallel", False):
                own = tensor.contiguous()
                slices = [torch.empty_like(own) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
                distributed.all_gather(slices, own, parallel_state.get_tensor_model_parallel_group())
                tensor = joined_slices(name, slices, int(getattr(parameter, "partition_dim")))  # noqa: B009 - torch knows none
            # The last stage of a pipeline holds a copy of tied embeddings.
            if name != "output_layer.weight" or not self._settings.model.tied_embeddings:
                found |= to_llama(name, layer, tensor.cpu().contiguous(), self._settings.model)
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        if stages == 1:
            return found
        gathered: list[Any] = [None] * stages
        distributed.all_gather_object(gathered, found, parallel_state.get_pipeline_model_parallel_group())
        return {name: tensor for part in gathered for name, tensor in part.items()}

    def _state(self, *, loading: bool) -> dict[str, Any]:
        model = self._bare.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        return {
            "model": model,
            "optimizer": self._optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata),
        }

    def _run(self, batches: Sequence[TrainBatch], *, forward_only: bool) -> Losses:
        rows, length = batches[0].tokens.shape
        parts = get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=iter(batches), model=[self._model],
            num_microbatches=len(batches), seq_length=length, micro_batch_size=rows, forward_only=forward_only,
        )  # fmt: skip
        counted = parallel_state.get_tensor_model_parallel_rank() == 0  # its peers hold the same losses
        total = [sum(float(part[name]) for part in parts if counted) for name in ("loss", "tokens")]
        loss, tokens = self._world.reduced(total, "sum")
        return Losses(loss, int(tokens))

    def _forward(self, batches: Iterator[TrainBatch], model: DistributedDataParallel) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        device = self._world.device
        tokens, labels, mask = (
            torch.from_numpy(each).to(device, non_blocking=True)
            for each in (batch.tokens, batch.labels, batch.loss_mask)
        )
        positions = torch.from_numpy(batch.positions.copy()).to(device)
        output = model(tokens, positions, attended(batch.segments, device), labels=labels)

        def summed(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            loss, count = (output.float() * mask).sum(), mask.sum()
            return loss, count.int(), {"loss": loss.detach().clone(), "tokens": count}

        return output, summed


def _transformer(settings: TrainSettings, precision: Precision) -> TransformerConfig:
    model, dtype = settings.model, DTYPES[precision]
    return TransformerConfig(
        num_layers=model.layers, hidden_size=model.hidden, ffn_hidden_size=model.feed_forward,
        num_attention_heads=model.heads, num_query_groups=model.key_value_heads, normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=settings.parallel.tensor, pipeline_model_parallel_size=settings.parallel.pipeline,
        pipeline_dtype=dtype, params_dtype=dtype, bf16=precision == "bfloat16", use_cpu_initialization=True,
        calculate_per_token_loss=True, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False,
    )  # fmt: skip


def _states(optimizer: Any) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:  # noqa: ANN401 - one of several kinds
    """Each parameter with its state in torch's own optimizer; empty with Transformer Engine's or Apex's."""
    parts = [part.optimizer for part in optimizer.chained_optimizers if isinstance(part.optimizer, torch.optim.AdamW)]
    groups = [(part.state, group["params"]) for part in parts for group in part.param_groups]
    return [(parameter, state[parameter]) for state, parameters in groups for parameter in parameters]
