"""Settings of the embedded engine: ``rollout.engine`` with ``type: transformers``."""

from typing import Literal

from pydantic import Field

from rl_loop.engines.backend import EngineConfig


class EmbeddedConfig(EngineConfig):
    """transformers' model with continuous batching, one in the process of each rollout worker, on
    the CPU."""

    type: Literal["transformers"] = "transformers"
    """This engine."""
    max_batch_size: int = Field(64, gt=0)
    """Sequences that one engine decodes together. Lower it where memory is short."""
