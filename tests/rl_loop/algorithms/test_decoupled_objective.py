"""Objective for stale tokens, on a policy small enough to sum over all possible episodes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.objectives import policy_objective
from tests.support.rl_loop.algorithms import build_sample_batch, in_fp64, loss_tokens

TOKENS = 3
LENGTH = 2
EPISODES = list(product(range(TOKENS), repeat=LENGTH))
SWITCH = 1
"""Position of the first token that was sampled with the second weight version."""


def tables(seed: int) -> torch.Tensor:
    """Return the logits of a policy: fp64 [state, token]. States: 0 is the start, 1 + t token t."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + TOKENS, TOKENS, generator=generator, dtype=torch.float64)


def compute_log_probs(episode: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of an episode's tokens: fp64 [length]."""
    before = [0, *(1 + token for token in episode[:-1])]
    return torch.stack(
        [logits[state].log_softmax(0)[token] for state, token in zip(before, episode, strict=True)]
    )


def reward(episode: tuple[int, ...]) -> float:
    return float(episode[0] * 2 - episode[1] ** 2)


def sampled_with(versions: tuple[torch.Tensor, torch.Tensor], episode: tuple[int, ...]) -> Any:
    """Return the log-probs of an engine whose weights change in the middle of every episode."""
    earlier, later = (compute_log_probs(episode, version) for version in versions)
    return torch.cat([earlier[:SWITCH], later[SWITCH:]])


def exact_gradient(logits: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the expected reward of the policy."""
    table = logits.clone().requires_grad_()
    expected = sum(compute_log_probs(e, table).sum().exp() * reward(e) for e in EPISODES)
    (gradient,) = torch.autograd.grad(expected, table)
    return gradient


def gradient_of_objective(
    config: AlgorithmConfig, logits: torch.Tensor, versions: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return the gradient of the objective, negated: the direction of gradient descent.

    Every episode has the probability with which the two versions sample it as its weight.
    """
    table = logits.clone().requires_grad_()
    samples = []
    for episode in EPISODES:
        rollout = sampled_with(versions, episode)
        # The objective is a mean over samples and linear in the advantages.
        weight = len(EPISODES) * rollout.sum().exp().item()
        samples.append(
            {
                "token_ids": [0, *episode],
                "loss_mask": [0, *[1] * LENGTH],
                "advantages": [weight * reward(episode)] * (1 + LENGTH),
                "rollout_log_probs": [0.0, *rollout.tolist()],
                "old_log_probs": [0.0, *compute_log_probs(episode, logits).tolist()],
                "staleness": [0, *[2] * SWITCH, *[1] * (LENGTH - SWITCH)],
            }
        )
    batch = in_fp64(build_sample_batch(samples))
    log_probs = torch.cat([compute_log_probs(episode, table) for episode in EPISODES])
    assert log_probs.shape == batch.loss_mask.shape
    output = policy_objective(config, loss_tokens(samples))(
        log_probs, torch.zeros_like(log_probs), batch
    )
    (gradient,) = torch.autograd.grad(-output.loss, table)
    return gradient


def config(**settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(
        {"max_staleness": 2, "aggregation": "seq-mean-token-sum"} | settings
    )


@pytest.mark.parametrize("policy_loss", ["ppo", "reinforce"])
def test_sequence_weights_make_the_off_policy_gradient_exact(
    policy_loss: str,
) -> None:
    now, *versions = tables(0), tables(1), tables(2)
    uncapped = config(policy_loss=policy_loss, correction={"weight": "sequence_tis", "cap": 1e9})
    assert uncapped.old_log_probs_from == "forward"
    got = gradient_of_objective(uncapped, now, (versions[0], versions[1]))
    # Log-probs travel in fp32.
    torch.testing.assert_close(got, exact_gradient(now), rtol=1e-5, atol=1e-5)


def test_token_weights_bias_the_off_policy_gradient() -> None:
    now, *versions = tables(0), tables(1), tables(2)
    uncapped = config(correction={"weight": "token_tis", "cap": 1e9})
    got = gradient_of_objective(uncapped, now, (versions[0], versions[1]))
    exact = exact_gradient(now)
    assert not torch.allclose(got, exact, atol=1e-2)
    # If the versions equal the policy, the weights are 1 and the gradient has no bias.
    got = gradient_of_objective(uncapped, now, (now, now))
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)


def test_gradient_is_biased_if_stale_tokens_count_as_on_policy() -> None:
    now, *versions = tables(0), tables(1), tables(2)
    unclipped = {"type": "ppo", "clip_low": 1, "clip_high": 9e9}
    none = config(correction={"weight": "none"}, old_log_probs="rollout", policy_loss=unclipped)
    got = gradient_of_objective(none, now, (versions[0], versions[1]))
    assert not torch.allclose(got, exact_gradient(now), atol=1e-2)


def test_sums_by_staleness_add_up_to_those_of_all_tokens() -> None:
    now, *versions = tables(0), tables(1), tables(2)
    samples = []
    for place, episode in enumerate(EPISODES):
        rollout = sampled_with((versions[0], versions[1]), episode).tolist()
        samples.append(
            {
                "token_ids": [0, *episode],
                "loss_mask": [0, *[1] * LENGTH],
                "advantages": [1.0] * (1 + LENGTH),
                "rollout_log_probs": [0.0, *rollout],
                "old_log_probs": [0.0, *compute_log_probs(episode, now).tolist()],
                "staleness": [0, place % 2, 0],
            }
        )
    log_probs = torch.cat(
        [compute_log_probs(episode, now) for episode in EPISODES]
    ).requires_grad_()
    objective = policy_objective(config(), loss_tokens(samples))
    sums = objective(
        log_probs, torch.zeros(len(log_probs)), in_fp64(build_sample_batch(samples))
    ).sums
    assert (int(sums["fresh/tokens"]), int(sums["stale/tokens"])) == (14, 4)
    assert sums["fresh/kl_k3"] + sums["stale/kl_k3"] == pytest.approx(sums["mismatch/kl_k3"].item())
    assert sums["fresh/ratio"] + sums["stale/ratio"] == pytest.approx(sums["ratio/mean"].item())

    # Only the stale tokens: the first token of every second episode.
    rho = [
        (compute_log_probs(e, now) - sampled_with((versions[0], versions[1]), e))[0].exp().item()
        for e in EPISODES[1::2]
    ]
    assert sums["stale/weight"] == pytest.approx(sum(rho))
    assert sums["stale/weight_square"] == pytest.approx(sum(w * w for w in rho))
    on_policy = AlgorithmConfig(aggregation="seq-mean-token-sum", old_log_probs="forward")
    plain = policy_objective(on_policy, loss_tokens(samples))
    sums = plain(log_probs, torch.zeros(len(log_probs)), in_fp64(build_sample_batch(samples))).sums
    assert not {name for name in sums if name.startswith(("fresh/", "stale/"))}
