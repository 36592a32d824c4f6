"""RMSNorm on CPUs."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gptoss.transformer_config import mark


class CpuRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm under sequence parallelism.

    Tensor parallelism needs it, and Megatron's wrapper (torch_norm.py) refuses it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        **unused: Any,
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)

        # The gradient covers only this rank's share of the tokens: Megatron must sum it over
        # tensor-parallel ranks.
        mark(self.weight, sequence_parallel=config.sequence_parallel)
