"""Attention for megatron-core's layers by torch's own kernels.

The attention of megatron-core's local layers writes out all scores, length x length for every head, and its fast one needs
Transformer Engine. torch's `scaled_dot_product_attention` needs neither: on a GPU it is FlashAttention (Dao 2023), on a CPU
a blocked kernel, and memory grows with the length instead of its square. A packed row comes with a mask of which tokens see
which; then the kernel that takes masks is used, which computes the whole square, sequences or not.

On a CPU the same step gives the same bits. FlashAttention's backward adds in no fixed order, unless torch is asked to be
deterministic, which it is not: some kernels refuse that. So a step that is done again on a GPU gives the same to rounding.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchAttention(MegatronModule):
    """Takes the place of `core_attention` in a layer."""

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
        """Attend: [length, rows, heads, width] to [length, rows, heads x width]. The mask is that of `engine.attended`."""
        found = torch.nn.functional.scaled_dot_product_attention(
            *(each.permute(1, 2, 0, 3) for each in (query, key, value)),
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            enable_gqa=key.shape[2] != query.shape[2],
        )
        return found.permute(2, 0, 1, 3).flatten(2)
