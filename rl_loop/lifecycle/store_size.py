"""Required size of Ray's object store for a run, and its comparison with a machine or cluster.

The store holds episodes, the inputs of the trainer's ranks and the weights of embedded engines. Ray
silently writes objects that do not fit to the disk, and a step then takes minutes longer. Therefore
the required size is computed from the configuration, for the longest possible episodes. A run whose
step does not fit is rejected before it starts.

Ray maps the store to a file in /dev/shm, whose pages take memory only after they are written to.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_gptoss import host_memory
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.config.precision import bytes_per_number
from megatron_gptoss.routes import route_dtype
from megatron_gptoss.token_columns import INPUT_COLUMNS, TOKEN_COLUMNS, column_bytes
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.config.errors import StartError
from rl_loop.config.rollout import RolloutConfig

MIN_STORE_BYTES = 512 << 20
"""Minimum size of the store in bytes.

Every machine can provide it. If /dev/shm is smaller, as in a container, Ray uses a directory on the
disk.
"""

HEAD_ROOM = 1.5
"""Factor for unusable space.

Ray begins to write objects to the disk when the store is 80% full (RAY_object_spilling_threshold).
Released objects occupy space for 1-2 s, and leave gaps.
"""

TEXT_BYTES = 5
"""Bytes per token of the decoded text in the turns of an episode."""

RETURNED_BYTES = 8
"""Bytes per token that the ranks return for recorded episodes: log-prob and entropy in fp32."""

WEIGHT_COPIES = 3
"""Copies of the weights in the store during a sync to embedded engines.

One is the result of the trainer's rank, and one is for the workers. The third is the earlier version,
which the replacement of a dead worker would load.
"""

SHARED_MEMORY = Path("/dev/shm")

GB = 1e9


@dataclass(frozen=True)
class StoreNeed:
    """Maximum contents of the store at one time, in bytes."""

    episodes: int
    """Maximum number of episodes in the store at one time, of several steps and an evaluation."""
    longest: int
    """Length of the longest episode in tokens."""
    columns: int
    """Per-token columns of episodes and of the inputs to trainer ranks."""
    routes: int
    """Experts of every token. 0 if the engine does not record them."""
    weights: int
    """Weights for embedded engines."""
    keys: list[str] = field(default_factory=list)
    """Configuration keys to lower if this is too much."""

    @property
    def step(self) -> int:
        """Total with the factor HEAD_ROOM."""
        return math.ceil((self.columns + self.routes + self.weights) * HEAD_ROOM)

    @property
    def driver_bytes(self) -> int:
        """Part on the driver's node, with the factor HEAD_ROOM. Routes are not stored there."""
        return math.ceil((self.columns + self.weights) * HEAD_ROOM)

    def __str__(self) -> str:
        parts = [f"columns {_gb(self.columns)}"]
        if self.routes:
            parts.append(f"routes {_gb(self.routes)}")
        if self.weights:
            parts.append(f"weights {_gb(self.weights)}")
        return (
            f"{_gb(self.step)} of Ray's object store for {self.episodes:,} episodes of up to "
            f"{self.longest:,} tokens at a time ({', '.join(parts)})"
        )


# -- from the configuration -----------------------------------------------------------------------


def sft_store_need(*, sequences: int, longest: int) -> StoreNeed:
    """Compute the contents of the store in a step of supervised fine-tuning.

    Args:
        sequences: sequences per step.
        longest: maximum tokens of a sequence.
    """
    return StoreNeed(
        episodes=sequences,
        longest=longest,
        columns=sequences * longest * _count_token_bytes(INPUT_COLUMNS),
        routes=0,
        weights=0,
        keys=["sequences_per_step", "training.max_tokens_per_micro_batch"],
    )


def rl_store_need(
    model: ModelConfig,
    dtype: str,
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    *,
    held_out: int,
) -> StoreNeed:
    """Compute the contents of the store in the steps of reinforcement learning.

    Args:
        model: architecture of the policy.
        dtype: dtype of the weights.
        rollout: section of the configuration.
        algorithm: section of the configuration.
        held_out: episodes in an evaluation.
    """
    trained = rollout.tasks_per_step * rollout.samples_per_task

    # Rounds of dynamic sampling keep all groups until those of the step are chosen. Steps that were
    # of later steps wait during the update of an earlier step and its evaluation.
    sampled = algorithm.dynamic_sampling_rounds * trained
    later_steps = algorithm.max_staleness
    episodes = held_out + (trained + later_steps * sampled if later_steps > 0 else sampled)

    keys = ["rollout.tasks_per_step", "rollout.samples_per_task", "rollout.max_episode_tokens"]
    if algorithm.dynamic_sampling_rounds > 1:
        keys.append("algorithm.dynamic_sampling_rounds")
    if algorithm.max_staleness > 0:
        keys.append("algorithm.max_staleness")
    if held_out > trained:
        keys.append("tasks.held_out_tasks")

    weight_copies = WEIGHT_COPIES if rollout.engine.takes_tensors else 0
    # The store also holds the inputs and results of the ranks.
    rank_bytes = trained * (_rank_bytes(rollout, algorithm) + RETURNED_BYTES)
    return StoreNeed(
        episodes=episodes,
        longest=rollout.max_episode_tokens,
        columns=rollout.max_episode_tokens * (episodes * _episode_bytes() + rank_bytes),
        # An evaluation has no routes, because it is not trained on.
        routes=rollout.max_episode_tokens * (episodes - held_out) * _route_bytes(model, rollout),
        weights=weight_copies * _weight_bytes(model, dtype),
        keys=keys,
    )


def evaluation_store_need(
    model: ModelConfig, dtype: str, rollout: RolloutConfig, *, episodes: int
) -> StoreNeed:
    """Compute the contents of the store in ``gptoss eval``.

    Args:
        model: architecture of the policy.
        dtype: dtype of the weights.
        rollout: section of the configuration.
        episodes: episodes in the evaluation.
    """
    weights = _weight_bytes(model, dtype)
    return StoreNeed(
        episodes=episodes,
        longest=rollout.max_episode_tokens,
        columns=episodes * rollout.max_episode_tokens * _episode_bytes(),
        routes=0,
        weights=weights if rollout.engine.takes_tensors else 0,
        keys=["evaluation.samples_per_task", "tasks.held_out_tasks", "rollout.max_episode_tokens"],
    )


def store_bytes(need: StoreNeed) -> int:
    """Return the size of the store to start on this machine."""
    return max(need.step, MIN_STORE_BYTES)


def _episode_bytes() -> int:
    return column_bytes("episode") + TEXT_BYTES


def _rank_bytes(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> int:
    """Return the bytes per token that the ranks receive and return in all passes over a step."""
    # Columns that the configuration does not use. All other columns count.
    results = list(algorithm.estimates)
    unused = {"values", "reference_log_probs", "teacher_log_probs"} - set(results)
    if algorithm.critic is None:
        unused.add("returns")
    if algorithm.old_log_probs_from == "detach":
        unused.add("staleness")
    if rollout.purification is None:
        unused.add("is_off_policy")
    distillation = algorithm.distillation
    if distillation is None or None not in distillation.teachers.values():
        unused.add("has_teacher")

    # Steps with an evaluation are also scored without routing replay.
    if algorithm.routing_replay != "none":
        results.append("old_log_probs")

    total = (
        column_bytes("episode", "driver") - _count_token_bytes(unused) + _count_token_bytes(results)
    )
    # With mini-batches, the passes before the update assign other sequences to the ranks.
    if results and algorithm.mini_batches > 1:
        total += _count_token_bytes(INPUT_COLUMNS)
    return total


def _route_bytes(model: ModelConfig, rollout: RolloutConfig) -> int:
    """Return the bytes of one token's experts, 0 if they are not recorded."""
    if not rollout.routed_experts:
        return 0
    return model.num_layers * model.experts_per_token * route_dtype(model.num_experts).itemsize


def _weight_bytes(model: ModelConfig, dtype: str) -> int:
    return model.num_parameters * bytes_per_number(dtype)


def _count_token_bytes(columns: Collection[str]) -> int:
    return sum(TOKEN_COLUMNS[name].dtype.itemsize for name in columns)


# -- on the machine -------------------------------------------------------------------------------


def shared_memory_bytes() -> int:
    """Return the free bytes in /dev/shm, 0 if it does not exist."""
    return psutil.disk_usage(str(SHARED_MEMORY)).free if SHARED_MEMORY.is_dir() else 0


def check_local_store(need: StoreNeed) -> None:
    """Raise StartError if a Ray on this machine cannot have a store for a step."""
    shared, memory = shared_memory_bytes(), host_memory.available_bytes()
    if need.step <= min(shared, memory) or need.step <= MIN_STORE_BYTES:
        return

    lower = _join_with_or(need.keys)
    # The smaller of the two is the limit, so the message names it.
    if memory < shared:
        raise StartError(
            f"a step needs {need}, but only {_gb(memory)} of memory are free. Lower {lower}"
        )
    raise StartError(
        f"a step needs {need}, but /dev/shm has only {_gb(shared)} free. Lower {lower}, or "
        "enlarge /dev/shm (docker run --shm-size)"
    )


def check_running_store(need: StoreNeed) -> None:
    """Raise StartError if the Ray to which this process is connected cannot hold a step."""
    # Imported here, because reading a configuration does not need Ray.
    import ray

    # Ray offers the size of each node's store as a resource.
    stores = {
        node["NodeID"]: int(node["Resources"].get("object_store_memory", 0))
        for node in ray.nodes()
        if node["Alive"]
    }
    at_driver = stores.get(ray.get_runtime_context().get_node_id(), 0)
    total = sum(stores.values())

    advice = f"Lower {_join_with_or(need.keys)}, or start Ray's nodes with a larger --object-store-memory"
    # One node holds everything.
    if len(stores) == 1 and total < need.step:
        raise StartError(f"a step needs {need}, but the store has only {_gb(total)}. {advice}")
    # Routes stay where they were sampled. All other columns and the weights pass the driver.
    if at_driver < need.driver_bytes:
        raise StartError(
            f"a step needs {need}, {_gb(need.driver_bytes)} of it on the driver's node, but "
            f"the store there has only {_gb(at_driver)}. {advice}"
        )
    # Objects that one node produces and another reads are stored on both.
    if len(stores) > 1 and total < 2 * need.step:
        raise StartError(
            f"a step needs {need}, most of it on two nodes, but the stores of {len(stores)} "
            f"nodes have only {_gb(total)} together. {advice}"
        )


def _join_with_or(keys: list[str]) -> str:
    return f"{', '.join(keys[:-1])} or {keys[-1]}" if len(keys) > 1 else keys[0]


def _gb(count: float) -> str:
    return f"{count / GB:,.1f} GB" if count >= GB / 10 else f"{count / GB * 1000:,.0f} MB"
