"""Megatron's mixture of experts where there is no CUDA.

Nothing is patched. Each class says what of megatron-core 0.19.2 it steps around; the mathematics
is Megatron's.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gptoss.step_clock import TimedMoELayer
from megatron_gptoss.transformer_config import mark


class ExpertRowParallelLinear(RowParallelLinear):
    """The down projection of one expert that is not split over ranks.

    It steps around two faults of RowParallelLinear in this place:

    - It marks the bias ``sequence_parallel``, so that with tensor plus sequence parallelism its
      gradient is summed twice (exactly doubled).
    - Its reduction over one rank returns the input itself, on which the expert's in-place bias
      addition fails in training.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.bias is not None:
            mark(self.bias, sequence_parallel=False)

        # Leaves the reduction to the dispatcher.
        self.explicit_expert_comm = True


class CpuAlltoAllTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """The all-to-all dispatcher without its CUDA side stream.

    On a CPU the split sizes can become plain lists at once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Anything but None keeps the parent from creating a CUDA stream.
        if MoEAlltoAllTokenDispatcher.cuda_dtoh_stream is None:
            MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none: CPU"
        super().__init__(*args, **kwargs)

    def _maybe_dtoh_and_synchronize(
        self,
        point: str,
        tokens_per_expert: Tensor | None = None,
    ) -> Tensor | None:
        if self.drop_and_pad or point != self.cuda_dtoh_point:
            return tokens_per_expert

        for name in ("input_splits", "output_splits", "output_splits_tp", "num_out_tokens"):
            value = getattr(self, name, None)
            if torch.is_tensor(value):
                setattr(self, name, value.tolist())
        return tokens_per_expert


class CpuMoELayer(TimedMoELayer):
    """MoELayer with the dispatcher above."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        # The parent offers no way to name another dispatcher, and building its all-to-all one
        # fails without CUDA. It builds the one that works everywhere, which is then replaced.
        config.moe_token_dispatcher_type = "allgather"
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.moe_token_dispatcher_type = "alltoall"

        self.token_dispatcher = CpuAlltoAllTokenDispatcher(
            self.num_local_experts,
            self.local_expert_indices,
            config=self.config,
            pg_collection=kwargs["pg_collection"],
        )
