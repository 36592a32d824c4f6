"""Settings of the embedded engine: ``rollout.engine`` with ``type: transformers``."""

from typing import Literal

from pydantic import Field

from megatron_gptoss.config import Quantization
from rl_loop.engines.backend import EngineConfig


class EmbeddedConfig(EngineConfig):
    """transformers' model with continuous batching, one in the process of each rollout worker, on
    the CPU."""

    type: Literal["transformers"] = "transformers"
    """This engine."""
    max_batch_size: int = Field(64, gt=0)
    """Sequences that one engine decodes together. Lower it where memory is short."""
    deterministic: bool = False
    """Compute every answer by itself and from its first token, so that not one bit of it depends on
    which others are under way: a run that was resumed then equals one that was not. Generating takes
    several times as long (docs/reliability.md). Set it to compare runs."""
    quantization: Quantization | None = None
    """Format of the engines' experts. null: the trainer's values. mxfp4: the nearest MXFP4 values. If
    the trainer has other values, the canary stops the run unless ``canary_tolerance`` allows the
    difference (docs/quantization.md)."""

    @property
    def experts_format(self) -> Quantization | None:
        return self.quantization
