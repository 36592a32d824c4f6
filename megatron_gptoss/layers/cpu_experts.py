"""Megatron's mixture of experts on CPUs.

The classes derive from Megatron's and avoid parts of megatron-core 0.19.2 that fail without CUDA.
The mathematics is Megatron's. Nothing is patched.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gptoss.layers.moe_layer import GptOssMoELayer
from megatron_gptoss.token_dispatcher import AlltoAllTokenDispatcher
from megatron_gptoss.transformer_config import set_distribution


class ExpertRowParallelLinear(RowParallelLinear):
    """Down projection of one expert, not split over ranks.

    It avoids two faults of RowParallelLinear for experts:

    - It marks the bias ``sequence_parallel``. With sequence parallelism the gradient is then summed
      twice, which doubles it.
    - Its reduction over a single rank returns the input itself. The in-place addition of the bias
      then fails in training.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.bias is not None:
            set_distribution(self.bias, sequence_parallel=False)

        # Skip the reduction: the token dispatcher does it.
        self.explicit_expert_comm = True


class CpuAlltoAllTokenDispatcher(AlltoAllTokenDispatcher):
    """All-to-all token dispatcher without the CUDA stream of Megatron's class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The parent creates a CUDA stream if this attribute is None.
        if MoEAlltoAllTokenDispatcher.cuda_dtoh_stream is None:
            MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none: CPU"
        super().__init__(*args, **kwargs)

    def _maybe_dtoh_and_synchronize(
        self,
        point: str,
        tokens_per_expert: Tensor | None = None,
    ) -> Tensor | None:
        """Convert split sizes to lists. Replaces the asynchronous copy from a GPU."""
        if self.drop_and_pad or point != self.cuda_dtoh_point:
            return tokens_per_expert

        for name in ("input_splits", "output_splits", "output_splits_tp", "num_out_tokens"):
            value = getattr(self, name, None)
            if torch.is_tensor(value):
                setattr(self, name, value.tolist())
        return tokens_per_expert


class CpuMoELayer(GptOssMoELayer):
    """MoE layer with ``CpuAlltoAllTokenDispatcher``."""

    dispatcher_class = CpuAlltoAllTokenDispatcher

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        # The parent cannot be given another dispatcher class, and its all-to-all dispatcher needs
        # CUDA. Let it build the all-gather dispatcher, which works everywhere, and replace that.
        config.moe_token_dispatcher_type = "allgather"
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.moe_token_dispatcher_type = "alltoall"

        self.token_dispatcher = self.build_dispatcher(kwargs["pg_collection"])
