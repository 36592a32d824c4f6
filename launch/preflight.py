"""Checks that find problems of a cluster before the job waits in a queue.

They need one shell call on the login node and one call of sbatch.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch.cluster import SBATCH_FIELDS, ClusterConfig
from launch.job_settings import JobSettings
from launch.jobs import ClusterError, format_script, run_shell, split_sections
from launch.node_checks import busy_ports
from rl_loop.config.errors import ConfigError
from rl_loop.harmony import o200k
from rl_loop.lifecycle.error_hints import how_to_make

Sections = dict[str, list[str]]
"""Output of preflight.sh: the lines of each section."""


@dataclass(frozen=True)
class SlurmPartition:
    """One line of sinfo. Nodes of different kinds have a line each."""

    name: str
    up: bool
    time_limit: str
    """[days-]hours:minutes:seconds, or a word such as infinite."""
    nodes: int
    gres: str
    """Generic resources of a node, such as gpu:h200:8(S:0-1)."""
    cpus: int
    """CPUs per node."""
    memory: int
    """Memory per node in MB."""
    features: str
    """Features of the nodes, separated by commas."""

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs per node by type; the type is "" if Slurm has none."""
        # The parentheses after a count are the sockets, which are no GPUs.
        matches = re.findall(r"gpu(?::([^:,()]+))?:(\d+)", self.gres)
        return {kind: int(count) for kind, count in matches}

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs per node of the most frequent type."""
        return max(self.gpus.values(), default=0)

    def __str__(self) -> str:
        gpus = ", ".join(f"{count} GPUs {kind}".strip() for kind, count in self.gpus.items())
        node = f"{gpus or 'no GPUs'}, {self.cpus} CPUs"
        return f"{self.name} ({self.nodes} nodes, {node}, limit {self.time_limit})"


def check_before_queue(settings: JobSettings, cluster: ClusterConfig) -> None:
    """Raise ConfigError with every field that cannot work, and the available values."""
    # One shell call checks all paths, because a login node may take seconds to respond.
    paths = [*settings.paths, *_container_paths(cluster), *_offline_paths(cluster)]
    sections = _query_login_node(settings, cluster, paths)

    problems: list[str] = []
    if cluster.kind == "slurm":
        # Without Slurm, all other sections would be empty and the messages misleading.
        if not sections["sbatch"]:
            where = cluster.login or "this machine"
            raise ConfigError(
                f"preflight: cluster.login: {where} has no sbatch. Set a login node, or kind: local"
            )
        # The section also has sinfo's error messages, which are not partitions.
        lines = [line for line in sections["partitions"] if line.count("|") == 7]
        partitions = [parse_partition(line) for line in lines]
        problems += slurm_problems(cluster, partitions, sections)

    problems += _file_problems(cluster, paths, sections)
    problems += _engine_problems(settings, cluster, sections)
    if cluster.kind == "local":
        problems += [f"cluster.ray_port: {problem}" for problem in busy_ports(cluster)]

    # Ask Slurm last, because its message has less detail.
    if not problems and cluster.kind == "slurm":
        problems += _test_submission(cluster)
    if problems:
        raise ConfigError("preflight:\n" + "\n".join(f"  {problem}" for problem in problems))


def _query_login_node(
    settings: JobSettings, cluster: ClusterConfig, paths: list[tuple[str, Path]]
) -> Sections:
    """Run preflight.sh where jobs are submitted, and return its output.

    Raises:
        ConfigError: if the machine does not respond.
    """
    script = format_script(
        "preflight.sh",
        arguments=[str(path) for _, path in paths],
        variables={
            "SHARED": str(cluster.shared_dir.absolute()),
            # The interpreter of a container is not visible from outside.
            "PYTHON": cluster.python if cluster.container is None else "true",
            "ENGINE_PYTHON": settings.engine_python or "" if cluster.container is None else "",
        },
    )
    try:
        output = run_shell(cluster.login, script)
    except ClusterError as error:
        raise ConfigError(f"preflight: cluster.login: {error}") from None
    return dict(split_sections(output))


def _file_problems(
    cluster: ClusterConfig,
    paths: list[tuple[str, Path]],
    sections: Sections,
) -> list[str]:
    """Return the problems with files, disks and the trainer's interpreter on the login node."""
    absent = set(sections["absent"])
    problems = []
    for key, path in paths:
        if str(path) in absent:
            problem = f"{key}: {path} does not exist or cannot be read there"
            # Files of a run can be created by commands of this project, paths of a cluster cannot.
            if not key.startswith("cluster."):
                problem += f". {how_to_make(key, path)}"
            problems.append(problem)

    if sections["shared_dir"]:
        problems.append(f"cluster.shared_dir: {sections['shared_dir'][0]}")
    else:
        # df reports KB.
        free = int(sections["free"][0]) / 1e6 if sections["free"] else 0.0
        if free < cluster.min_free_disk:
            problems.append(
                f"cluster.shared_dir: {free:.0f} GB free there, but min_free_disk is "
                f"{cluster.min_free_disk:g}"
            )

    if cluster.container is None and not sections["python"]:
        problems.append(
            f"cluster.python: {cluster.python} does not exist there. `make setup` in a checkout on "
            "the cluster creates CHECKOUT/.venv/bin/python"
        )
    return problems


def _engine_problems(
    settings: JobSettings, cluster: ClusterConfig, sections: Sections
) -> list[str]:
    """Return the problems with the rollout servers' interpreter on the login node."""
    python = settings.engine_python
    # The interpreter of a container is not visible from outside.
    if python is None or cluster.container is not None:
        return []
    key = settings.engine_key(cluster)
    remedy = "`gptoss doctor --install-engine DIR` there creates DIR/bin/python"
    if sections["engine"] == ["missing"]:
        return [f"{key}: {python} does not exist there. {remedy}"]
    if sections["engine"] != ["ready"]:
        return [f"{key}: {python} there has no SGLang. {remedy}"]
    return []


def slurm_problems(
    cluster: ClusterConfig,
    partitions: list[SlurmPartition],
    sections: Sections,
) -> list[str]:
    """Return the problems that Slurm's description of the cluster shows.

    Args:
        cluster: settings to check.
        partitions: partitions of the cluster.
        sections: output of preflight.sh.
    """
    problems = _account_problems(cluster, sections.get("accounts", []))
    if cluster.container and sections.get("pyxis") == ["0"]:
        problems.append(
            "cluster.container: srun has no --container-image, because pyxis is not installed. Use "
            "python",
        )
    problems += _partition_problems(cluster, partitions)
    return problems


def _account_problems(cluster: ClusterConfig, lines: list[str]) -> list[str]:
    """Compare account and qos with those of the user.

    Args:
        cluster: settings to check.
        lines: "account|qos,qos,..."; empty on a cluster without accounting.
    """
    # One user can have several accounts, each with its own qualities.
    accounts: set[str] = set()
    qualities: set[str] = set()
    for line in lines:
        if "|" in line:
            account, listed = line.split("|")
            accounts.add(account)
            qualities.update(quality for quality in listed.split(",") if quality)

    problems = []
    # A cluster without accounting lists none, so there is nothing to compare with.
    if cluster.account and accounts and cluster.account not in accounts:
        known = ", ".join(sorted(accounts))
        problems.append(
            f"cluster.account: {cluster.account!r} is not one of your accounts: {known}"
        )
    if cluster.qos and accounts and cluster.qos not in qualities:
        known = ", ".join(sorted(qualities)) or "none"
        problems.append(f"cluster.qos: {cluster.qos!r} is not one of your qualities: {known}")
    return problems


def _partition_problems(cluster: ClusterConfig, partitions: list[SlurmPartition]) -> list[str]:
    """Return the first field that no partition satisfies, as a list of at most one problem."""
    fitting = partitions
    if cluster.partition is not None:
        fitting = [partition for partition in partitions if partition.name == cluster.partition]
    if not any(partition.up for partition in fitting):
        state = (
            f"{cluster.partition} is down" if fitting else f"{cluster.partition!r} does not exist"
        )
        return [f"cluster.partition: {state}. The cluster offers {_list_partitions(partitions)}"]

    # Each check narrows the choice, because one partition must satisfy all fields. The message
    # lists the partitions that satisfied all earlier checks.
    for field, fits in PARTITION_CHECKS:
        remaining = [partition for partition in fitting if fits(cluster, partition)]
        if not remaining:
            value = getattr(cluster, field)
            offer = _list_partitions(fitting)
            if field == "constraint":
                offer += f" with features {fitting[0].features}"
            return [
                f"cluster.{field}: {value} is not available. The cluster offers {offer}",
            ]
        fitting = remaining

    # Nodes of different kinds in one partition are several lines of sinfo.
    nodes = cluster.nodes + cluster.rollout_nodes
    if nodes > sum(partition.nodes for partition in fitting):
        return [f"cluster.nodes: {nodes} requested, available: {_list_partitions(fitting)}"]
    return []


def _list_partitions(partitions: list[SlurmPartition]) -> str:
    return ", ".join(str(partition) for partition in partitions)


def _has_gpu_type(cluster: ClusterConfig, partition: SlurmPartition) -> bool:
    if not cluster.gpus_per_node or cluster.gpu_type is None:
        return True
    return cluster.gpu_type in partition.gpus


def _has_gpus(cluster: ClusterConfig, partition: SlurmPartition) -> bool:
    return cluster.gpus_per_node <= partition.gpus_per_node


def _has_cpus(cluster: ClusterConfig, partition: SlurmPartition) -> bool:
    return (cluster.cpus_per_node or 0) <= partition.cpus


def _has_memory(cluster: ClusterConfig, partition: SlurmPartition) -> bool:
    # 0 requests all of a node's memory, so it fits every node.
    return parse_megabytes(cluster.memory_per_node or "0") <= partition.memory


def _has_features(cluster: ClusterConfig, partition: SlurmPartition) -> bool:
    if not cluster.constraint:
        return True
    # One common feature is enough here. Slurm itself checks expressions such as "a&b" and "a|b".
    named = set(re.findall(r"[\w.-]+", cluster.constraint))
    return bool(named & set(partition.features.split(",")))


def _allows_time(cluster: ClusterConfig, partition: SlurmPartition) -> bool:
    return parse_seconds(cluster.time_limit) <= parse_seconds(partition.time_limit)


PARTITION_CHECKS: tuple[tuple[str, Callable[[ClusterConfig, SlurmPartition], bool]], ...] = (
    ("gpu_type", _has_gpu_type),
    ("gpus_per_node", _has_gpus),
    ("cpus_per_node", _has_cpus),
    ("memory_per_node", _has_memory),
    ("constraint", _has_features),
    ("time_limit", _allows_time),
)
"""(field of the cluster, function that returns True if a partition satisfies it), in order."""


def parse_partition(line: str) -> SlurmPartition:
    """Parse a line of ``sinfo -o '%R|%a|%l|%D|%G|%c|%m|%f'``."""
    name, state, time_limit, nodes, gres, cpus, memory, features = line.split("|")
    return SlurmPartition(
        name=name,
        up=state == "up",
        time_limit=time_limit,
        nodes=int(nodes),
        gres=gres,
        cpus=int(cpus.rstrip("+")),  # "16+": at least 16 on every node
        memory=int(memory.rstrip("+")),
        features=features,
    )


def parse_seconds(time_limit: str) -> float:
    """Parse Slurm's [days-]hours:minutes:seconds (or minutes:seconds); infinity without a limit."""
    if not re.fullmatch(r"[\d:-]+", time_limit):
        return float("inf")

    # The last number is always seconds: "30:00" is 30 minutes.
    days, _, clock = time_limit.rpartition("-")
    total = 0
    for number in clock.split(":"):
        total = total * 60 + int(number)
    return int(days or 0) * 86_400 + total


def parse_megabytes(memory: str) -> float:
    """Parse a value of sbatch --mem: a number with K, M, G or T; megabytes without a unit."""
    # Slurm's units are powers of 1024.
    factors = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    factor = factors.get(memory[-1].upper(), 1)
    return float(memory.rstrip("KMGTkmgt")) * factor


def _test_submission(cluster: ClusterConfig) -> list[str]:
    """Let sbatch test the submission, and return its problem as a list of at most one entry."""
    options = []
    for field in SBATCH_FIELDS:
        value = getattr(cluster, field)
        if value:
            options.append(f"--{field}={value}")
    # --wrap gives sbatch a script. With --test-only nothing is submitted.
    options += [
        f"--nodes={cluster.nodes + cluster.rollout_nodes}",
        f"--time={cluster.time_limit}",
        "--wrap=true",
    ]
    command = shlex.join(["sbatch", "--test-only", *options])

    # A rejection by sbatch must not count as a failure of the shell.
    answer = run_shell(cluster.login, f"timeout 20 {command} 2>&1 || true").strip()
    if "to start at" in answer:
        return []

    # Find the field in Slurm's message. Only ``exclude`` has node names.
    message = answer.splitlines()[-1] if answer else "no response"
    words = message.lower().replace("node name", "exclude")
    field = next((field for field in SBATCH_FIELDS if field in words), "partition")
    if field == "exclude":
        message += "; sinfo -N lists the nodes"
    return [f"cluster.{field}: {message}"]


def _container_paths(cluster: ClusterConfig) -> list[tuple[str, Path]]:
    """Return (key, path) of the files and directories of the cluster's container."""
    if cluster.container is None:
        return []
    sources = [Path(mount.split(":")[0]) for mount in cluster.container.mounts]
    paths = [("cluster.container.mounts", source) for source in sources]
    # Other images are names that pyxis pulls.
    if cluster.container.image.startswith("/"):
        paths.append(("cluster.container.image", Path(cluster.container.image)))
    return paths


def _offline_paths(cluster: ClusterConfig) -> list[tuple[str, Path]]:
    """Return (key, path) of the downloads that variables of the cluster name."""
    # A path inside the container is not visible from outside.
    if cluster.container is not None:
        return []
    paths = []
    if folder := cluster.env.get(o200k.VARIABLE):
        paths.append((f"cluster.env.{o200k.VARIABLE}", Path(folder) / o200k.FILE_NAME))
    # Without this variable, the Hub's libraries create the folder.
    if cluster.env.get("HF_HUB_OFFLINE") and (folder := cluster.env.get("HF_HOME")):
        paths.append(("cluster.env.HF_HOME", Path(folder)))
    return paths
