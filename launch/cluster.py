"""Configuration of a cluster: the YAML files of ``configs/cluster``."""

import re
import sys
from pathlib import Path
from typing import Annotated, Literal, Self

from omegaconf import OmegaConf
from pydantic import Field, StringConstraints, model_validator

from launch.gpus import count_gpus
from megatron_gptoss.config import StrictModel
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import read_yaml, validated
from rl_loop.config.shipped import find_config, shipped_names

Variable = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")]
TimeLimit = Annotated[str, StringConstraints(pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$")]
SBATCH_FIELDS = ("account", "partition", "qos", "constraint", "exclude")
"""Fields that equal options of sbatch."""
SCRIPT_LINES = (*SBATCH_FIELDS, "gpu_type", "memory_per_node")
"""Fields that appear quoted in one line of the batch script."""
SCRIPT_WORDS = ("shared_dir", "python")
"""Fields that are words of a command in the batch script. nemo-run does not quote them."""
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
NOT_IN_WORD = re.compile(r"[^\w./:@%+=,#~-]")


def check_script_word(key: str, value: object) -> None:
    """Raise ValueError unless a shell reads a value as one word."""
    if match := NOT_IN_WORD.search(str(value)):
        raise ValueError(
            f"{key} ({str(value)!r}) contains {match[0]!r}, which a shell would interpret in the "
            "batch script. Use another path"
        )


class ContainerConfig(StrictModel):
    """Pyxis container in which the whole job runs."""

    image: str
    """Squashfs file on the cluster, or an image name that pyxis can pull."""
    mounts: list[str] = Field(default_factory=list)
    """Directories, ``SOURCE:TARGET[:flags]``. ``shared_dir`` is always mounted at its own path."""


class ClusterConfig(StrictModel):
    """Settings of a cluster for one run."""

    kind: Literal["local", "slurm"]
    """``local``: run on this machine, in the background. ``slurm``: submit a batch job."""
    login: str | None = None
    """``user@host`` of a login node, reached by ssh with a key; null if this machine has sbatch."""
    shared_dir: Path = Path(".")
    """Directory that every node sees at this path. Relative paths of a run's configuration are
    resolved against it."""
    python: str = sys.executable
    """Interpreter of the trainer on the nodes, inside the container if there is one. It must have
    this project's requirements."""
    engine_python: str | None = None
    """Interpreter on the nodes that has SGLang, as printed by ``gptoss doctor --install-engine``.
    It overrides ``rollout.engine.python`` of the run's file, but not of the command line. null:
    the interpreter of the run's configuration."""
    nodes: int = Field(1, gt=0)
    """Nodes for trainer ranks and, without rollout_nodes, for rollout workers."""
    rollout_nodes: int = Field(0, ge=0)
    """Additional nodes for rollout workers only. The job is then heterogeneous."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs per node; 0 for runs on CPUs. Default: for kind local those of this machine, else 0."""
    gpu_type: str | None = None
    """GPU type as shown by ``sinfo -o %G``, such as h200; null: any."""
    gpu_gb: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Total memory of one GPU in GB (1e9 bytes), for the memory plan of a dry run. null:
    ``gpu_gb`` of the run's configuration."""
    cpus_per_node: int | None = Field(None, gt=0)
    """CPUs per node; null: Slurm's default (1 CPU, unless exclusive)."""
    memory_per_node: str | None = None
    """Memory per node in the format of sbatch --mem, such as 1500G; 0: all of it."""
    exclusive: bool = True
    """Allocate whole nodes."""
    account: str | None = None
    """Slurm account; null: the user's default."""
    partition: str | None = None
    """Slurm partition; null: the cluster's default."""
    qos: str | None = None
    """Slurm quality of service."""
    constraint: str | None = None
    """Node features, in the format of sbatch --constraint."""
    exclude: str | None = None
    """Nodes that must not be used, in the format of sbatch --exclude."""
    time_limit: TimeLimit = "04:00:00"
    """Time limit of one attempt, [days-]hours:minutes:seconds. Longer runs continue in another
    attempt."""
    stop_before_end: int = Field(600, gt=0)
    """Seconds before the time limit at which the run saves a checkpoint and requests another
    attempt. Must be at least the time of the longest optimizer step and a checkpoint. The running
    rollout is abandoned."""
    container: ContainerConfig | None = None
    """Container of the job; null: ``python``'s own environment."""
    env: dict[Variable, str] = Field(default_factory=dict)
    """Additional environment variables for all processes on every node, in capitals, such as
    NCCL_SOCKET_IFNAME. Slurm and the container do not get them."""
    ray_port: int | None = Field(None, ge=1024, le=60_000)
    """First of 1,000 ports for Ray, for clusters with firewalls between nodes; null: free ports."""
    dashboard: bool = False
    """Run Ray's dashboard, protected by the attempt's token, and serve metrics for Prometheus on
    every node without protection. Adds about 12 processes on the head node."""
    ready_seconds: int = Field(600, gt=0)
    """Seconds within which every node must be checked and in Ray. Late nodes are reported, excluded
    and replaced once."""
    min_bandwidth: float | None = Field(None, gt=0)
    """Minimum all-reduce bandwidth in GB/s (bus bandwidth as defined by nccl-tests), within each
    node and between neighbors, before training starts; null: not measured."""
    min_free_disk: float = Field(20, ge=0)
    """Minimum free disk space in GB, in shared_dir and in each node's /tmp."""
    retries: int = Field(3, ge=0)
    """How often to restart a failed run. 2 attempts in a row without progress end it earlier."""
    chain: int = Field(1, gt=0)
    """Number of jobs to submit that run in sequence, for clusters that do not requeue jobs."""

    @model_validator(mode="after")
    def _check_fields_together(self) -> Self:
        # A job has another working directory than the user.
        if self.kind == "slurm" and not self.shared_dir.is_absolute():
            raise ValueError(
                f"shared_dir ({self.shared_dir}) must be an absolute path on the cluster",
            )
        # Rejects options: ssh would interpret a login that begins with "-".
        if self.login is not None and re.fullmatch(r"[\w.][\w.-]*@[\w.:-]+", self.login) is None:
            raise ValueError(f"login ({self.login}) must be user@host")
        if self.kind == "slurm":
            self._check_script_values()
        if self.kind == "local" and (self.nodes, self.rollout_nodes) != (1, 0):
            raise ValueError(
                f"nodes ({self.nodes} + {self.rollout_nodes}): kind local is one machine",
            )
        return self

    def _check_script_values(self) -> None:
        """Raise ValueError if a value would break out of its place in the batch script."""
        # nemo-run quotes these values, which protects against everything but a line break.
        for key in SCRIPT_LINES:
            # A line break would begin another line of the script, such as another #SBATCH option.
            if CONTROL_CHARACTER.search(getattr(self, key) or ""):
                raise ValueError(
                    f"{key} ({getattr(self, key)!r}) contains a line break or another control "
                    "character. It must fit into one line of the batch script"
                )
        for key in SCRIPT_WORDS:
            check_script_word(key, getattr(self, key))
        if self.container is not None:
            check_script_word("container.image", self.container.image)
            for mount in self.container.mounts:
                check_script_word("container.mounts", mount)


def load_cluster(name: str, nodes: int | None = None) -> ClusterConfig:
    """Read the configuration of a cluster.

    Args:
        name: path of a YAML file, or name of a file in ``configs/cluster``.
        nodes: replaces ``nodes`` of the file; None keeps it.

    Raises:
        ConfigError: naming file and keys.
    """
    # A user's own file in the working directory precedes the shipped one.
    path = Path("configs/cluster") / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
    path = find_config(path, "cluster")
    if not path.exists():
        local_names = [file.stem for file in Path("configs/cluster").glob("*.yaml")]
        known = ", ".join(sorted({*local_names, *shipped_names("cluster")})) or "none"
        raise ConfigError(
            f"--cluster {name}: {path} does not exist. Clusters in configs/cluster: {known}",
        )

    # Before the validation, so that the replaced number is checked like the file's.
    tree = read_yaml(path)
    if nodes is not None:
        tree["nodes"] = nodes
    cluster = validated(path, ClusterConfig, OmegaConf.to_container(tree, resolve=True))
    # Counted only if needed, because it starts nvidia-smi.
    if cluster.kind == "local" and "gpus_per_node" not in cluster.model_fields_set:
        return cluster.model_copy(update={"gpus_per_node": count_gpus()})
    return cluster
