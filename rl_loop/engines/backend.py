"""The seam between the loop and whatever samples its episodes.

A *backend* provides the engines of one run and keeps them at the policy's weights. Rollout workers
run the agent loop; each asks the backend's ``engine_factory`` for the ``RolloutEngine`` that it
talks to. That engine may hold a model itself (``engines/embedded``) or be a client of servers that
all workers share (``engines/sglang``).

A backend from outside the project is a subclass of ``RolloutBackend`` that the configuration names
as MODULE:CLASS:

    rollout:
      engine: {type: my_package.my_engine:MyBackend, options: {replicas: 2}}

Importing this module needs neither torch nor Ray: configurations do it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from megatron_gptoss.config import ModelConfig, Quantization, StrictModel
from megatron_gptoss.planning.memory_inputs import EngineMemory
from megatron_gptoss.user_error import UserError
from rl_loop.weight_sync.source import WeightSource

if TYPE_CHECKING:
    import torch

    from converters.mxfp4_tensors import Digests
    from rl_loop.engines.protocol import RolloutEngine


class EngineUnavailable(UserError):
    """This machine lacks something that the engine needs; the message says what, under
    which key, and what to do."""


# -- configuration --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerProcesses:
    """Server processes that a backend starts as Ray actors beside the rollout workers.

    ``gptoss launch`` plans a place for each; the backend asks for it with
    ``placement_options(ENGINE_SERVER, index)``."""

    name: str
    """What one of them is called, such as "SGLang server"."""
    key: str
    """The configuration key that sets ``count``, for error messages."""
    count: int
    """How many of them there are."""
    gpus_each: int
    """GPUs that one of them uses; 0 for none."""
    share_trainer_gpus: bool = False
    """Server i runs on the GPUs of the trainer ranks from i x gpus_each on, and
    takes turns with them."""


class EngineConfig(StrictModel):
    """Base of every engine's settings: what the rest of the program asks
    without knowing the engine."""

    @property
    def server_processes(self) -> ServerProcesses | None:
        """Processes that need a place of their own; None if the engines live
        in the rollout workers."""
        return None

    @property
    def shares_trainer_gpus(self) -> bool:
        """Whether engine and trainer take turns on the same GPUs, so that they cannot
        work at the same time."""
        processes = self.server_processes
        return processes is not None and processes.share_trainer_gpus

    def memory_on_trainer_gpus(self, model: ModelConfig, dtype: str) -> EngineMemory | None:
        """Return what an engine with weights of ``dtype`` holds of each trainer GPU.

        None if it shares none.
        """
        return None

    def for_model(self, model: ModelConfig) -> Self:
        """Return the settings with defaults that depend on the model."""
        return self

    @property
    def scores_at_any_temperature(self) -> bool:
        """Whether ``RolloutEngine.score`` takes another temperature than 1."""
        return True

    @property
    def takes_tensors(self) -> bool:
        """Whether weights reach the engine as tensors by name in the driver, where an
        ablation can alter them."""
        return True

    @property
    def experts_format(self) -> Quantization | None:
        """Format that the engine is to hold experts in; None for the format of the policy."""
        return None

    @property
    def packs_experts(self) -> bool:
        """True if the engine takes experts as MXFP4 blocks and scales only, which the trainer has if
        it trains experts through MXFP4."""
        return False

    def check_machine(self) -> None:
        """Raise EngineUnavailable if this machine lacks something that the engine needs, before
        anything is started."""
        return None


# -- the backend ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackendContext:
    """What a run tells the backend that it builds."""

    model: ModelConfig
    dtype: str
    """``float32`` or ``bfloat16``: precision of the trainer's parameters."""
    seed: int
    """Seed of the run; every request has a seed of its own besides."""
    directory: Path
    """Where the backend may keep files; all nodes see it."""
    routed_experts: bool = False
    """Whether requests ask which experts the engine chose for every token."""
    quantization: Quantization | None = None
    """Format that experts are trained through; None if there is none. ``WeightSource.weights`` returns
    the values of the format and ``packed_weights`` the bits. An engine may hold either."""


class EngineWorkers(Protocol):
    """The rollout workers, as a backend reaches the engines that they hold. A worker that died is
    replaced, and gets the last ``load_weights`` or ``set_min_version`` before it answers."""

    def load_weights(self, weights: "Mapping[str, torch.Tensor]", version: int) -> None:
        """Call ``HoldsWeights.sync_weights`` in every worker."""
        ...

    def set_min_version(self, version: int) -> None:
        """Call ``ClientOfServers.set_min_version`` in every worker."""
        ...

    def engine_scores(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        """Call ``RolloutEngine.score`` in every worker."""
        ...

    def engine_rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        """Call ``MeasuresRounding.rounding_error`` in every worker; None if an engine has none."""
        ...

    def engine_digests(self) -> "list[Digests]":
        """Call ``PackedExpertsEngine.packed_digests`` in every worker."""
        ...


type EngineFactory = Callable[[], RolloutEngine]
"""Makes the engine of one rollout worker. It is pickled, so it holds settings and
handles, not the engine."""


class RolloutBackend(ABC):
    """The engines of one run. Methods block and are called one at a time, while episodes may be
    under way. The driver's thread calls them; that of the rollouts calls ``heal``."""

    Options: ClassVar[type[EngineConfig]] = EngineConfig
    """The settings of a backend that is named as MODULE:CLASS: what
    ``rollout.engine.options`` may say."""

    scores_beside_rollouts: ClassVar[bool] = False
    """Whether ``score`` gives the same numbers while episodes run. Then the episodes of a step begin
    at once after a sync; the canary is compared meanwhile, before anything is trained on them."""

    def __init__(self, settings: Any, context: BackendContext) -> None:
        """Begin to start what the engines need. ``settings``: an instance of ``Options``."""
        self.settings = settings
        self.context = context
        self.workers: EngineWorkers | None = None

    @abstractmethod
    def engine_factory(self) -> EngineFactory:
        """Return what makes a worker's engine: called once in the process of every worker."""

    def start(self, workers: EngineWorkers) -> None:
        """Wait until engines can take weights, and remember how to reach those in ``workers``.
        Raises what keeps them from starting."""
        self.workers = workers

    @abstractmethod
    def sync_weights(self, source: WeightSource, version: int) -> None:
        """Give all engines the policy's weights under a version number, which every sampled token
        is marked with. Ends a ``pause``. What runs is aborted and goes on with the new weights.

        ``source`` keeps these weights until the next call, or until ``updating_weights``: engines
        that were restarted ask for them again."""

    def prepare_sync(self, source: WeightSource) -> None:
        """Begin what takes time before the next ``sync_weights`` from the same source, and return
        at once. Called when it has new weights."""
        return None

    @abstractmethod
    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        """Return the log-probs of ``token_ids[1:]``, in nats, from every engine that serves."""

    def rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        """Return how far rounding moves the log-probs of ``score``, for the engines of ``score``.

        Mean absolute difference to fp32 in nats per token. None for engines that cannot measure
        it. Empty if none can.
        """
        return []

    def compare_weights(self) -> None:
        """Raise an error that names a tensor which an engine holds otherwise than it was sent, if
        that can be told."""
        return None

    def packed_digests(self) -> "list[Digests]":
        """Return digests of the quantized experts that each engine holds; empty if engines hold
        other forms of them, or cannot tell."""
        return []

    def pause(self) -> None:
        """Make room for the trainer until the next ``sync_weights``: nothing is generated, and
        memory that the engines share with the trainer is freed. Not called where rollouts run
        ahead of training (``algorithm.max_staleness``)."""
        return None

    def heal(self) -> None:
        """Bring engines that were restarted back to the current weights. Called about once a
        second during rollouts, but not from ``updating_weights`` to the sync that follows."""
        return None

    def updating_weights(self, version: int) -> AbstractContextManager[None]:
        """Keep ``heal`` from asking the source for weights while the trainer updates them; from
        the end of the block on the source has weights ``version``."""
        return nullcontext()

    @abstractmethod
    def engine_settings(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what an engine says of itself, as far as it knows ``names``;
        "engine" says which one it is."""

    def close(self) -> None:
        """Stop everything that the backend started. Called once, also after a failed start."""
        return None
