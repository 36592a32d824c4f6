"""Configuration of the embedded engine: ``rollout.engine`` with ``type: embedded``."""

from typing import Literal

from pydantic import Field

from megatron_gptoss.config import Quantization
from rl_loop.engines.backend import EngineConfig


class EmbeddedConfig(EngineConfig):
    """A transformers model with continuous batching, on the CPU, in each rollout worker."""

    type: Literal["embedded"] = "embedded"
    """Engine type."""
    max_batch_size: int = Field(64, gt=0)
    """Number of sequences that one engine decodes together. Lower it to save memory."""
    deterministic: bool = False
    """Compute every sequence alone and from its first token, so that its bits do not depend on
    other sequences. A resumed run then equals an uninterrupted run. Generation takes several times
    as long (docs/reliability.md). Set it to compare runs.
    """
    quantization: Quantization | None = None
    """Format of the engines' experts. null: the trainer's values. mxfp4: the nearest MXFP4 values.
    If the trainer has other values, the canary stops the run unless ``canary_tolerance`` allows the
    difference (docs/quantization.md).
    """

    @property
    def experts_format(self) -> Quantization | None:
        return self.quantization
