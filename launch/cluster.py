"""What a cluster offers and how a run is started on it: the YAML files of ``configs/cluster``."""

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
"""Fields of a cluster that are options of sbatch by the same name."""
SCRIPT_LINES = (*SBATCH_FIELDS, "gpu_type", "memory_per_node")
"""Fields that stand quoted in a line of the batch script."""
SCRIPT_WORDS = ("shared_dir", "python")
"""Fields that are words of a command of the batch script. nemo-run does not quote them."""
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
NOT_OF_A_WORD = re.compile(r"[^\w./:@%+=,#~-]")


def check_script_word(key: str, value: object) -> None:
    """Raise ValueError if a shell would not read a value as one word."""
    if found := NOT_OF_A_WORD.search(str(value)):
        raise ValueError(
            f"{key} ({str(value)!r}) has {found[0]!r}, which a shell would interpret in the batch "
            "script. Use another path"
        )


class ContainerConfig(StrictModel):
    """A pyxis container in which the whole job runs."""

    image: str
    """A squashfs file on the cluster, or an image name that pyxis can pull."""
    mounts: list[str] = Field(default_factory=list)
    """Directories, ``SOURCE:TARGET[:flags]``; ``shared_dir`` is always mounted at its own path."""


class ClusterConfig(StrictModel):
    """One cluster as one run sees it."""

    kind: Literal["local", "slurm"]
    """``local``: this machine, in the background. ``slurm``: a batch job."""
    login: str | None = None
    """``user@host`` of a login node, reached by ssh with a key; null if this machine can call
    sbatch itself."""
    shared_dir: Path = Path(".")
    """A directory that every node sees at this path. Relative paths of a run's configuration are
    below it."""
    python: str = sys.executable
    """The trainer's interpreter on the nodes, inside the container if there is one. It has this
    project's requirements."""
    engine_python: str | None = None
    """The interpreter on the nodes that has SGLang, as ``gptoss doctor --install-engine`` prints it.
    It replaces ``rollout.engine.python`` of the run's file, but not of the command line. null: that
    of the run."""
    nodes: int = Field(1, gt=0)
    """Nodes that hold the trainer ranks and, without rollout_nodes, the rollout workers too."""
    rollout_nodes: int = Field(0, ge=0)
    """Further nodes for rollout workers alone; with them the job is a heterogeneous one."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs of each node; 0 for runs on CPUs. Default: with kind local those of this machine, else
    0."""
    gpu_type: str | None = None
    """The type as ``sinfo -o %G`` shows it, such as h200; null takes any."""
    gpu_memory: float | None = Field(None, gt=0, allow_inf_nan=False)
    """GB (1e9 bytes) of one GPU, all of it, for the memory plan of a dry run; null takes what the
    run's configuration is made for (``parallel.gpu_memory``)."""
    cpus_per_node: int | None = Field(None, gt=0)
    """CPUs of each node; null leaves it to Slurm (which gives one, unless exclusive)."""
    memory_per_node: str | None = None
    """As sbatch --mem takes it, such as 1500G; 0 is all of it."""
    exclusive: bool = True
    """Take whole nodes."""
    account: str | None = None
    """Slurm account; null takes the user's default."""
    partition: str | None = None
    """Slurm partition; null takes the cluster's default."""
    qos: str | None = None
    """Slurm quality of service."""
    constraint: str | None = None
    """Node features, as sbatch --constraint takes them."""
    exclude: str | None = None
    """Nodes never to use, as sbatch --exclude takes them."""
    time_limit: TimeLimit = "04:00:00"
    """[days-]hours:minutes:seconds of one attempt; longer runs go on in the next one."""
    stop_before_end: int = Field(600, gt=0)
    """Seconds before the time limit at which the run saves a checkpoint and asks for its next
    attempt. It must be at least the time of the longest optimizer step and a checkpoint together;
    the rollout under way is abandoned."""
    container: ContainerConfig | None = None
    """Null runs in ``python``'s own environment."""
    env: dict[Variable, str] = Field(default_factory=dict)
    """Further environment variables of all processes on every node, in capitals, such as
    NCCL_SOCKET_IFNAME. Slurm and the container do not get them."""
    ray_port: int | None = Field(None, ge=1024, le=60_000)
    """First of 1,000 ports that Ray uses, for clusters with firewalls between nodes; null takes
    free ones."""
    dashboard: bool = False
    """Run Ray's dashboard, which asks for the attempt's token, and serve metrics for Prometheus on
    every node, which anyone who reaches the nodes can read. A dozen processes on the head node."""
    ready_seconds: int = Field(600, gt=0)
    """Seconds within which every node must be checked and in Ray; those that are not are named,
    left out and replaced once."""
    min_bandwidth: float | None = Field(None, gt=0)
    """GB/s that an all-reduce must reach within each node and between neighbouring ones before
    training starts (bus bandwidth, nccl-tests' definition); null does not measure."""
    min_free_disk: float = Field(20, ge=0)
    """GB that must be free in shared_dir and in each node's /tmp."""
    retries: int = Field(3, ge=0)
    """How often a failed run is started again. Fewer when two attempts in a row got no further."""
    chain: int = Field(1, gt=0)
    """Jobs to submit that start one after the other; for clusters that do not let jobs requeue."""

    @model_validator(mode="after")
    def _check_fields_together(self) -> Self:
        if self.kind == "slurm" and not self.shared_dir.is_absolute():
            raise ValueError(
                f"shared_dir ({self.shared_dir}) must be an absolute path on the cluster",
            )
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
        """Raise ValueError if a value would be more than its place in the batch script."""
        for key in SCRIPT_LINES:
            if CONTROL_CHARACTER.search(getattr(self, key) or ""):
                raise ValueError(
                    f"{key} ({getattr(self, key)!r}) has a line break or another control "
                    "character. It has to be one line of the batch script"
                )
        for key in SCRIPT_WORDS:
            check_script_word(key, getattr(self, key))
        if self.container is not None:
            check_script_word("container.image", self.container.image)
            for mount in self.container.mounts:
                check_script_word("container.mounts", mount)


def load_cluster(name: str, nodes: int | None = None) -> ClusterConfig:
    """Read a YAML file, or the one of ``configs/cluster`` that has this name; ``nodes`` replaces
    the file's.

    Raises ConfigError naming file and keys."""
    path = Path("configs/cluster") / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
    path = find_config(path, "cluster")
    if not path.exists():
        here = [file.stem for file in Path("configs/cluster").glob("*.yaml")]
        known = ", ".join(sorted({*here, *shipped_names("cluster")})) or "none"
        raise ConfigError(
            f"--cluster {name}: there is no {path}; clusters in configs/cluster: {known}",
        )

    tree = read_yaml(path)
    if nodes is not None:
        tree["nodes"] = nodes
    cluster = validated(path, ClusterConfig, OmegaConf.to_container(tree, resolve=True))
    if cluster.kind == "local" and "gpus_per_node" not in cluster.model_fields_set:
        return cluster.model_copy(update={"gpus_per_node": count_gpus()})
    return cluster
