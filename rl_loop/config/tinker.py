"""Configuration of ``gptoss tinker``."""

from typing import ClassVar, Self

from pydantic import model_validator

from rl_loop.config.every_run import RunConfig
from rl_loop.config.tinker_api import ApiConfig
from rl_loop.engines.embedded.config import EmbeddedConfig


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
