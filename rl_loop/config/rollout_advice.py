"""Warnings about rollout settings that leave servers waiting.

`gptoss plan` prints them, and a run logs them at its start.
"""

from megatron_gptoss.config import ModelConfig
from rl_loop.config.rollout import EPISODES_PER_WORKER, RolloutConfig
from rl_loop.engines.sglang.config import SglangConfig

MEAN_LENGTH = 0.5
"""Mean of an episode's tokens, as a fraction of ``rollout.max_tokens``. An assumption."""
FULL_SHARE = 0.9
"""Smallest share of a server's batch that counts as full."""
CROWDED_WORKER = 2 * EPISODES_PER_WORKER
"""Episodes of a worker from which a warning is worth it.

With 256 episodes per worker, an episode waited 0.6 to 1.6 s between turns. With 64 it waited 0.14
to 0.27 s (20B on 4 H200, MXFP4).
"""


def fitting_requests(
    engine: SglangConfig, model: ModelConfig, gigabytes: float, tokens: float
) -> int:
    """Return the requests of ``tokens`` tokens that a server's key/value cache holds.

    Args:
        engine: settings of the servers.
        model: configuration of the model.
        gigabytes: memory of a GPU in GB (1e9 bytes).
        tokens: tokens per request.
    """
    return int(engine.cache_tokens(model, "bf16", gigabytes * 1e9) / max(1.0, tokens))


def rollout_warnings(
    rollout: RolloutConfig, model: ModelConfig, gigabytes: float | None
) -> list[str]:
    """Return a warning per setting that leaves servers waiting. Each names a key and a value.

    Args:
        rollout: rollout settings. Only SGLang servers are checked.
        model: configuration of the policy.
        gigabytes: memory of a GPU in GB (1e9 bytes). None if it is not known: batches are then
            not checked.
    """
    engine = rollout.engine
    if not isinstance(engine, SglangConfig):
        return []
    episodes = rollout.tasks_per_step * rollout.samples_per_task
    of_server = episodes / engine.servers
    warnings = []
    if gigabytes is not None:
        mean = MEAN_LENGTH * rollout.max_tokens
        fitting = fitting_requests(engine, model, gigabytes, mean)
        batch = min(engine.max_running_requests, fitting)
        if of_server < FULL_SHARE * batch:
            tasks = -(-batch * engine.servers // rollout.samples_per_task)
            warnings.append(
                f"rollout.tasks_per_step={rollout.tasks_per_step} gives a server {of_server:.0f} "
                f"episodes, but its batch holds {batch}: with rollout.tasks_per_step={tasks} "
                "batches are full, and tokens/s are higher"
            )

    of_worker = episodes / rollout.worker_count
    if of_worker > CROWDED_WORKER:
        workers = -(-episodes // EPISODES_PER_WORKER)
        warnings.append(
            f"rollout.workers={rollout.worker_count} gives a worker {of_worker:.0f} episodes, "
            f"which wait for each other: set rollout.workers={workers}, or leave it out"
        )
    return warnings
