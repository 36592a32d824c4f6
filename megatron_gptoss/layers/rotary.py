"""Rotary position embeddings (RoPE), plain or scaled, at explicit token positions.

Angles are computed in fp32 for every dtype, as in Hugging Face transformers and inference engines.
Otherwise trainer and engine would disagree at long positions.
"""

import math

import torch

from megatron_gptoss.config import ModelConfig
from megatron_gptoss.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Return the inverse frequencies of a model.

    Returns:
        Inverse frequencies [head_size / 2] fp32, and the factor of cos and sin.
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
    """Return the unscaled wavelengths divided by 2 pi, [head_size / 2] fp32."""
    dim = config.head_size
    return config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def yarn_inverse_frequencies(
    config: ModelConfig,
    truncate: bool | None = None,
) -> tuple[torch.Tensor, float]:
    """Return the inverse frequencies of YaRN (arXiv 2309.00071, section 3.2).

    Dimensions with more than beta_fast rotations over the original length are unchanged. Dimensions
    with fewer than beta_slow rotations are divided by the factor. Between them is a linear ramp.

    Args:
        config: model with YarnScaling.
        truncate: whether to round the ends of the ramp to integers; None for the model's setting.

    Returns:
        Inverse frequencies [head_size / 2] fp32, and the factor of cos and sin (section 3.4 of the
        paper, "concentration" in OpenAI's code).
    """
    scaling = config.rope_frequencies
    assert isinstance(scaling, YarnScaling)
    dim = config.head_size
    base = config.rope_theta

    def compute_dimension(rotations: float) -> float:
        """Return the dimension with this number of rotations over the original length."""
        power_of_base = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(power_of_base) / (2 * math.log(base))

    low = compute_dimension(scaling.beta_fast)
    high = compute_dimension(scaling.beta_slow)
    if scaling.truncate if truncate is None else truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)

    # `ramp` is 0 below the ramp and 1 above it. The lower bound of the span avoids a division by 0.
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
    """Return inverse frequencies [head_size / 2] with the scaling of Llama 3.1.

    Source: apply_scaling in models/llama3/model.py of github.com/meta-llama/llama-models.
    """
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)

    # 0 for dimensions with few rotations, which are divided by the factor. 1 for dimensions with
    # many rotations, which are unchanged.
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return (1 - keep) * plain / scaling.factor + keep * plain


class RotaryEmbedding:
    """Cosines and sines of a model's rotation angles."""

    def __init__(self, config: ModelConfig) -> None:
        self._inverse_frequencies, self._concentration = inverse_frequencies(config)

    def cos_sin(
        self,
        positions: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of all angles, multiplied by the concentration.

        Args:
            positions: [tokens] int position of each token in its sequence.
            dtype: data type of the result.

        Returns:
            Two tensors [tokens, 1, head_size / 2].
        """
        # Keep the copy on the device, because copying waits for the GPU.
        self._inverse_frequencies = self._inverse_frequencies.to(positions.device)

        angles = positions.float()[:, None, None] * self._inverse_frequencies
        cos = (angles.cos() * self._concentration).to(dtype)
        sin = (angles.sin() * self._concentration).to(dtype)
        return cos, sin


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of channels i and i + head_size / 2.

    Args:
        x: [tokens, heads, head_size].
        cos: [tokens, 1, head_size / 2] cosines of ``RotaryEmbedding.cos_sin``.
        sin: [tokens, 1, head_size / 2] sines.

    Returns:
        [tokens, heads, head_size] with the dtype of ``x``.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        from gptoss_kernels.rotary import rotate_heads

        return rotate_heads(x, cos, sin)

    # Same arithmetic as the kernel: in the dtype of cos, with one rounding at the end.
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
