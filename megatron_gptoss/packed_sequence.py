"""Packed rows as Megatron's layers get them."""

from dataclasses import dataclass
from typing import Self

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_gptoss.context_parallel import ContextLayout
from megatron_gptoss.packing import PackedBatch


@dataclass
class PackedSequence(PackedSeqParams):
    """Megatron's description of a packed row, and what our attention needs besides."""

    position_ids: torch.Tensor | None = None
    """Of every local token in its own sequence."""
    context_layout: ContextLayout | None = None
    """None without context parallelism."""

    @classmethod
    def of(cls, batch: PackedBatch) -> Self:
        """Describe the row of ``batch``."""
        return cls(
            qkv_format="thd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_kv=batch.max_seqlen,
            position_ids=batch.position_ids,
            context_layout=batch.context_layout,
        )
