"""Which trainer ranks, rollout workers and sandboxes run on which node. Computed before anything is submitted."""

from __future__ import annotations

from dataclasses import dataclass, field

from launch.cluster import ClusterConfig
from rl_loop.config import ConfigError, RunConfig


@dataclass
class NodePlan:
    """What runs on one node."""

    name: str
    """Role and number, such as "trainer 0": Slurm chooses the machine."""
    ranks: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)

    def resources(self) -> dict[str, int]:
        """The custom Ray resources that bring the actors here; see ``rl_loop.placed``."""
        places = [f"trainer_rank_{rank}" for rank in self.ranks] + [f"rollout_worker_{i}" for i in self.workers]
        return dict.fromkeys(places, 1)


def place(config: RunConfig, cluster: ClusterConfig, uses_rollouts: bool) -> list[NodePlan]:
    """Plans of the trainer nodes, then of the rollout nodes. Ranks are contiguous on a node, so that the innermost
    parallel groups stay within it. Raises ConfigError naming the keys if the run does not fit."""
    trainer = [NodePlan(f"trainer {i}") for i in range(cluster.nodes)]
    rollout = [NodePlan(f"rollout {i}") for i in range(cluster.rollout_nodes)]
    ranks, workers = config.parallel.world_size, config.rollout.workers if uses_rollouts else 0
    if rollout and not workers:
        raise ConfigError(
            f"cluster.rollout_nodes ({len(rollout)}): supervised fine-tuning has no rollouts; set it to 0"
        )
    gpus = cluster.gpus_per_node
    per_node = gpus or -(-ranks // cluster.nodes)
    wanted = ranks + (0 if rollout else workers)
    if gpus and wanted > cluster.nodes * gpus:
        needs = f"parallel.world_size ({ranks})" + ("" if rollout else f" and rollout.workers ({workers})")
        raise ConfigError(
            f"{needs} need {wanted} GPUs, cluster.nodes x gpus_per_node ({cluster.nodes} x {gpus}) offers "
            f"{cluster.nodes * gpus}: --nodes {-(-wanted // gpus)} would do"
        )
    if gpus and rollout and workers > len(rollout) * gpus:
        raise ConfigError(
            f"rollout.workers ({workers}) need {workers} GPUs, cluster.rollout_nodes x gpus_per_node "
            f"({len(rollout)} x {gpus}) offers {len(rollout) * gpus}"
        )
    for rank in range(ranks):
        trainer[rank // per_node].ranks.append(rank)
    hosts = rollout or trainer
    for worker in range(workers):
        with_room = [node for node in hosts if not gpus or len(node.ranks) + len(node.workers) < gpus]
        emptiest = min(with_room, key=lambda node: len(node.ranks) + len(node.workers))
        emptiest.workers.append(worker)
    idle = [node.name for node in [*trainer, *rollout] if not node.ranks and not node.workers]
    if idle:
        raise ConfigError(f"nothing would run on {', '.join(idle)}: lower cluster.nodes or raise parallel.world_size")
    return [*trainer, *rollout]


def describe(plans: list[NodePlan], config: RunConfig) -> str:
    """The placement as text, one node a line."""
    lines = []
    for plan in plans:
        parts = [f"ranks {plan.ranks[0]} to {plan.ranks[-1]}"] if plan.ranks else []
        if plan.workers:
            parts.append(f"engines {', '.join(map(str, plan.workers))}")
            parts.append(f"{len(plan.workers) * config.sandbox.workers} sandbox processes")
        lines.append(f"  {plan.name:10}  {'; '.join(parts)}")
    return "\n".join(lines)
