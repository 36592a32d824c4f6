"""Core attention of all model families, as a Megatron module.

The module applies rotary embeddings, and supports learned sinks, packed sequences and context
parallelism.
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
from gptoss_kernels.sink_attention.dispatch import ShapeClass, slow_reason
from megatron_gptoss.context_parallel.attention import context_parallel_attention
from megatron_gptoss.context_parallel.cost_model import H200
from megatron_gptoss.layers.no_sink import NO_SINK
from megatron_gptoss.layers.rotary import RotaryEmbedding, apply_rotary
from megatron_gptoss.packed_sequence import PackedSequence
from megatron_gptoss.transformer_config import PolicyTransformerConfig, set_distribution


def slow_reasons(model: torch.nn.Module) -> list[str]:
    """Return why layers of a model run the slow reference of attention on a GPU, each reason once.

    Empty if all layers have a kernel, and on CPUs.
    """
    layers = [module for module in model.modules() if isinstance(module, SinkAttention)]
    reasons = [layer.slow_reason() for layer in layers]
    return sorted({reason for reason in reasons if reason is not None})


class SinkAttention(DotProductAttention):
    """Packed causal attention, with one learned sink logit per query head or without sinks.

    The class inherits from Megatron's attention only for its sharded state dict, which splits the
    sinks over tensor-parallel ranks. Megatron's constructor needs CUDA, and its forward pass
    supports neither packing nor context parallelism.
    """

    def __init__(
        self,
        config: PolicyTransformerConfig,
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

        self.rotary = RotaryEmbedding(config.architecture)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.backend = config.attention_backend_name

        # Megatron numbers layers from 1, and its window does not count the token itself.
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

        # Keep Megatron's name of the parameter, because checkpoints contain it.
        self.local_heads = config.num_attention_heads // self.tp_group.size()
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            self.softmax_offset = self._allocate_sinks()

    def _allocate_sinks(self) -> torch.nn.Parameter:
        """Return the sink parameter [heads] of this rank's heads."""
        sinks = torch.nn.Parameter(torch.empty(self.local_heads, dtype=self.config.params_dtype))
        if self.config.perform_initialization:
            self.config.init_method(sinks)
        set_distribution(sinks, tensor_model_parallel=True, partition_dim=0, partition_stride=1)
        return sinks

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *unused: Any,
        packed_seq_params: PackedSequence | None = None,
        **also_unused: Any,
    ) -> Tensor:
        """Compute attention within each sequence of a packed row.

        All tensors contain the tokens and heads of this rank.

        Args:
            query: [tokens, heads, head_size] in the model's dtype, and so are key and value.
            key: [tokens, kv_heads, head_size].
            value: [tokens, kv_heads, head_size].
            unused: arguments of Megatron's attention.
            packed_seq_params: the row, made by ``PackedSequence.of``.
            also_unused: arguments of Megatron's attention.

        Returns:
            [tokens, heads * head_size].

        Raises:
            ValueError: the input is not packed.
        """
        row = packed_seq_params
        if not isinstance(row, PackedSequence) or row.position_ids is None:
            raise ValueError("attention needs packed sequences: pass PackedSequence.of(batch)")

        # Rotate in fp32 at least: cosines rounded to bf16 would differ from those of the engines.
        compute_dtype = torch.promote_types(query.dtype, torch.float32)
        cos, sin = self.rotary.cos_sin(row.position_ids, compute_dtype)
        query = apply_rotary(query, cos, sin)
        key = apply_rotary(key, cos, sin)

        sinks = self._sinks(query)
        output = self._attend(query, key, value, sinks, row)
        if self.softmax_offset is not None and not self.config.sink_backward:
            # Ablation: the output of attention with sinks, and the gradients of attention without.
            without_sinks = self._attend(query, key, value, 0 * sinks + NO_SINK, row)
            output = output.detach() + (without_sinks - without_sinks.detach())
        return output.flatten(1)

    def slow_reason(self) -> str | None:
        """Return why this layer runs the slow reference of attention on a GPU; None if it does not.

        A model that asks for the reference (``attention_backend_name``) also gives None.
        """
        if self.backend == "reference":
            return None
        kv_heads = self.config.num_query_groups or self.config.num_attention_heads
        shape = ShapeClass(
            # Attention computes on the GPU of this rank, in the dtype of the weights.
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            dtype=self.config.params_dtype,
            heads=self.local_heads,
            kv_heads=max(1, kv_heads // self.tp_group.size()),
            head_size=self.config.kv_channels,
            window=self.window,
        )
        return slow_reason(shape)

    def _sinks(self, query: Tensor) -> Tensor:
        """Return the sink logits [heads], changed by the configured ablations."""
        # A model without sinks: exp(-inf) adds nothing to the denominator of the softmax.
        if self.softmax_offset is None:
            return query.new_full((self.local_heads,), -torch.inf)

        sinks: Tensor = self.softmax_offset
        if not self.config.sink_gradient:
            # The gradient must be 0 instead of None, because data parallelism waits for a gradient
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
        """Return the output [tokens, heads, head_size] for the given sinks [heads]."""
        # The layout of one rank says which prefixes the sequences share.
        if self.cp_group.size() == 1 and row.context_layout is None:
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
                f"this rank splits the row with {self.cp_group.size() - 1} other ranks "
                "(context parallelism). Pass its part of the row, "
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
            machine=H200,
        )
