"""Scaling of rotary frequencies for contexts longer than in pretraining.

Fields have the names of Hugging Face's ``rope_scaling``. This module does not import torch.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Scaling(BaseModel):
    """Base class of the scalings."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False
    )

    factor: float = Field(ge=1)
    """Length of the extended context relative to the original context."""


class LinearScaling(_Scaling):
    """Division of all frequencies by the factor (arXiv 2306.15595)."""

    rope_type: Literal["linear"] = "linear"
    """Name of the scaling."""


class YarnScaling(_Scaling):
    """YaRN (arXiv 2309.00071): high frequencies stay, low ones are divided, with a ramp between."""

    rope_type: Literal["yarn"] = "yarn"
    """Name of the scaling."""
    original_max_position_embeddings: int = Field(gt=0)
    """Context length before extension, in tokens."""
    beta_fast: float = Field(32.0, gt=0)
    """Number of rotations above which a frequency is not changed."""
    beta_slow: float = Field(1.0, gt=0)
    """Number of rotations below which a frequency is fully interpolated."""
    truncate: bool = True
    """Round the ends of the ramp to integers."""


class Llama3Scaling(_Scaling):
    """Scaling of Llama 3.1: like YaRN, with the ramp in the frequency and no concentration."""

    rope_type: Literal["llama3"] = "llama3"
    """Name of the scaling."""
    original_max_position_embeddings: int = Field(gt=0)
    """Context length before extension, in tokens."""
    low_freq_factor: float = Field(1.0, gt=0)
    """Number of rotations below which a frequency is divided by the factor."""
    high_freq_factor: float = Field(4.0, gt=0)
    """Number of rotations above which a frequency is not changed."""

    @model_validator(mode="after")
    def _check_ramp(self) -> Self:
        """Reject a ramp without width."""
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be greater than "
                f"low_freq_factor ({self.low_freq_factor})"
            )
        return self


RopeScaling = LinearScaling | YarnScaling | Llama3Scaling
"""Any scaling of rotary frequencies."""
