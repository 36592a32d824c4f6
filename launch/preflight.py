"""What would fail on the cluster, found before the job waits in a queue: one call to a shell on the login node."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.cluster import SBATCH_FIELDS, ClusterConfig
from launch.jobs import ClusterError, script, sections, shell
from launch.node_checks import busy_ports
from rl_loop.config.errors import ConfigError
from rl_loop.config.run import RunConfig


@dataclass
class Partition:
    """One line of sinfo; nodes of different kinds give one line each."""

    name: str
    up: bool
    time_limit: str
    nodes: int
    gres: str
    cpus: int
    memory: int  # MB of a node
    features: str

    @property
    def gpus(self) -> dict[str, int]:
        """type -> GPUs per node; the type is "" where Slurm knows none."""
        found = re.findall(r"gpu(?::([^:,()]+))?:(\d+)", self.gres)
        return {kind: int(count) for kind, count in found}

    def __str__(self) -> str:
        gpus = ", ".join(f"{count} GPUs {kind}".strip() for kind, count in self.gpus.items()) or "no GPUs"
        return f"{self.name} ({self.nodes} nodes, {gpus}, {self.cpus} CPUs, limit {self.time_limit})"


def check_before_queue(config: RunConfig, cluster: ClusterConfig) -> None:
    """Raises ConfigError with every field that will not work, and what the cluster offers instead."""
    local = cluster.container is None
    named = _named_paths(config, cluster)
    variables = {"SHARED": str(cluster.shared_dir.absolute()), "PYTHON": cluster.python if local else "true"}
    asked = script("preflight.sh", *(str(path) for _, path in named), **variables)
    try:
        answers = dict(sections(shell(cluster.login, asked)))
    except ClusterError as error:
        raise ConfigError(f"preflight: cluster.login: {error}") from None
    problems: list[str] = []
    if cluster.kind == "slurm":
        if not answers["sbatch"]:
            where = cluster.login or "this machine"
            advice = "name a login node, or kind: local"
            raise ConfigError(f"preflight: cluster.login: there is no sbatch on {where}; {advice}")
        partitions = [_partition(line) for line in answers["partitions"] if line.count("|") == 7]
        problems += slurm_problems(cluster, partitions, answers)
    absent = set(answers["absent"]) - {""}
    problems += [f"{key}: {path} does not exist or cannot be read there" for key, path in named if str(path) in absent]
    if answers["shared_dir"]:
        problems.append(f"cluster.shared_dir: {answers['shared_dir'][0]}")
    free = int(answers["free"][0]) / 1e6 if answers["free"] else 0.0
    if not answers["shared_dir"] and free < cluster.min_free_disk:
        problems.append(f"cluster.shared_dir: {free:.0f} GB are free there, min_free_disk is {cluster.min_free_disk:g}")
    if local and not answers["python"]:
        problems.append(f"cluster.python: there is no {cluster.python} there")
    if cluster.kind == "local":
        problems += [f"cluster.ray_port: {problem}" for problem in busy_ports(cluster)]
    if not problems and cluster.kind == "slurm":
        problems += _ask_slurm(cluster)
    if problems:
        raise ConfigError("preflight:\n" + "\n".join(f"  {problem}" for problem in problems))


def slurm_problems(cluster: ClusterConfig, partitions: list[Partition], answers: dict[str, list[str]]) -> list[str]:
    """What Slurm's own description of the cluster rules out."""
    accounts = [line.split("|") for line in answers.get("accounts", []) if "|" in line]
    names = sorted({account for account, _ in accounts})
    problems = []
    if cluster.account and names and cluster.account not in names:
        problems.append(f"cluster.account: {cluster.account!r} is not one of yours: {', '.join(names)}")
    qualities = sorted({quality for _, listed in accounts for quality in listed.split(",") if quality})
    if cluster.qos and accounts and cluster.qos not in qualities:
        problems.append(f"cluster.qos: {cluster.qos!r} is not one of yours: {', '.join(qualities) or 'none'}")
    if cluster.container and answers.get("pyxis") == ["0"]:
        problems.append("cluster.container: srun has no --container-image here (pyxis is not installed); use python")
    offers = ", ".join(str(partition) for partition in partitions)
    fitting = [p for p in partitions if cluster.partition in (None, p.name)]
    if not any(p.up for p in fitting):
        state = f"{cluster.partition} is down" if fitting else f"there is no {cluster.partition!r}"
        return [*problems, f"cluster.partition: {state}; the cluster offers {offers}"]
    gpus, nodes = cluster.gpus_per_node, cluster.nodes + cluster.rollout_nodes
    wanted = set(re.findall(r"[\w.-]+", cluster.constraint or ""))
    checks = {
        "gpu_type": lambda p: not gpus or cluster.gpu_type in (None, *p.gpus),
        "gpus_per_node": lambda p: gpus <= max(p.gpus.values(), default=0),
        "cpus_per_node": lambda p: (cluster.cpus_per_node or 0) <= p.cpus,
        "memory_per_node": lambda p: _megabytes(cluster.memory_per_node or "0") <= p.memory,
        "constraint": lambda p: not cluster.constraint or wanted & set(p.features.split(",")),
        "time_limit": lambda p: seconds(cluster.time_limit) <= seconds(p.time_limit),
    }
    for field, fits in checks.items():
        offer, remaining = ", ".join(map(str, fitting)), [p for p in fitting if fits(p)]
        if not remaining:
            features = f" with features {fitting[0].features}" if field == "constraint" else ""
            given = f"cluster.{field}: {getattr(cluster, field)}"
            return [*problems, f"{given} is more or other than there is: {offer}{features}"]
        fitting = remaining
    if nodes > sum(p.nodes for p in fitting):
        problems.append(f"cluster.nodes: {nodes} wanted, there are {', '.join(map(str, fitting))}")
    return problems


def seconds(time_limit: str) -> float:
    """Of Slurm's [days-]hours:minutes:seconds (or minutes:seconds); infinite without a limit."""
    if not re.fullmatch(r"[\d:-]+", time_limit):
        return float("inf")
    days, _, clock = time_limit.rpartition("-")
    total = 0
    for part in clock.split(":"):
        total = total * 60 + int(part)
    return int(days or 0) * 86_400 + total


def _ask_slurm(cluster: ClusterConfig) -> list[str]:
    """Slurm's own word, for what cannot be read from its lists."""
    options = [f"--{field}={value}" for field in SBATCH_FIELDS if (value := getattr(cluster, field))]
    options += [f"--nodes={cluster.nodes + cluster.rollout_nodes}", f"--time={cluster.time_limit}", "--wrap=true"]
    command = shlex.join(["sbatch", "--test-only", *options])
    answer = shell(cluster.login, f"timeout 20 {command} 2>&1 || true").strip()
    if "to start at" in answer:
        return []
    message = answer.splitlines()[-1] if answer else "no answer"
    words = message.lower().replace("node name", "exclude")  # nothing else of ours names nodes
    field = next((field for field in SBATCH_FIELDS if field in words), "partition")
    return [f"cluster.{field}: {message}" + ("; sinfo -N lists the nodes" if field == "exclude" else "")]


def _partition(line: str) -> Partition:
    name, up, limit, nodes, gres, *sizes, features = line.split("|")
    cpus, memory = (int(size.rstrip("+")) for size in sizes)
    return Partition(name, up == "up", limit, int(nodes), gres, cpus, memory, features)


def _megabytes(memory: str) -> float:
    factor = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}.get(memory[-1].upper(), 1)
    return float(memory.rstrip("KMGTkmgt")) * factor


def is_path(value: Any, key: str) -> bool:
    """Whether a value of a configuration is a file or directory; data may also be on the Hub ("hub:...")."""
    named = key.endswith("_path") and isinstance(value, str) and not value.startswith("hub:")
    return isinstance(value, Path) or named


def _named_paths(config: RunConfig, cluster: ClusterConfig) -> list[tuple[str, Path]]:
    """(key, path) of everything that must exist on the cluster."""

    def walk(value: Any, key: str) -> list[tuple[str, Path]]:
        if isinstance(value, dict):
            return [pair for name, item in value.items() for pair in walk(item, f"{key}.{name}" if key else name)]
        return [(key, Path(value))] if is_path(value, key) else []

    found = walk(config.model_dump(exclude={"output_dir"}), "")
    if cluster.container:
        found += [("cluster.container.mounts", Path(m.split(":")[0])) for m in cluster.container.mounts]
        if cluster.container.image.startswith("/"):
            found.append(("cluster.container.image", Path(cluster.container.image)))
    return found
