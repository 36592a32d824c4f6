"""Random routers of an upcycled model, and biases that balance their experts.

Hidden states have a large common part, by which some experts would get nearly all tokens and others
none. The biases give all experts equal shares of the calibration text. They do not change the
function, because the experts are equal.
"""

import hashlib

import torch
from torch import Tensor

from converters.upcycling.architecture import UpcycleOptions
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig

BALANCING_STEPS = 400
"""Corrections of a router's bias. Their size falls linearly to 0."""
BALANCING_RATE = 0.2
"""First correction of an unused expert's bias, relative to the logits' spread."""


def expert_loads(logits: Tensor, config: GptOssModelConfig) -> Tensor:
    """Return the load of each expert, [experts]. 1 is an even share of the tokens.

    Args:
        logits: router logits with the bias, [tokens, experts].
        config: architecture of the upcycled model.
    """
    chosen = logits.topk(config.experts_per_token, dim=-1).indices
    counts = torch.bincount(chosen.flatten(), minlength=config.num_experts).double()
    return counts / counts.mean()


def balancing_bias(logits: Tensor, config: GptOssModelConfig) -> Tensor:
    """Return the router's bias with which all experts have about equal loads, [experts].

    As in balancing without an auxiliary loss (arXiv 2408.15664): the bias of an expert rises while
    its load is too small.

    Args:
        logits: router logits without bias, [tokens, experts].
        config: architecture of the upcycled model.
    """
    logits = logits.double()
    # Most of the imbalance: logits of all tokens have a common part.
    bias = -logits.mean(dim=0)
    spread = (logits + bias).std()
    for step in range(BALANCING_STEPS):
        # Relative to the spread of the logits, which depends on the model. It falls to 0, because
        # with a constant rate the loads would oscillate.
        rate = BALANCING_RATE * spread * (1 - step / BALANCING_STEPS)
        bias += rate * (1 - expert_loads(logits + bias, config))
    # A number that is added to all logits changes no choice and no weight.
    return bias - bias.mean()


def router_weight(config: GptOssModelConfig, options: UpcycleOptions, layer: int) -> Tensor:
    """Return the random weight of a router, [experts, hidden_size]."""
    generator = torch.Generator()
    generator.manual_seed(derive_seed(options.seed, f"model.layers.{layer}.mlp.router.weight"))
    shape = (config.num_experts, config.hidden_size)
    return torch.randn(shape, generator=generator) * options.router_std


def derive_seed(seed: int, name: str) -> int:
    """Return a seed for one tensor."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest)
