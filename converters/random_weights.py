"""Initial weights that depend on seed and tensor name only, not on the parallel layout."""

from collections.abc import Callable

import torch

from converters.names import hf_shapes
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.named_random import named_generator


def random_hf_weights(config: ModelConfig, seed: int) -> Callable[[str], torch.Tensor]:
    """Return a function from Hugging Face name to a random tensor, fp32 [hf_shapes].

    Norms are 1, biases and sinks 0, other tensors are normal with ``config.initializer_std``.

    Args:
        config: model configuration.
        seed: seed of all tensors.

    Example:
        >>> from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
        >>> config = GptOssModelConfig(num_layers=1, num_experts=4, hidden_size=64)
        >>> get_tensor = random_hf_weights(config, seed=0)
        >>> get_tensor("model.norm.weight").unique().tolist()
        [1.0]
    """
    shapes = hf_shapes(config)

    def draw(name: str) -> torch.Tensor:
        """Return a random tensor."""
        shape = shapes[name]
        if "norm" in name:
            return torch.ones(shape)
        if name.endswith(("bias", "sinks")):
            return torch.zeros(shape)

        # A generator per name: every rank draws only its own tensors, and still gets equal values.
        return torch.randn(shape, generator=named_generator(seed, name)) * config.initializer_std

    return draw
