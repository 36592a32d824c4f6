"""Initial weights that depend on the seed and the tensor's name only, not on the parallel layout."""

import hashlib
from collections.abc import Callable

import torch

from converters.names import hf_shapes
from megatron_gptoss.config import ModelConfig


def random_hf_weights(config: ModelConfig, seed: int) -> Callable[[str], torch.Tensor]:
    """A source of fp32 tensors by Hugging Face name: norms 1, biases and sinks 0, everything else normal with
    ``config.initializer_std``."""
    shapes = hf_shapes(config)

    def get(name: str) -> torch.Tensor:
        shape = shapes[name]
        if "norm" in name:
            return torch.ones(shape)
        if name.endswith(("bias", "sinks")):
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=False) >> 1)
        return torch.randn(shape, generator=generator) * config.initializer_std

    return get
