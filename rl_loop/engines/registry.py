"""Rollout engines by ``rollout.engine.type``: ``embedded``, ``sglang`` or MODULE:CLASS."""

from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, model_validator

from megatron_gptoss.config import AdapterConfig, ModelConfig, Quantization
from megatron_gptoss.planning.memory_inputs import EngineMemory
from rl_loop.engines.backend import BackendContext, EngineConfig, RolloutBackend, ServerProcesses
from rl_loop.engines.embedded.config import EmbeddedConfig
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.registry import TAG, Registry, accept_subclasses

BACKENDS: Registry[type[RolloutBackend]] = Registry(
    kind="rollout backend",
    expected="a subclass of rl_loop.engines.backend.RolloutBackend",
    accepts=accept_subclasses(RolloutBackend),
    entries={
        # Imported when a run builds its backend, because they import torch and Ray, which are not
        # needed to read a configuration.
        "embedded": "rl_loop.engines.embedded.backend:EmbeddedBackend",
        "sglang": "rl_loop.engines.sglang.backend:SglangBackend",
    },
)


class ExternalEngineConfig(EngineConfig):
    """Configuration of an external backend."""

    type: str
    """MODULE:CLASS, a subclass of ``rl_loop.engines.backend.RolloutBackend``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Fields of the class's ``Options``."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Wrong options are then an error of the configuration, before a run starts anything.
        self.settings()
        return self

    def settings(self) -> EngineConfig:
        """Return ``options`` as an instance of the backend's ``Options``.

        Raises:
            ValueError: if the options are invalid.
        """
        return BACKENDS.resolve(self.type).Options.model_validate(self.options)

    @property
    def server_processes(self) -> ServerProcesses | None:
        return self.settings().server_processes

    def memory_on_trainer_gpus(
        self, model: ModelConfig, dtype: str, adapter: AdapterConfig | None = None
    ) -> EngineMemory | None:
        return self.settings().memory_on_trainer_gpus(model, dtype, adapter)

    @property
    def scores_at_any_temperature(self) -> bool:
        return self.settings().scores_at_any_temperature

    @property
    def takes_tensors(self) -> bool:
        return self.settings().takes_tensors

    @property
    def experts_format(self) -> Quantization | None:
        return self.settings().experts_format

    @property
    def has_mxfp4_experts(self) -> bool:
        return self.settings().has_mxfp4_experts

    @property
    def max_unmerged_rank(self) -> int:
        return self.settings().max_unmerged_rank

    @property
    def keeps_weights(self) -> bool:
        return self.settings().keeps_weights

    def check_machine(self) -> None:
        self.settings().check_machine()


def _choose_tag(value: Any) -> str:
    """Return the tag of the union's member for ``value``, a mapping or an instance."""
    # The default type is the embedded engine, so that one override can change its batch size.
    kind = getattr(value, "type", None)
    if isinstance(value, dict):
        kind = value.get("type", "embedded")

    if kind in ("embedded", "sglang"):
        return f"{TAG}{kind}"
    return f"{TAG}external"


AnyEngineConfig = Annotated[
    Annotated[EmbeddedConfig, Tag(f"{TAG}embedded")]
    | Annotated[SglangConfig, Tag(f"{TAG}sglang")]
    | Annotated[ExternalEngineConfig, Tag(f"{TAG}external")],
    Discriminator(_choose_tag),
]
"""Type of ``rollout.engine``. Each engine accepts only its own keys."""


def build_backend(config: AnyEngineConfig, context: BackendContext) -> RolloutBackend:
    """Build the backend that ``config`` names. Its servers, if any, begin to start."""
    # An external backend gets its validated options, not the mapping around them.
    settings: EngineConfig = config
    if isinstance(config, ExternalEngineConfig):
        settings = config.settings()
    return BACKENDS.resolve(config.type)(settings, context)
