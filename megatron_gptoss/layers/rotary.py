"""Rotary position embeddings with YaRN scaling, applied at explicit token positions.

Angles are computed in fp32 whatever the model's dtype, as Hugging Face and the inference engines do: with other angles,
trainer and engine would disagree at long positions."""

import math

import torch

from megatron_gptoss.config import ModelConfig


def yarn_inverse_frequencies(config: ModelConfig, truncate: bool = False) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, fp32 [head_size / 2], and the factor by which cos and sin are multiplied.

    YaRN (arXiv 2309.00071, section 3.2): frequencies that turn more than beta_fast times over the original length are
    kept, those that turn fewer than beta_slow times are divided by the factor, with a linear ramp between.
    GPT-OSS does not round the ends of the ramp to integers (``truncate=False``)."""
    dim, base = config.head_size, config.rope_theta
    frequencies = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    extrapolated, interpolated = 1.0 / frequencies, 1.0 / (config.yarn_factor * frequencies)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(config.yarn_original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(config.yarn_beta_fast), dimension_of(config.yarn_beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    keep = 1.0 - ramp
    concentration = 0.1 * math.log(config.yarn_factor) + 1.0 if config.yarn_factor > 1 else 1.0
    return interpolated * (1 - keep) + extrapolated * keep, concentration


class RotaryEmbedding:
    """cos/sin of the angles at given positions."""

    def __init__(self, config: ModelConfig) -> None:
        self._inverse_frequencies, self._concentration = yarn_inverse_frequencies(config)

    def cos_sin(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: int [tokens] -> cos, sin: [tokens, 1, head_size / 2] in ``dtype``, YaRN concentration included."""
        self._inverse_frequencies = self._inverse_frequencies.to(positions.device)  # once: the copy waits for the GPU
        angles = positions.float()[:, None, None] * self._inverse_frequencies
        return (angles.cos() * self._concentration).to(dtype), (angles.sin() * self._concentration).to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channel i against channel i + head_size / 2. x: [tokens, heads, head_size] -> the same shape and dtype."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        from gptoss_kernels.rotary import rotate_heads

        return rotate_heads(x, cos, sin)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
