"""Placement of trainer ranks, engines, rollout workers and sandboxes on nodes.

The placement is computed before a job is submitted.
"""

from dataclasses import dataclass, field

from launch.cluster import ClusterConfig
from megatron_gptoss.config import ParallelConfig
from rl_loop.cluster.placement import ENGINE_SERVER
from rl_loop.config.errors import ConfigError
from rl_loop.config.rollout import RolloutConfig
from rl_loop.engines.backend import ServerProcesses
from rl_loop.sandbox.config import SandboxConfig


@dataclass
class NodePlan:
    """Work of one node."""

    name: str
    """Role and number, such as "trainer 0". Slurm chooses the machine."""
    ranks: list[int] = field(default_factory=list)
    """Trainer ranks."""
    servers: list[int] = field(default_factory=list)
    """Indices of the rollout engine's server processes."""
    workers: list[int] = field(default_factory=list)
    """Indices of rollout workers."""
    gpus: int = 0
    """GPUs of the node."""
    rank_gpus: list[int] = field(default_factory=list)
    """GPU of each rank in ``ranks``, by its index in the node."""
    server_gpus: list[list[int]] = field(default_factory=list)
    """GPUs of each server in ``servers``, by their index in the node."""

    @property
    def free_gpus(self) -> int:
        """Number of GPUs without a rank or a server; negative for nodes without GPUs."""
        # Servers may share the GPUs of ranks, so count distinct GPUs.
        used = {*self.rank_gpus, *(gpu for gpus in self.server_gpus for gpu in gpus)}
        return self.gpus - len(used)

    def resources(self) -> dict[str, int]:
        """Return the Ray resources that place actors here. See ``rl_loop.cluster.placement``."""
        roles = {
            "trainer_rank": self.ranks,
            ENGINE_SERVER: self.servers,
            "rollout_worker": self.workers,
        }
        return {f"{role}_{index}": 1 for role, indices in roles.items() for index in indices}


def gpus_needed(parallel: ParallelConfig, rollout: RolloutConfig | None) -> int:
    """Return the number of GPUs for trainer and servers together.

    Args:
        parallel: parallel layout of the trainer.
        rollout: rollout settings; None for supervised fine-tuning.
    """
    servers = rollout.engine.server_processes if rollout is not None else None
    if servers is None or servers.share_trainer_gpus:
        return parallel.world_size
    return parallel.world_size + servers.count * servers.gpus_each


def plan_nodes(
    parallel: ParallelConfig, rollout: RolloutConfig | None, cluster: ClusterConfig
) -> list[NodePlan]:
    """Plan the trainer nodes, then the rollout nodes.

    Args:
        parallel: parallel layout of the trainer.
        rollout: rollout settings; None for supervised fine-tuning.
        cluster: nodes and their GPUs.

    Returns:
        The plan of each node.

    Raises:
        ConfigError: naming the keys if the run does not fit.
    """
    if cluster.rollout_nodes and rollout is None:
        raise ConfigError(
            "cluster.rollout_nodes: supervised fine-tuning has no rollouts. Set it to 0",
        )

    gpus = cluster.gpus_per_node
    trainers = [NodePlan(f"trainer {i}", gpus=gpus) for i in range(cluster.nodes)]
    rollouts = [NodePlan(f"rollout {i}", gpus=gpus) for i in range(cluster.rollout_nodes)]
    plans = [*trainers, *rollouts]

    _place_ranks(parallel, cluster, trainers)
    if rollout is not None:
        # Without separate nodes, servers and workers run on the trainer's.
        hosts = rollouts or trainers
        servers = rollout.engine.server_processes
        if servers is not None:
            _place_servers(parallel, servers, cluster, trainers, hosts)
        # After the servers, because workers follow them.
        _place_workers(rollout.worker_count, hosts)

    # An idle node would be billed, and its program would wait until the end of the run.
    idle = [plan.name for plan in plans if not plan.resources()]
    if idle:
        raise ConfigError(
            f"cluster.nodes: {', '.join(idle)} would be idle. Lower it, or raise "
            "parallel.world_size",
        )
    return plans


def _place_ranks(
    parallel: ParallelConfig, cluster: ClusterConfig, trainers: list[NodePlan]
) -> None:
    """Place contiguous ranks on each node, so that the innermost parallel groups stay within it."""
    ranks = parallel.world_size
    gpus = cluster.gpus_per_node
    if gpus and ranks > cluster.nodes * gpus:
        offered = f"({cluster.nodes} x {gpus}) offers {cluster.nodes * gpus}"
        raise ConfigError(
            f"parallel.world_size ({ranks}) needs {ranks} GPUs, but cluster.nodes x gpus_per_node "
            f"{offered}",
        )

    per_node = _ranks_per_node(parallel, cluster)
    for rank in range(ranks):
        node = trainers[rank // per_node]
        node.ranks.append(rank)
        node.rank_gpus.append(rank % per_node)


def _ranks_per_node(parallel: ParallelConfig, cluster: ClusterConfig) -> int:
    """Return one rank per GPU, or an even distribution without GPUs."""
    if cluster.gpus_per_node:
        return cluster.gpus_per_node
    # Rounded up, so that the last node has the rest.
    return -(-parallel.world_size // cluster.nodes)


def _place_servers(
    parallel: ParallelConfig,
    servers: ServerProcesses,
    cluster: ClusterConfig,
    trainers: list[NodePlan],
    hosts: list[NodePlan],
) -> None:
    """Place servers on the GPUs of trainer ranks if they share them, else where most are free."""
    if servers.share_trainer_gpus:
        per_node = _ranks_per_node(parallel, cluster)
        for server in range(servers.count):
            # Server i shares the GPUs of the ranks from i x gpus_each on.
            first = server * servers.gpus_each
            # The last node takes servers beyond the ranks.
            node = min(first // per_node, len(trainers) - 1)
            trainers[node].servers.append(server)
            shared = [(first + gpu) % per_node for gpu in range(servers.gpus_each)]
            trainers[node].server_gpus.append(shared)
        return

    for server in range(servers.count):
        # max takes the first of equal nodes, which distributes servers evenly.
        freest = max(hosts, key=lambda plan: plan.free_gpus)
        # Without GPUs, any number of servers fits.
        if cluster.gpus_per_node and freest.free_gpus < servers.gpus_each:
            demand = f"{servers.key} ({servers.count} of {servers.gpus_each} GPUs)"
            raise ConfigError(
                f"{demand}: no node has enough free GPUs for server {server}, with "
                f"{parallel.world_size} trainer ranks. Raise cluster.nodes or "
                "cluster.rollout_nodes, or set rollout.engine.colocated"
            )
        # GPUs are assigned from 0 on, so the first free one follows the used ones.
        used = freest.gpus - freest.free_gpus
        freest.servers.append(server)
        freest.server_gpus.append(list(range(used, used + servers.gpus_each)))


def _place_workers(count: int, hosts: list[NodePlan]) -> None:
    """Distribute rollout workers over the nodes with servers, which they call constantly."""
    candidates = [plan for plan in hosts if plan.servers] or hosts
    for worker in range(count):
        # Ranks count, too, because a worker's engine and sandbox need processors.
        least_loaded = min(candidates, key=lambda plan: len(plan.ranks) + len(plan.workers))
        least_loaded.workers.append(worker)


def describe_placement(
    plans: list[NodePlan], rollout: RolloutConfig, sandbox: SandboxConfig
) -> str:
    """Return the placement as text, one line per node, with GPU indices within the node."""
    lines = []
    for plan in plans:
        roles = _describe_roles(plan, rollout, sandbox)
        lines.append(f"  {plan.name:10}  {'; '.join(roles)}")

    if any(plan.gpus for plan in plans):
        lines.append("  Ray may assign GPUs to ranks and to separate servers in another order.")
    return "\n".join(lines)


def _describe_roles(plan: NodePlan, rollout: RolloutConfig, sandbox: SandboxConfig) -> list[str]:
    """Return texts for the ranks, servers, workers and sandboxes of one node."""
    roles = []
    if plan.ranks:
        ranks = _describe_numbers("rank", plan.ranks)
        if plan.gpus:
            ranks += f" on {_describe_numbers('GPU', plan.rank_gpus)}"
        roles.append(ranks)

    if plan.servers:
        servers = rollout.engine.server_processes
        assert servers is not None
        places = []
        for number, gpus in zip(plan.servers, plan.server_gpus, strict=True):
            has_gpus = plan.gpus > 0 and bool(gpus)
            places.append(
                f"{number} on {_describe_numbers('GPU', gpus)}" if has_gpus else f"{number}"
            )
        roles.append(f"{servers.name} {', '.join(places)}")

    if plan.workers:
        roles.append(f"rollout workers {', '.join(map(str, plan.workers))}")
        roles.append(f"{len(plan.workers) * sandbox.servers} sandbox processes")
    return roles


def _describe_numbers(what: str, numbers: list[int]) -> str:
    """Return "rank 3" or "ranks 0 to 3" for consecutive ``numbers``."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    return f"{what}s {numbers[0]} to {numbers[-1]}"
