"""How rotary frequencies are stretched for contexts longer than those of pretraining.

Fields have the names of Hugging Face's ``rope_scaling``. Imports no torch.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Scaling(BaseModel):
    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False
    )

    factor: float = Field(ge=1)
    """How many times longer the context becomes."""


class LinearScaling(_Scaling):
    """All frequencies divided by the factor (arXiv 2306.15595)."""

    rope_type: Literal["linear"] = "linear"


class YarnScaling(_Scaling):
    """YaRN (arXiv 2309.00071): high frequencies stay, low ones are divided, with a ramp between."""

    rope_type: Literal["yarn"] = "yarn"
    original_max_position_embeddings: int = Field(gt=0)
    """Context length before extension, in tokens."""
    beta_fast: float = Field(32.0, gt=0)
    """Rotations above which a frequency is left alone."""
    beta_slow: float = Field(1.0, gt=0)
    """Rotations below which a frequency is fully interpolated."""
    truncate: bool = True
    """Whether the ends of the ramp are rounded to integers."""


class Llama3Scaling(_Scaling):
    """The scaling of Llama 3.1: like YaRN's, with a ramp in the frequency and no concentration."""

    rope_type: Literal["llama3"] = "llama3"
    original_max_position_embeddings: int = Field(gt=0)
    """Context length before extension, in tokens."""
    low_freq_factor: float = Field(1.0, gt=0)
    """Turns over the original length below which a frequency is divided by the factor."""
    high_freq_factor: float = Field(4.0, gt=0)
    """Turns over the original length above which a frequency is left alone."""

    @model_validator(mode="after")
    def _check_ramp(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be greater than "
                f"low_freq_factor ({self.low_freq_factor})"
            )
        return self


RopeScaling = LinearScaling | YarnScaling | Llama3Scaling
