"""Sequence-level terms under context parallelism: a sequence's tokens lie on several ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from rl_loop.algorithms.objectives import policy_objective
from tests.support.distributed import free_port, run_distributed
from tests.support.rl_loop.algorithms import (
    CONFIGS,
    build_sample_batch,
    in_fp64,
    loss_tokens,
    samples,
)

NAMES = ["ppo", "gspo", "sequence mis"]


Result = tuple[dict[str, float], dict[str, float], dict[tuple[int, int], float]]


def evaluate(name: str, rank: int, size: int) -> Result:
    """Return this rank's sums (with the loss), maxima, and gradients by sample and position."""
    everyone = samples((25, 9, 3, 14))
    batch = in_fp64(build_sample_batch(everyone, align=2))
    part = batch.context_parallel_shard(rank, size)
    log_probs = (-0.02 * (part.labels.double() + 1)).requires_grad_()
    group = dist.group.WORLD if size > 1 else None
    output = policy_objective(CONFIGS[name], loss_tokens(everyone), 50, group)(
        log_probs, log_probs.exp(), part
    )
    output.loss.backward()
    assert log_probs.grad is not None
    places = zip(part.sample_ids.tolist(), part.position_ids.tolist(), strict=True)
    gradients = dict(zip(places, log_probs.grad.tolist(), strict=True))
    sums = {key: float(value) for key, value in output.sums.items()}
    return sums, {key: float(value) for key, value in output.maxima.items()}, gradients


def on_two_ranks(rank: int, port: int) -> list[Result]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    results = [evaluate(name, rank, 2) for name in NAMES]
    dist.destroy_process_group()
    return results


def test_context_parallel_ranks_do_not_change_sums_or_gradients() -> None:
    first, second = run_distributed(on_two_ranks, 2, free_port())
    for name, (sums, maxima, gradients), other in zip(NAMES, first, second, strict=True):
        whole_sums, whole_maxima, whole_gradients = evaluate(name, 0, 1)
        together = {key: sums[key] + other[0][key] for key in sums}
        assert together == pytest.approx(whole_sums, rel=1e-6, abs=1e-6), name
        assert {k: max(maxima[k], other[1][k]) for k in maxima} == pytest.approx(
            whole_maxima, rel=1e-6
        ), name
        assert gradients | other[2] == pytest.approx(whole_gradients, rel=1e-6, abs=1e-9), name
