"""Which trainer ranks, engines, rollout workers and sandboxes run on which node: computed before a job is submitted."""

from dataclasses import dataclass, field

from launch.cluster import ClusterConfig
from rl_loop.cluster.placement import ENGINE_SERVER
from rl_loop.config.errors import ConfigError
from rl_loop.config.run import RunConfig
from rl_loop.engines.backend import ServerProcesses


@dataclass
class NodePlan:
    """What runs on one node."""

    name: str  # role and number, such as "trainer 0": Slurm chooses the machine
    ranks: list[int] = field(default_factory=list)
    servers: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    free_gpus: int = 0

    def resources(self) -> dict[str, int]:
        """The custom Ray resources that bring the actors here; see ``rl_loop.cluster.placement``."""
        roles = {"trainer_rank": self.ranks, ENGINE_SERVER: self.servers, "rollout_worker": self.workers}
        return {f"{role}_{index}": 1 for role, indices in roles.items() for index in indices}


def place(config: RunConfig, cluster: ClusterConfig, uses_rollouts: bool) -> list[NodePlan]:
    """Plans of the trainer nodes, then of the rollout nodes. Ranks are contiguous on a node, so that the innermost
    parallel groups stay within it. Raises ConfigError naming the keys if the run does not fit."""
    gpus, ranks, rollout = cluster.gpus_per_node, config.parallel.world_size, config.rollout
    trainers = [NodePlan(f"trainer {i}", free_gpus=gpus) for i in range(cluster.nodes)]
    others = [NodePlan(f"rollout {i}", free_gpus=gpus) for i in range(cluster.rollout_nodes)]
    if others and not uses_rollouts:
        raise ConfigError("cluster.rollout_nodes: supervised fine-tuning has no rollouts; set it to 0")
    offer = f"cluster.nodes x gpus_per_node ({cluster.nodes} x {gpus}) offers {cluster.nodes * gpus}"
    if gpus and ranks > cluster.nodes * gpus:
        raise ConfigError(f"parallel.world_size ({ranks}) needs {ranks} GPUs, {offer}")
    per_node = gpus or -(-ranks // cluster.nodes)
    for rank in range(ranks):
        trainers[rank // per_node].ranks.append(rank)
        trainers[rank // per_node].free_gpus -= 1
    hosts = others or trainers
    servers = rollout.engine.server_processes
    if uses_rollouts and servers is not None:
        _add_servers(config, servers, trainers, hosts, per_node, gpus)
    for worker in range(rollout.workers if uses_rollouts else 0):
        near = [node for node in hosts if node.servers] or hosts  # a worker talks to engines all the time
        emptiest = min(near, key=lambda node: len(node.ranks) + len(node.workers))
        emptiest.workers.append(worker)
    idle = [node.name for node in [*trainers, *others] if not node.resources()]
    if idle:
        raise ConfigError(f"nothing would run on {', '.join(idle)}: lower cluster.nodes or raise parallel.world_size")
    return [*trainers, *others]


def _add_servers(
    config: RunConfig,
    servers: ServerProcesses,
    trainers: list[NodePlan],
    hosts: list[NodePlan],
    per_node: int,
    gpus: int,
) -> None:
    width = servers.gpus_each
    for server in range(servers.count):
        if servers.share_trainer_gpus:  # server i takes the GPUs of ranks i x width and on
            trainers[min(server * width // per_node, len(trainers) - 1)].servers.append(server)
            continue
        roomiest = max(hosts, key=lambda node: node.free_gpus)
        if gpus and roomiest.free_gpus < width:
            raise ConfigError(
                f"{servers.key} ({servers.count} of {width} GPUs): no node has as many left for server {server} "
                f"beside the {config.parallel.world_size} trainer ranks; raise cluster.nodes or cluster.rollout_nodes, "
                "or set rollout.engine.colocated"
            )
        roomiest.servers.append(server)
        roomiest.free_gpus -= width


def describe(plans: list[NodePlan], config: RunConfig) -> str:
    """The placement as text, one node a line."""
    lines = []
    for plan in plans:
        parts = [f"ranks {plan.ranks[0]} to {plan.ranks[-1]}"] if plan.ranks else []
        if plan.servers:
            servers = config.rollout.engine.server_processes
            assert servers is not None
            numbers = ", ".join(map(str, plan.servers))
            parts.append(f"{servers.name}s {numbers} ({servers.gpus_each} GPUs each)")
        if plan.workers:
            parts.append(f"rollout workers {', '.join(map(str, plan.workers))}")
            parts.append(f"{len(plan.workers) * config.sandbox.workers} sandbox processes")
        lines.append(f"  {plan.name:10}  {'; '.join(parts)}")
    return "\n".join(lines)
