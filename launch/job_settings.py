"""The part of a configuration that is needed to start a run on a cluster."""

from dataclasses import dataclass
from pathlib import Path

from launch.cluster import ClusterConfig
from megatron_gptoss.config import ParallelConfig
from rl_loop.config.rollout import RolloutConfig
from rl_loop.lifecycle.store_size import StoreNeed


@dataclass(frozen=True)
class JobSettings:
    """Command, paths and resource needs of a job."""

    name: str
    """Name of run and job."""
    command: str
    """Training command of ``gptoss``: ``rl`` or ``sft``."""
    directory: Path
    """Run directory."""
    parallel: ParallelConfig
    """Parallel layout, which defines the number of trainer ranks."""
    rollout: RolloutConfig | None
    """Rollout settings, which define servers and workers; None for supervised fine-tuning."""
    store: StoreNeed
    """Object-store memory needed by a step."""
    paths: tuple[tuple[str, Path], ...]
    """(key, path) of every file that the configuration names and that the cluster must have."""
    engine_python: str | None
    """Interpreter of the rollout servers; None if the engine runs in the trainer's interpreter."""
    configuration: str
    """The complete configuration as YAML, for the training command on the cluster."""

    def engine_key(self, cluster: ClusterConfig) -> str:
        """Return the configuration key that sets ``engine_python``."""
        if self.engine_python == cluster.engine_python:
            return "cluster.engine_python"
        return "rollout.engine.python"
