"""Rotary position embeddings with YaRN scaling, applied at explicit token positions.

Angles are computed in fp32 whatever the model's dtype, as Hugging Face and the inference engines
do: with other angles, trainer and engine would disagree at long positions.
"""

import math

import torch

from megatron_gptoss.config import ModelConfig


def yarn_inverse_frequencies(
    config: ModelConfig,
    truncate: bool = False,
) -> tuple[torch.Tensor, float]:
    """Compute the inverse frequencies of YaRN (arXiv 2309.00071, section 3.2).

    Frequencies that turn more than beta_fast times over the original length are kept, those that
    turn fewer than beta_slow times are divided by the factor, with a linear ramp between.

    Args:
        config: the model.
        truncate: round the ends of the ramp to integers. GPT-OSS does not.

    Returns:
        Inverse frequencies, fp32 [head_size / 2], and the factor by which cos and sin are
        multiplied ("concentration" in OpenAI's code, section 3.4 of the paper).
    """
    dim = config.head_size
    base = config.rope_theta

    def dimension_of(rotations: float) -> float:
        """Return which dimension makes so many rotations over the original length."""
        power_of_base = config.yarn_original_length / (rotations * 2 * math.pi)
        return dim * math.log(power_of_base) / (2 * math.log(base))

    low = dimension_of(config.yarn_beta_fast)
    high = dimension_of(config.yarn_beta_slow)
    if truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)

    # 0 below the ramp, 1 above it.
    span = high - low if high != low else 0.001
    dimensions = torch.arange(dim // 2, dtype=torch.float32)
    ramp = ((dimensions - low) / span).clamp(0, 1)
    keep = 1.0 - ramp

    frequencies = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    extrapolated = 1.0 / frequencies
    interpolated = 1.0 / (config.yarn_factor * frequencies)
    inverse_frequencies = interpolated * (1 - keep) + extrapolated * keep

    concentration = 1.0
    if config.yarn_factor > 1:
        concentration = 0.1 * math.log(config.yarn_factor) + 1.0
    return inverse_frequencies, concentration


class RotaryEmbedding:
    """Computes cos and sin of the angles at given positions."""

    def __init__(self, config: ModelConfig) -> None:
        self._inverse_frequencies, self._concentration = yarn_inverse_frequencies(config)

    def cos_sin(
        self,
        positions: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, [tokens, 1, head_size / 2] in ``dtype``, times the concentration.

        positions: int [tokens].
        """
        # Kept where it is needed: the copy waits for the GPU and is made only once.
        self._inverse_frequencies = self._inverse_frequencies.to(positions.device)

        angles = positions.float()[:, None, None] * self._inverse_frequencies
        cos = (angles.cos() * self._concentration).to(dtype)
        sin = (angles.sin() * self._concentration).to(dtype)
        return cos, sin


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channel i against channel i + head_size / 2.

    Args:
        x: [tokens, heads, head_size].
        cos, sin: of ``RotaryEmbedding.cos_sin``.

    Returns:
        A tensor of the shape and dtype of ``x``.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        from gptoss_kernels.rotary import rotate_heads

        return rotate_heads(x, cos, sin)

    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
