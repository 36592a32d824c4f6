"""Random samples that begin with equal tokens, as episodes of a group do."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_gptoss.config import ModelConfig
from megatron_gptoss.samples import TrainingSamples
from tests.support.megatron_gptoss.reference import TINY

LOG_PROB_COLUMNS = ("rollout_log_probs", "old_log_probs", "reference_log_probs")


def branching_samples(
    seed: int,
    trees: int = 2,
    longest: int = 24,
    model: ModelConfig = TINY,
    with_routes: bool = False,
    unequal_routes: float = 0.0,
) -> TrainingSamples:
    """Return samples of random trees, with different advantages and log-probs of shared tokens.

    Args:
        seed: seed of all random numbers.
        trees: number of trees.
        longest: largest number of tokens in a segment.
        model: model for the vocabulary and the routes.
        with_routes: whether samples have routes, which are equal for shared tokens.
        unequal_routes: fraction of tokens to which each sample gives a route of its own.
    """
    rng = np.random.default_rng(seed)
    samples: list[dict[str, Any]] = []

    def routes(tokens: int) -> np.ndarray:
        shape = (tokens, model.num_layers, model.num_experts)
        return rng.random(shape).argsort(-1)[..., : model.experts_per_token].astype(np.uint8)

    def end_here(ids: np.ndarray, mask: np.ndarray, path: np.ndarray) -> None:
        # The last tokens belong to this sample only.
        ids = np.concatenate([ids, rng.integers(0, model.vocab_size, 3)])
        path = np.concatenate([path, routes(2)])
        changed = rng.random(len(path)) < unequal_routes
        path[changed] = routes(int(changed.sum()))
        columns = {name: rng.normal(-3, 0.5, len(ids)) for name in LOG_PROB_COLUMNS}
        samples.append(
            {
                "token_ids": ids,
                "loss_mask": np.concatenate([mask, [True] * 3]),
                "advantages": rng.normal(size=len(ids)),
                "routed_experts": path if with_routes else None,
                **columns,
            }
        )

    def grow(ids: np.ndarray, mask: np.ndarray, path: np.ndarray, depth: int) -> None:
        tokens = int(rng.integers(1, longest))
        ids = np.concatenate([ids, rng.integers(0, model.vocab_size, tokens)])
        mask = np.concatenate([mask, rng.random(tokens) < 0.6])
        path = np.concatenate([path, routes(tokens)])
        branches = depth == 0 or (depth < 3 and rng.random() < 0.5)
        # A sample may also end where others continue.
        if not branches or rng.random() < 0.2:
            end_here(ids, mask, path)
        for _ in range(int(rng.integers(2, 5)) if branches else 0):
            grow(ids, mask, path, depth + 1)

    for _ in range(trees):
        grow(np.zeros(0, np.int64), np.zeros(0, bool), routes(0), 0)
    return TrainingSamples.join(samples)
