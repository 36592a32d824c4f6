"""Detection of answers that the policy has not sampled, by the engine's and trainer's log-probs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_gptoss.samples import TrainingSamples
from rl_loop.data import response_check
from rl_loop.data.response_check import (
    ResponseMismatchError,
    TrainedTokens,
    check_sampled_by_policy,
)


def batch() -> tuple[TrainingSamples, TrainedTokens]:
    """Return 3 episodes of 20 tokens whose last 12 are sampled. The trainer's log-probs agree."""
    chance = np.random.default_rng(0)
    samples = TrainingSamples.join(
        [
            {
                "token_ids": list(range(1, 21)),
                "loss_mask": [0] * 8 + [1] * 12,
                "rollout_log_probs": chance.normal(-2, 1, 20).astype(np.float32),
            }
            for _ in range(3)
        ],
        names=[f"task/{i}" for i in range(3)],
    )
    assert samples.rollout_log_probs is not None
    log_probs = samples.rollout_log_probs + np.float32(1e-3)
    log_probs[:8] = np.nan
    return samples, TrainedTokens(log_probs, np.zeros_like(log_probs))


def test_episode_with_mismatching_log_probs_is_named() -> None:
    samples, trained = batch()
    check_sampled_by_policy(samples, trained, limit=0.1, step=4)
    trained.log_probs[28:40] += 0.5
    with pytest.raises(
        ResponseMismatchError, match=r"step 5: .* task task/1: .* 0\.501 nats .* 12 tokens"
    ):
        check_sampled_by_policy(samples, trained, limit=0.1, step=4)
    check_sampled_by_policy(samples, trained, limit=1.0, step=4)


def test_prompts_few_tokens_and_stale_ones_are_not_reported() -> None:
    samples, trained = batch()
    trained.log_probs[20:28] += 9  # tokens of a prompt
    trained.log_probs[28:40] += 0.5
    old = np.zeros(60, np.int32)
    old[28:40] = 1
    check_sampled_by_policy(replace(samples, staleness=old), trained, limit=0.1, step=0)
    spliced = old.astype(np.bool_)
    check_sampled_by_policy(replace(samples, is_off_policy=spliced), trained, limit=0.1, step=0)
    few = samples.loss_mask.copy()
    few[28:33] = False
    check_sampled_by_policy(replace(samples, loss_mask=few), trained, limit=0.1, step=0)
    check_sampled_by_policy(samples, None, limit=0.1, step=0)


def test_mismatching_episode_is_named_for_any_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(response_check, "BLOCK_TOKENS", 64)
    chance = np.random.default_rng(1)
    lengths = [9, 55, 64, 300, 10, 8, 128, 20]
    samples = TrainingSamples.join(
        [
            {
                "token_ids": [5] * n,
                "loss_mask": [1] * n,
                "rollout_log_probs": np.zeros(n, np.float32),
            }
            for n in lengths
        ],
        names=[f"task/{i}" for i in range(len(lengths))],
    )
    noise = chance.exponential(0.1, samples.tokens).astype(np.float32)
    for i, length in enumerate(lengths):
        log_probs = -noise
        own = slice(samples.offsets[i], samples.offsets[i + 1])
        log_probs[own] -= 1
        mean = np.abs(log_probs[own]).mean(dtype=np.float64)
        trained = TrainedTokens(log_probs, np.zeros_like(log_probs))
        with pytest.raises(
            ResponseMismatchError, match=f"task task/{i}: .* {mean:.3g} nats .* {length} tok"
        ):
            check_sampled_by_policy(samples, trained, limit=0.5, step=0)
