"""Description of a packed row for Megatron's layers."""

from dataclasses import dataclass
from typing import Self

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_gptoss.context_parallel import ContextLayout
from megatron_gptoss.packing import PackedBatch


@dataclass
class PackedSequence(PackedSeqParams):
    """Megatron's description of a packed row, with further fields for SinkAttention."""

    position_ids: torch.Tensor | None = None
    """[tokens] int64 position of each local token in its sequence."""
    context_layout: ContextLayout | None = None
    """The rank of each token. None if one rank holds the row and no sequences share prefixes."""

    @classmethod
    def of(cls, batch: PackedBatch) -> Self:
        """Return the description of ``batch``'s row."""
        return cls(
            qkv_format="thd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_kv=batch.max_seqlen,
            position_ids=batch.position_ids,
            context_layout=batch.context_layout,
        )
