"""Transformer Engine's attention for ``build_model(..., core_attention=...)``."""

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention

from megatron_gptoss.layers.rotary import RotaryEmbedding, apply_rotary
from megatron_gptoss.packed_sequence import PackedSequence
from megatron_gptoss.transformer_config import PolicyTransformerConfig, set_distribution


class TransformerEngineAttention(TEDotProductAttention):
    """Has SinkAttention's inputs, outputs and parameter, but no context parallelism.

    A row of sequences of equal length runs unpacked. Other rows, with the sink's gradient, use
    fused kernels of Transformer Engine from cuDNN 9.26 on. Older versions may have no backend for
    them.
    """

    def __init__(self, config: PolicyTransformerConfig, **settings: Any) -> None:
        if config.context_parallel_size > 1:
            raise ValueError(
                "Transformer Engine's attention shares rows over ranks in another way than our batches do",
            )
        super().__init__(config, **settings)
        self.rotary = RotaryEmbedding(config.architecture)
        self.softmax_offset.data = self.softmax_offset.data.to(config.params_dtype)
        set_distribution(
            self.softmax_offset, tensor_model_parallel=True, partition_dim=0, partition_stride=1
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *unused: Any,
        packed_seq_params: PackedSequence,
        **also_unused: Any,
    ) -> torch.Tensor:
        """Attend within each sequence, as SinkAttention does on one context-parallel rank."""
        row = packed_seq_params
        assert row.position_ids is not None
        cos, sin = self.rotary.cos_sin(row.position_ids, torch.float32)
        inputs = [apply_rotary(query, cos, sin), apply_rotary(key, cos, sin), value.contiguous()]

        sequences = len(row.cu_seqlens_q) - 1
        all_have_one_length = sequences * row.max_seqlen_q == len(query)
        layout: dict[str, Any]
        if all_have_one_length:
            inputs = [x.unflatten(0, (sequences, -1)) for x in inputs]
            layout = {"qkv_format": "bshd", "attn_mask_type": "causal"}
        else:
            layout = {
                "qkv_format": "thd",
                "attn_mask_type": "padding_causal",
                "cu_seqlens_q": row.cu_seqlens_q,
                "cu_seqlens_kv": row.cu_seqlens_q,
                "max_seqlen_q": row.max_seqlen_q,
                "max_seqlen_kv": row.max_seqlen_q,
            }

        # Skip TEDotProductAttention's forward, which would set the layout from Megatron's
        # parameters.
        out = super(TEDotProductAttention, self).forward(*inputs, **layout)
        return out.reshape(len(query), -1)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return SinkAttention's state, without Transformer Engine's extra state."""
        state = super().sharded_state_dict(*args, **kwargs)
        return {name: entry for name, entry in state.items() if not name.endswith("_extra_state")}
