"""Megatron's ``core_attention`` for GPT-OSS: rotary embedding, learned sinks, packed sequences, context parallelism."""

import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention

from gptoss_kernels.sink_attention import sink_attention
from megatron_gptoss.context_parallel import Machine, context_parallel_attention
from megatron_gptoss.layers.rotary import RotaryEmbedding, apply_rotary
from megatron_gptoss.packing import PackedSequence
from megatron_gptoss.transformer_config import GptOssTransformerConfig, mark

NO_SINK = -1e4
"""A sink logit that takes no attention."""


class SinkAttention(DotProductAttention):
    """Packed causal attention with one learned sink logit per query head.

    Inherits the sharded state dict (the sinks are split over tensor-parallel ranks) and nothing else from Megatron's
    attention, whose constructor needs CUDA and whose forward knows neither packing nor context parallelism."""

    def __init__(
        self,
        config: GptOssTransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        MegatronModule.__init__(self, config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, max(1, layer_number))
        self.window = config.window_size[0] + 1 if windowed else None
        self.rotary = RotaryEmbedding(config.gptoss)
        self.backend = config.attention_backend_name
        self.scheme = config.context_scheme_full if self.window is None else config.context_scheme_window
        self.machine = Machine(config.context_bandwidth, config.attention_rate)
        heads = config.num_attention_heads // self.tp_group.size()
        self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        if config.perform_initialization:
            config.init_method(self.softmax_offset)
        mark(self.softmax_offset, tensor_model_parallel=True, partition_dim=0, partition_stride=1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *unused: Any,
        packed_seq_params: PackedSequence | None = None,
        **also_unused: Any,
    ) -> torch.Tensor:
        """query: [tokens, heads, head_size], key/value: [tokens, kv_heads, head_size], all local to this rank.

        Returns [tokens, heads * head_size]. Raises ValueError when the input is not packed."""
        if not isinstance(packed_seq_params, PackedSequence) or packed_seq_params.position_ids is None:
            raise ValueError("GPT-OSS attention takes packed sequences only: pass PackedBatch.packed_seq_params()")
        compute = torch.promote_types(query.dtype, torch.float32)
        cos, sin = self.rotary.cos_sin(packed_seq_params.position_ids, compute)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        sinks: torch.Tensor = self.softmax_offset
        if not self.config.sink_gradient:
            sinks = sinks.detach() + 0 * sinks  # a gradient of zero: data parallelism waits for one of every parameter
        if not self.config.sinks:
            sinks = 0 * sinks + NO_SINK
        inputs = query, key, value, packed_seq_params
        out = self._attend(*inputs, sinks)
        if not self.config.sink_backward:
            without = self._attend(*inputs, 0 * sinks + NO_SINK)
            out = out.detach() + (without - without.detach())
        return out.flatten(1)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedSequence, sinks: torch.Tensor
    ) -> torch.Tensor:
        inputs = query, key, value, sinks
        if self.cp_group.size() == 1:
            lengths: Any = {"cu_seqlens": row.cu_seqlens_q, "max_seqlen": row.max_seqlen_q}
            out: Any = sink_attention(*inputs, **lengths, window=self.window, scale=self.scale, backend=self.backend)
            return out
        if row.context_layout is None:
            raise ValueError(
                f"this rank shares its tokens with {self.cp_group.size() - 1} others (context parallelism): pass its "
                "part of the row, PackedBatch.context_parallel_shard(rank, size)"
            )
        layer: Any = (self.window, self.scale, self.backend, self.scheme, self.machine)
        return context_parallel_attention(*inputs, row.context_layout, self.cp_group, *layer)
