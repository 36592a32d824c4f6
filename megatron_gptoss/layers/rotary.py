"""Rotary position embeddings, plain or scaled, applied at explicit token positions.

Angles are computed in fp32 whatever the model's dtype, as Hugging Face and the inference engines
do: with other angles, trainer and engine would disagree at long positions.
"""

import math

import torch

from megatron_gptoss.config import ModelConfig
from megatron_gptoss.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Compute the inverse frequencies of a model.

    Returns:
        Inverse frequencies, fp32 [head_size / 2], and the factor by which cos and sin are
        multiplied.
    """
    scaling = config.rope_frequencies
    if isinstance(scaling, YarnScaling):
        return yarn_inverse_frequencies(config)

    plain = 1.0 / _frequencies(config)
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor, 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3_inverse_frequencies(plain, scaling), 1.0
    return plain, 1.0


def _frequencies(config: ModelConfig) -> torch.Tensor:
    """Return the unscaled wavelengths over 2 pi, fp32 [head_size / 2]."""
    dim = config.head_size
    return config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def yarn_inverse_frequencies(
    config: ModelConfig,
    truncate: bool | None = None,
) -> tuple[torch.Tensor, float]:
    """Compute the inverse frequencies of YaRN (arXiv 2309.00071, section 3.2).

    Frequencies that turn more than beta_fast times over the original length are kept, those that
    turn fewer than beta_slow times are divided by the factor, with a linear ramp between.

    Args:
        config: a model with YarnScaling.
        truncate: round the ends of the ramp to integers; by default as the scaling says.

    Returns:
        Inverse frequencies, fp32 [head_size / 2], and the factor by which cos and sin are
        multiplied ("concentration" in OpenAI's code, section 3.4 of the paper).
    """
    scaling = config.rope_frequencies
    assert isinstance(scaling, YarnScaling)
    dim = config.head_size
    base = config.rope_theta

    def dimension_of(rotations: float) -> float:
        """Return which dimension makes so many rotations over the original length."""
        power_of_base = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(power_of_base) / (2 * math.log(base))

    low = dimension_of(scaling.beta_fast)
    high = dimension_of(scaling.beta_slow)
    if scaling.truncate if truncate is None else truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)

    # 0 below the ramp, 1 above it.
    span = high - low if high != low else 0.001
    dimensions = torch.arange(dim // 2, dtype=torch.float32)
    ramp = ((dimensions - low) / span).clamp(0, 1)
    keep = 1.0 - ramp

    frequencies = _frequencies(config)
    extrapolated = 1.0 / frequencies
    interpolated = 1.0 / (scaling.factor * frequencies)
    inverse = interpolated * (1 - keep) + extrapolated * keep

    concentration = 1.0
    if scaling.factor > 1:
        concentration = 0.1 * math.log(scaling.factor) + 1.0
    return inverse, concentration


def _llama3_inverse_frequencies(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Scale inverse frequencies as Llama 3.1 does (github.com/meta-llama/llama-models,
    models/llama3/model.py, apply_scaling)."""
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)

    # 0 for what turns rarely and is divided by the factor, 1 for what turns often and is kept.
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return (1 - keep) * plain / scaling.factor + keep * plain


class RotaryEmbedding:
    """Computes cos and sin of the angles at given positions."""

    def __init__(self, config: ModelConfig) -> None:
        self._inverse_frequencies, self._concentration = inverse_frequencies(config)

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
