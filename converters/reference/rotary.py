"""Rotary position embeddings (RoPE), plain or stretched for longer contexts."""

import math

import torch

from megatron_gptoss.config import ModelConfig
from megatron_gptoss.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling

Tensor = torch.Tensor


def rotary_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Return the frequencies and the attention factor.

    Frequencies are radians per position, fp32 [head_size / 2]. The attention factor multiplies cos
    and sin.
    """
    scaling = config.rope_frequencies
    plain = plain_frequencies(config)
    if isinstance(scaling, YarnScaling):
        return yarn_frequencies(plain, config.rope_theta, scaling)
    if isinstance(scaling, Llama3Scaling):
        return llama3_frequencies(plain, scaling), 1.0
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor, 1.0
    return plain, 1.0


def plain_frequencies(config: ModelConfig) -> Tensor:
    """Return the angles per position without scaling, fp32 [head_size / 2]."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    return config.rope_theta**-exponents


def yarn_frequencies(plain: Tensor, theta: float, scaling: YarnScaling) -> tuple[Tensor, float]:
    """Stretch frequencies by YaRN (arXiv 2309.00071, sections 3.2 and 3.4).

    Frequencies of few rotations within the original length are divided by the factor, frequencies
    of many rotations are kept, and a linear ramp lies between.

    Args:
        plain: unscaled frequencies, fp32 [head_size / 2].
        theta: base of the frequencies.
        scaling: factor, original length and ends of the ramp.

    Returns:
        The stretched frequencies and the factor of cos and sin ("concentration").
    """
    size = 2 * len(plain)

    # The channel that makes this number of rotations within the original length.
    def compute_channel(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return size * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = compute_channel(scaling.beta_fast)
    high = compute_channel(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    # Avoids a division by 0, like the published implementations.
    if low == high:
        high += 0.001

    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = plain / scaling.factor * ramp + plain * (1 - ramp)
    return frequencies, 0.1 * math.log(scaling.factor) + 1


def llama3_frequencies(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Stretch frequencies as Llama 3.1 does (meta-llama/llama-models, apply_scaling).

    The linear ramp between divided and kept frequencies is over rotations, not over channels.
    Frequencies are fp32 [head_size / 2].
    """
    # Rotations of each channel within the original length.
    rotations = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((rotations - scaling.low_freq_factor) / span).clamp(0, 1)
    return plain / scaling.factor * (1 - kept) + plain * kept


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i of every head against channel i + head_size / 2.

    Args:
        x: [tokens, heads, head_size].
        cos: [tokens, 1, head_size / 2], times the factor of ``rotary_frequencies``; so is sin.
        sin: [tokens, 1, head_size / 2].
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
