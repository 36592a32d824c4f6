"""Warnings about rollout settings that leave servers waiting.

`gptoss plan` prints them, and a run logs them at its start.
"""

from megatron_gptoss.config import AdapterConfig, ModelConfig
from rl_loop.config.rollout import EPISODES_PER_WORKER, RolloutConfig
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.gpu_memory import ServerNeeds, windowed_cache_share

MEAN_LENGTH_FRACTION = 0.5
"""Mean of an episode's sampled tokens, as a fraction of their maximum. An assumption."""
FEW_EPISODES = 0.5
"""Episodes per server below which a warning is printed, as a fraction of the server's batch.

With 128 instead of 256 requests, a server of the 20B decodes 0.58x as many tokens/s in bf16, and
0.69x with MXFP4 experts, as predicted by ``launch.rollout_time``.
"""
MANY_EPISODES = 2 * EPISODES_PER_WORKER
"""Episodes per rollout worker above which a warning is printed.

Time between two turns while all episodes run, from the servers' logs of the 20B with MXFP4 experts
on 4 H200: 0.6 to 1.6 s with 256 episodes per worker, 0.14 to 0.27 s with 64.
"""


def mean_sampled_tokens(rollout: RolloutConfig, turn_tokens: float | None = None) -> float:
    """Return the mean of the sampled tokens of an episode.

    Args:
        rollout: rollout settings.
        turn_tokens: mean sampled tokens of a turn; None for ``MEAN_LENGTH_FRACTION`` of the
            maximum.
    """
    if turn_tokens is None:
        return MEAN_LENGTH_FRACTION * rollout.max_response_tokens
    return min(turn_tokens * rollout.max_turns, rollout.max_response_tokens)


def batch_size(
    engine: SglangConfig,
    model: ModelConfig,
    dtype: str,
    gigabytes: float,
    tokens: float,
    adapter: AdapterConfig | None = None,
) -> int:
    """Return the requests that a server runs at a time, at least 1.

    Args:
        engine: settings of the servers.
        model: configuration of the model.
        dtype: precision of weights and cache, "fp32" or "bf16".
        gigabytes: memory of a GPU in GB (1e9 bytes).
        tokens: tokens per request.
        adapter: adapters that the server adds without merging. None without them.
    """
    needs = ServerNeeds.of(
        model,
        dtype,
        engine.tensor_parallel,
        mxfp4_experts=engine.has_mxfp4_experts,
        windowed_share=windowed_cache_share(engine.arguments),
        adapter=adapter,
    )
    others = needs.weights + needs.working + needs.context
    cache = engine.memory_fraction * gigabytes * 1e9 - others
    fitting = int(cache / needs.token_bytes / tokens)
    return max(1, min(engine.max_running_requests, fitting))


def rollout_warnings(
    rollout: RolloutConfig,
    model: ModelConfig,
    dtype: str,
    gigabytes: float | None,
    turn_tokens: float | None = None,
    adapter: AdapterConfig | None = None,
) -> list[str]:
    """Return a warning per setting that leaves servers waiting. Each names a key and a value.

    Args:
        rollout: rollout settings. Only SGLang servers are checked.
        model: configuration of the policy.
        dtype: precision of weights and cache, "fp32" or "bf16".
        gigabytes: memory of a GPU in GB (1e9 bytes). None if it is not known: batches are then
            not checked.
        turn_tokens: mean sampled tokens of a turn; None for ``MEAN_LENGTH_FRACTION`` of an
            episode's maximum.
        adapter: adapters that servers add without merging. None without them.
    """
    engine = rollout.engine
    if not isinstance(engine, SglangConfig):
        return []
    episodes = rollout.tasks_per_step * rollout.samples_per_task
    episodes_per_server = episodes / engine.servers
    warnings = []
    if gigabytes is not None:
        mean = mean_sampled_tokens(rollout, turn_tokens)
        batch = batch_size(engine, model, dtype, gigabytes, mean, adapter)
        if episodes_per_server < FEW_EPISODES * batch:
            tasks = -(-batch * engine.servers // rollout.samples_per_task)
            warnings.append(
                f"rollout.tasks_per_step={rollout.tasks_per_step} gives a server {episodes_per_server:.0f} "
                f"episodes, but {batch} fit. More episodes give more tokens/s: set "
                f"rollout.tasks_per_step to up to {tasks}"
            )

    episodes_per_worker = episodes / rollout.worker_count
    if episodes_per_worker > MANY_EPISODES:
        workers = -(-episodes // EPISODES_PER_WORKER)
        warnings.append(
            f"rollout.workers={rollout.worker_count} gives a worker {episodes_per_worker:.0f} episodes, "
            f"which wait for each other. Set rollout.workers={workers}, or leave it out"
        )
    return warnings
