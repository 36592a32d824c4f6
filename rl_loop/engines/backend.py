"""Interface between the training loop and the engines that sample its episodes.

A *backend* provides the engines of one run and keeps them at the policy's weights. Rollout workers
run the agent loop. Each worker gets its ``RolloutEngine`` from the backend's ``engine_factory``: an
engine that holds a model (``engines/embedded``), or a client of the servers that all workers share
(``engines/sglang``).

An external backend is a subclass of ``RolloutBackend`` that the configuration names as
MODULE:CLASS:

    rollout:
      engine: {type: my_package.my_engine:MyBackend, options: {replicas: 2}}

Configurations import this module, so importing it needs neither torch nor Ray.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from megatron_gptoss.config import AdapterConfig, ModelConfig, Quantization, StrictModel
from megatron_gptoss.planning.memory_inputs import EngineMemory
from megatron_gptoss.user_error import UserError
from rl_loop.weight_sync.source import WeightSource

# Reading a configuration must not import torch, which takes seconds.
if TYPE_CHECKING:
    import torch

    from converters.mxfp4_tensors import Digests
    from rl_loop.engines.protocol import RolloutEngine


class EngineUnavailableError(UserError):
    """This machine lacks a requirement of the engine.

    The message contains the requirement, the configuration key and the remedy.
    """


# -- configuration --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerProcesses:
    """Server processes that a backend starts as Ray actors, in addition to the rollout workers.

    ``gptoss launch`` plans a place for each. The backend requests it with
    ``placement_options(ENGINE_SERVER, index)``.
    """

    name: str
    """Name of one process for messages, such as "SGLang server"."""
    key: str
    """Configuration key that sets ``count``, for error messages."""
    count: int
    """Number of processes."""
    gpus_each: int
    """GPUs per process. 0 for none."""
    share_trainer_gpus: bool = False
    """True if servers use the GPUs of trainer ranks, in alternation with them.

    Server i uses the GPUs of ``gpus_each`` ranks, beginning with rank i * ``gpus_each``.
    """


class EngineConfig(StrictModel):
    """Base class of engine settings, with properties that other packages need of every engine."""

    @property
    def server_processes(self) -> ServerProcesses | None:
        """Processes that need a separate place. None if the engines run in the rollout workers."""
        return None

    @property
    def shares_trainer_gpus(self) -> bool:
        """True if engine and trainer alternate on shared GPUs and cannot run in parallel."""
        processes = self.server_processes
        return processes is not None and processes.share_trainer_gpus

    def memory_on_trainer_gpus(
        self, model: ModelConfig, dtype: str, adapter: AdapterConfig | None = None
    ) -> EngineMemory | None:
        """Return the memory of the engine on each trainer GPU. None if it shares none.

        Args:
            model: configuration of the model.
            dtype: precision of the engine's weights, "fp32" or "bf16".
            adapter: adapters that the engine holds unmerged. None without them.
        """
        return None

    def for_model(self, model: ModelConfig) -> Self:
        """Return the settings with the defaults that depend on the model."""
        return self

    @property
    def scores_at_any_temperature(self) -> bool:
        """True if ``RolloutEngine.score`` supports temperatures other than 1."""
        return True

    @property
    def takes_tensors(self) -> bool:
        """True if weights reach the engine as named tensors in the driver.

        An ablation can alter them there.
        """
        return True

    @property
    def experts_format(self) -> Quantization | None:
        """Format in which the engine holds experts. None: the policy's format."""
        return None

    @property
    def has_mxfp4_experts(self) -> bool:
        """True if the engine accepts experts only as MXFP4 blocks and scales.

        The trainer has these if it trains experts in MXFP4.
        """
        return False

    @property
    def max_unmerged_rank(self) -> int:
        """Largest rank of expert adapters that the engine adds without merging. 0: it needs merged weights."""
        return 0

    @property
    def keeps_weights(self) -> bool:
        """True if engines on the trainer's GPUs keep their weights while the trainer works."""
        return False

    def check_machine(self) -> None:
        """Check the requirements of the engine before anything is started.

        Raises:
            EngineUnavailableError: if this machine lacks a requirement.
        """
        return None


# -- the backend ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackendContext:
    """Facts about a run for the construction of its backend."""

    model: ModelConfig
    dtype: str
    """Precision of the trainer's parameters: ``fp32`` or ``bf16``."""
    seed: int
    """Seed of the run. In addition, every request has a separate seed."""
    directory: Path
    """Directory for files of the backend. All nodes have access to it."""
    routed_experts: bool = False
    """True if requests ask for the engine's choice of experts for every token."""
    shares_prefixes: bool = False
    """True if training computes equal prefixes once. With routes, their experts must be equal, too."""
    quantization: Quantization | None = None
    """Format in which experts are trained. None: not quantized.

    ``WeightSource.weights`` returns the values of the format and ``mxfp4_weights`` the bits. An
    engine may hold either.
    """
    adapter: AdapterConfig | None = None
    """Adapters that engines add to experts without merging. None if experts are merged or have no adapters."""


class EngineWorkers(Protocol):
    """Access to the engines in the rollout workers.

    A worker that died is replaced. The new worker gets the last ``load_weights`` or
    ``set_min_version`` before it responds.
    """

    def load_weights(self, weights: "Mapping[str, torch.Tensor]", version: int) -> None:
        """Call ``WeightHolder.sync_weights`` in every worker.

        Args:
            weights: tensors by Hugging Face name, in the shapes of their names.
            version: version of the weights.
        """
        ...

    def set_min_version(self, version: int) -> None:
        """Call ``ServerClient.set_min_version`` in every worker."""
        ...

    def engine_scores(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        """Call ``RolloutEngine.score`` in every worker."""
        ...

    def engine_rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        """Call ``MeasuresRounding.rounding_error`` in every worker. None for engines without it."""
        ...

    def engine_digests(self) -> "list[Digests]":
        """Call ``Mxfp4Engine.mxfp4_digests`` in every worker."""
        ...


type EngineFactory = Callable[[], RolloutEngine]
"""Function that builds the engine of one rollout worker.

It is pickled, so it holds settings and handles, not the engine.
"""


class RolloutBackend(ABC):
    """The engines of one run.

    Methods block and are called one at a time, while episodes may be running. The driver's thread
    calls them, except ``recover_engines``, which the thread of the rollouts calls.
    """

    Options: ClassVar[type[EngineConfig]] = EngineConfig
    """Settings class of an external backend: the keys of ``rollout.engine.options``."""

    scores_during_rollouts: ClassVar[bool] = False
    """True if ``score`` gives equal numbers while episodes run.

    The episodes of a step then begin directly after a sync. The canary is compared in parallel,
    before the trainer uses these episodes.
    """

    def __init__(self, settings: Any, context: BackendContext) -> None:
        """Begin to start the engines' processes.

        Args:
            settings: instance of ``Options``.
            context: facts about the run.
        """
        self.settings = settings
        self.context = context
        # Known from ``start`` on, because workers are built with this backend's
        # ``engine_factory``.
        self.workers: EngineWorkers | None = None

    @abstractmethod
    def engine_factory(self) -> EngineFactory:
        """Return the function that builds a worker's engine. Every worker calls it once."""

    def start(self, workers: EngineWorkers) -> None:
        """Wait until engines can receive weights. Raises the error that prevents it.

        Args:
            workers: rollout workers with the engines. Keep them for later calls.
        """
        self.workers = workers

    @abstractmethod
    def sync_weights(self, source: WeightSource, version: int) -> None:
        """Give all engines the policy's weights. Ends a ``pause``.

        Running requests are aborted and continue with the new weights.

        Args:
            source: source of the weights. It keeps them until the next call or until
                ``updating_weights``, because restarted engines request them again.
            version: version that every sampled token is marked with.
        """

    def prepare_sync(self, source: WeightSource) -> None:
        """Begin slow preparations of the next ``sync_weights`` from ``source``, and return at once.

        Called when the source has new weights.
        """
        return None

    @abstractmethod
    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        """Return the log-probs of ``token_ids[1:]``, in nats, from every serving engine."""

    def rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        """Return the effect of rounding on the log-probs of ``score``, for the same engines.

        Returns:
            Mean absolute difference to fp32, in nats per token. None for engines that cannot
            measure it. An empty list if none can.
        """
        return []

    def compare_weights(self) -> None:
        """Compare the engines' weights with those that were sent, if the backend supports it.

        Raises an error that names a differing tensor.
        """
        return None

    def mxfp4_digests(self) -> "list[Digests]":
        """Return digests of each engine's quantized experts.

        Empty if engines hold experts in other formats or cannot compute digests.
        """
        return []

    def pause(self) -> None:
        """Stop generation and free memory for the trainer until the next ``sync_weights``.

        The loop does not call it with asynchronous rollouts (``algorithm.max_staleness``).
        """
        return None

    def recover_engines(self) -> None:
        """Bring restarted engines back to the current weights.

        Called about once per second during rollouts, but not between ``updating_weights`` and the
        next sync.
        """
        return None

    def updating_weights(self, version: int) -> AbstractContextManager[None]:
        """Keep ``recover_engines`` from requesting weights while the trainer updates them.

        At the end of the block the source has weights ``version``.
        """
        # A backend without recovery requests no weights at other times than in ``sync_weights``.
        return nullcontext()

    @abstractmethod
    def engine_settings(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the named settings as an engine reports them. Unknown names are left out.

        "engine" contains the name of the engine.
        """

    def close(self) -> None:
        """Stop all processes that the backend started. Called once, also after a failed start."""
        return None
