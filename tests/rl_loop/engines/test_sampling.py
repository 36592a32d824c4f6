"""Sampled tokens have the distribution of the reported log-probs."""

from __future__ import annotations

import pytest
import torch

from rl_loop.engines.embedded.sampling import sample, sampling_log_probs

DRAWS = 20000
NOT_GREEDY = torch.tensor([False])
LOGITS = torch.tensor([1.5, -0.3, 0.2, 2.1, -30.0, 0.9, -1.2, 0.0])


def draw(temperature: float, top_p: float) -> torch.Tensor:
    """Return the counts of DRAWS sampled tokens, [vocab_size]."""
    uniforms = torch.rand(DRAWS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    log_probs = sampling_log_probs(LOGITS.expand(DRAWS, -1), torch.full((DRAWS,), temperature))
    tokens = sample(
        log_probs,
        uniforms,
        NOT_GREEDY.expand(DRAWS),
        torch.full((DRAWS,), top_p, dtype=torch.float64),
    )
    return torch.bincount(tokens, minlength=len(LOGITS))


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs.double() * DRAWS
    likely = expected > 5
    assert counts[probs == 0].sum() == 0
    return float(((counts - expected)[likely] ** 2 / expected[likely]).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_token_counts_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    probs = torch.softmax(LOGITS.double() / temperature, 0)
    assert (
        chi_square(draw(temperature, 1.0), probs) < 24.3
    )  # 99.9 % quantile for 7 degrees of freedom


@pytest.mark.parametrize(("top_p", "kept"), [(0.9, 5), (0.65, 2), (0.1, 1)])
def test_top_p_keeps_the_smallest_set_that_reaches_its_mass(top_p: float, kept: int) -> None:
    probs = torch.softmax(LOGITS.double(), 0)
    order = probs.argsort(descending=True)
    assert (
        probs[order[: kept - 1]].sum() < top_p <= probs[order[:kept]].sum()
    )  # ``kept`` is correct for this case
    nucleus = torch.zeros_like(probs)
    nucleus[order[:kept]] = probs[order[:kept]]
    assert chi_square(draw(1.0, top_p), nucleus / nucleus.sum()) < 24.3


def test_log_probs_ignore_top_p_and_greedy_ones_temperature() -> None:
    log_probs = sampling_log_probs(LOGITS.expand(2, -1), torch.tensor([0.0, 0.5]))
    torch.testing.assert_close(log_probs[0], torch.log_softmax(LOGITS, 0))
    torch.testing.assert_close(log_probs[1], torch.log_softmax(LOGITS * 2, 0))


def test_rows_of_one_batch_have_separate_settings() -> None:
    log_probs = sampling_log_probs(LOGITS.expand(4, -1), torch.tensor([0.0, 1.0, 1.0, 1.0]))
    tokens = sample(
        log_probs,
        torch.tensor([0.99, 0.0, 0.999999, 0.999999], dtype=torch.float64),
        torch.tensor([True, False, False, False]),
        torch.tensor([1.0, 1.0, 0.1, 1.0], dtype=torch.float64),
    )
    assert tokens.tolist() == [3, 0, 3, 7]


def test_half_precision_logits_are_normalized_in_fp32() -> None:
    assert sampling_log_probs(LOGITS.bfloat16()[None], torch.ones(1)).dtype == torch.float32
    assert sampling_log_probs(LOGITS.double()[None], torch.ones(1)).dtype == torch.float64


def test_token_of_zero_probability_is_never_sampled() -> None:
    log_probs = sampling_log_probs(
        torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]]), torch.ones(1)
    )
    for uniform, token in ((0.0, 1), (0.5, 2), (1 - 2**-53, 2)):
        assert (
            sample(
                log_probs, torch.tensor([uniform], dtype=torch.float64), NOT_GREEDY, torch.ones(1)
            ).item()
            == token
        )
