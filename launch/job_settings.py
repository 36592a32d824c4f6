"""What starting a run on a cluster needs to know of its configuration."""

from dataclasses import dataclass
from pathlib import Path

from launch.cluster import ClusterConfig
from megatron_gptoss.config import ParallelConfig
from rl_loop.config.rollout import RolloutConfig
from rl_loop.lifecycle.store_size import StoreNeed


@dataclass(frozen=True)
class JobSettings:
    """What a job runs, where it writes, and what has to find a place on its nodes."""

    name: str
    """The run's name; the job is called after it."""
    command: str
    """The ``gptoss`` command that trains: ``rl`` or ``sft``."""
    directory: Path
    """Of the run."""
    parallel: ParallelConfig
    """How many trainer ranks there are."""
    rollout: RolloutConfig | None
    """How many servers and workers there are; None without reinforcement learning, which needs
    no place for them."""
    store: StoreNeed
    """What a step holds in Ray's object store."""
    paths: tuple[tuple[str, Path], ...]
    """(key, path) of every file that the configuration names and the cluster must have."""
    engine_python: str | None
    """Interpreter of the rollout servers; None if the engine runs in the trainer's."""
    configuration: str
    """The whole of it as YAML, for the training command on the cluster to read."""

    def engine_key(self, cluster: ClusterConfig) -> str:
        """Return the key that sets ``engine_python``."""
        if self.engine_python == cluster.engine_python:
            return "cluster.engine_python"
        return "rollout.engine.python"
