"""Configuration of ``gptoss tinker``."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from megatron_gptoss.config import StrictModel
from rl_loop.config.every_run import RunConfig
from rl_loop.engines.embedded.config import EmbeddedConfig


class ApiConfig(StrictModel):
    """Model as clients see it, and limits of clients."""

    base_model: str = Field("openai/gpt-oss-20b", min_length=1, max_length=128)
    """Name of the base for clients. tinker-cookbook chooses renderers and learning rates by it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sample whose request has no ``stop``. For the released models 200002 and
    200012 (``<|return|>`` and ``<|call|>``)."""
    max_models: int = Field(8, ge=1)
    """Maximum number of models in training. Each needs host memory for factors, optimizer state and
    gradient (docs/tinker.md)."""
    turn_tokens: int = Field(65536, ge=1)
    """Tokens after which another model's turn begins. Larger passes are cut into parts."""
    snapshots_per_model: int = Field(16, ge=1)
    """Number of snapshots without a name that are kept for sampling, the newest of each model."""
    checkpoint_gigabytes: float = Field(100.0, gt=0)
    """Maximum size in GB of the checkpoints of one key."""


class TinkerConfig(RunConfig):
    """``gptoss tinker``: server of the Tinker API. Checkpoints are in ``output_dir/name/tinker``."""

    command: ClassVar[str] = "tinker"

    tinker: ApiConfig = ApiConfig()
    """Model as clients see it, and limits of clients."""

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        """Refuse settings that the server does not support."""
        if self.adapter is None:
            raise ValueError(
                "adapter is null, but clients train adapters. Set it, such as {rank: 32}"
            )
        if self.initial_adapter is not None:
            raise ValueError(
                "initial_adapter has no effect: clients create and load their adapters. Leave it out"
            )
        if self.parallel.world_size != self.parallel.data or self.parallel.expert != 1:
            raise ValueError(
                "parallel: the trainer ranks of the server are data-parallel only. Leave out all keys "
                "except parallel.world_size"
            )
        if not isinstance(self.rollout.engine, EmbeddedConfig):
            raise ValueError(
                f"rollout.engine.type ({self.rollout.engine.type}): the server samples with the "
                "embedded engine only. Set it to embedded"
            )
        if self.optimizer.offload_fraction > 0:
            raise ValueError(
                "optimizer.offload_fraction: the optimizer state of clients' models cannot be "
                "offloaded. Leave it out"
            )
        if self.training.share_prefixes != "off":
            raise ValueError(
                "training.share_prefixes: labels of clients differ from tokens. Leave it out"
            )
        return self
