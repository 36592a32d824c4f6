"""transformers' Llama with all computations in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm


@contextmanager
def float64_everywhere() -> Iterator[None]:
    """Compute RMSNorm and softmax of transformers' Llama in the model's dtype instead of float32."""

    def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        mean_square = hidden.square().mean(-1, keepdim=True)
        return self.weight * hidden * torch.rsqrt(mean_square + self.variance_epsilon)

    def softmax(values: torch.Tensor, dim: int = -1, dtype: Any = None) -> torch.Tensor:
        return torch.softmax(values, dim)

    with (
        patch.object(LlamaRMSNorm, "forward", norm),
        patch.object(torch.nn.functional, "softmax", softmax),
    ):
        yield
