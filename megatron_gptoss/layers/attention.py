"""Megatron's ``core_attention`` for GPT-OSS.

Rotary embedding, learned sinks, packed sequences, context parallelism.
"""

import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from gptoss_kernels.sink_attention import sink_attention
from megatron_gptoss.context_parallel import Machine, context_parallel_attention
from megatron_gptoss.layers.rotary import RotaryEmbedding, apply_rotary
from megatron_gptoss.packing import PackedSequence
from megatron_gptoss.transformer_config import GptOssTransformerConfig, mark

NO_SINK = -1e4
"""A sink logit that takes no attention."""


class SinkAttention(DotProductAttention):
    """Packed causal attention with one learned sink logit per query head.

    Inherits the sharded state dict (the sinks are split over tensor-parallel ranks) and nothing
    else from Megatron's attention, whose constructor needs CUDA and whose forward knows neither
    packing nor context parallelism.
    """

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
            groups = ["tp", "cp"]
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=groups)
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp

        self.rotary = RotaryEmbedding(config.gptoss)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.backend = config.attention_backend_name

        # Megatron counts layers from 1, and the keys to the left of a token without itself.
        is_windowed = is_layer_window_attention(
            config.window_size,
            config.window_attn_skip_freq,
            max(1, layer_number),
        )
        if is_windowed:
            self.window = config.window_size[0] + 1
            self.scheme = config.context_scheme_window
        else:
            self.window = None
            self.scheme = config.context_scheme_full
        self.machine = Machine(bandwidth=config.context_bandwidth, rate=config.attention_rate)

        # The attribute's name is Megatron's, so that its sharded state dict includes the sinks.
        local_heads = config.num_attention_heads // self.tp_group.size()
        sinks = torch.empty(local_heads, dtype=config.params_dtype)
        self.softmax_offset = torch.nn.Parameter(sinks)
        if config.perform_initialization:
            config.init_method(self.softmax_offset)
        mark(
            self.softmax_offset,
            tensor_model_parallel=True,
            partition_dim=0,
            partition_stride=1,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *unused: Any,
        packed_seq_params: PackedSequence | None = None,
        **also_unused: Any,
    ) -> Tensor:
        """Attend within each sequence of a packed row, all tensors local to this rank.

        Args:
            query: [tokens, heads, head_size].
            key, value: [tokens, kv_heads, head_size].
            packed_seq_params: of ``PackedBatch.packed_seq_params``.

        Returns:
            [tokens, heads * head_size].

        Raises:
            ValueError: when the input is not packed.
        """
        row = packed_seq_params
        if not isinstance(row, PackedSequence) or row.position_ids is None:
            raise ValueError(
                "GPT-OSS attention takes packed sequences only: pass PackedBatch.packed_seq_params()"
            )

        compute_dtype = torch.promote_types(query.dtype, torch.float32)
        cos, sin = self.rotary.cos_sin(row.position_ids, compute_dtype)
        query = apply_rotary(query, cos, sin)
        key = apply_rotary(key, cos, sin)

        sinks = self._sinks()
        output = self._attend(query, key, value, sinks, row)
        if not self.config.sink_backward:
            # The value of one, the gradient of the other.
            without_sinks = self._attend(query, key, value, 0 * sinks + NO_SINK, row)
            output = output.detach() + (without_sinks - without_sinks.detach())
        return output.flatten(1)

    def _sinks(self) -> Tensor:
        """Return the sink logits [heads], with the faults that an ablation asks for."""
        sinks: Tensor = self.softmax_offset
        if not self.config.sink_gradient:
            # Not without a gradient but with one of zero: data parallelism waits for a gradient
            # of every parameter.
            sinks = sinks.detach() + 0 * sinks
        if not self.config.sinks:
            sinks = 0 * sinks + NO_SINK
        return sinks

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        row: PackedSequence,
    ) -> Tensor:
        if self.cp_group.size() == 1:
            output: Any = sink_attention(
                query,
                key,
                value,
                sinks,
                cu_seqlens=row.cu_seqlens_q,
                max_seqlen=row.max_seqlen_q,
                window=self.window,
                scale=self.scale,
                backend=self.backend,
            )
            return output

        if row.context_layout is None:
            raise ValueError(
                f"this rank shares its tokens with {self.cp_group.size() - 1} others "
                "(context parallelism): pass its part of the row, "
                "PackedBatch.context_parallel_shard(rank, size)"
            )
        return context_parallel_attention(
            query,
            key,
            value,
            sinks,
            layout=row.context_layout,
            group=self.cp_group,
            window=self.window,
            scale=self.scale,
            backend=self.backend,
            scheme=self.scheme,
            machine=self.machine,
        )
