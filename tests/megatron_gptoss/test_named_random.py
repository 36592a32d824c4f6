"""Initial values by seed and name. Weights, adapters and certify share one generator."""

from __future__ import annotations

import torch

from converters.random_weights import random_hf_weights
from megatron_gptoss.named_random import named_generator
from rl_loop.certify.model import SIZES, designed_weights

NAME = "lm_head.weight"


def test_named_generator_keeps_its_seeds() -> None:
    """The seed is 63 bits of sha256("3/lm_head.weight"). Other seeds change all weights."""
    assert named_generator(3, NAME).initial_seed() == 12735547520497229
    seeds = {named_generator(seed, name).initial_seed() for seed in (0, 1) for name in ("a", "b")}
    assert len(seeds) == 4


def test_weights_are_drawn_from_the_named_generator() -> None:
    config = SIZES["tiny"]
    noise = torch.randn(config.vocab_size, config.hidden_size, generator=named_generator(3, NAME))
    assert torch.equal(random_hf_weights(config, 3)(NAME), noise * config.initializer_std)
    designed = dict(designed_weights(config, 3))[NAME]
    assert torch.equal(designed, 2 * config.hidden_size**-0.5 * noise)
