"""Load of the fullest expert-parallel rank with random weights, relative to the mean.

    python -m benchmarks.experts load
    python -m benchmarks.experts load --experts 128 --layers 36 --inner 64 --ranks 2 4

Needs no GPU. Runs one forward pass of a GPT-OSS of full width whose experts have an intermediate
size of ``--inner``. The router sees hidden states of full width, and the expert GEMMs take little
time. Prints a table with these columns for every number of ranks:

- fullest rank of a layer, averaged over the layers,
- fullest rank of all layers together, averaged over random orders of the experts, because the
  assignment of experts to ranks is arbitrary,
- the value in the memory estimate (``expert_load``).
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from megatron_gptoss import distributed
from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.layers.router import GptOssRouter
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import build_batch
from megatron_gptoss.planning.activation_memory import expert_load
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.scorer import LogProbScorer
from rl_loop.cluster.placement import free_port

STD = 0.02
"""Standard deviation of all matrices."""
WHOLE_INNER = 2880
"""GPT-OSS's intermediate size."""
VOCABULARY = 1024
ORDERS = 300
"""Number of random orders of the experts. Results are averaged over them."""

Counts = list[list[int]]
"""Number of tokens by layer and expert."""


def count_tokens(model: torch.nn.Module, sequences: int, length: int) -> Counts:
    """Send random tokens through the model and count the tokens of each expert.

    Args:
        model: model with GptOssRouter layers.
        sequences: number of sequences.
        length: tokens of a sequence.
    """
    routers = [module for module in model.modules() if isinstance(module, GptOssRouter)]
    experts = routers[0].config.num_moe_experts
    counts = torch.zeros(len(routers), experts, dtype=torch.int64)

    def counting(of_layer: Tensor) -> Callable[..., None]:
        def count(router: torch.nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
            _, is_chosen = outputs  # bool [tokens, experts]
            of_layer.add_(is_chosen.sum(0))

        return count

    for router, of_layer in zip(routers, counts, strict=True):
        router.register_forward_hook(counting(of_layer))

    generator = torch.Generator().manual_seed(1)
    for number in range(sequences):
        tokens = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        batch = build_batch(
            TrainingSamples.join([{"token_ids": tokens, "loss_mask": [1] * length}])
        )
        LogProbScorer(model).score([batch])
        print(f"sequence {number + 1} of {sequences}", flush=True)
    return counts.tolist()


@torch.no_grad()
def draw_weights(model: torch.nn.Module, inner: int) -> None:
    """Draw matrices from a normal distribution; norms are ones, biases and sinks zeros."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif parameter.dim() < 2 or name.endswith("bias"):
            parameter.zero_()
        else:
            # Scaled up, because the output must be as large as the output of a full-size expert.
            is_down = ".experts." in name and "fc2" in name
            parameter.normal_(0.0, STD * math.sqrt(WHOLE_INNER / inner) if is_down else STD)


def layer_imbalance(counts: Counts, ranks: int) -> float:
    """Return the load of a layer's fullest rank relative to the mean, averaged over layers."""
    return mean(max(rank_loads(layer, ranks)) for layer in counts)


def model_imbalance(counts: Counts, ranks: int) -> float:
    """Return the load of the fullest rank over all layers, averaged over random orders."""
    generator = random.Random(0)
    fullest = []
    for _ in range(ORDERS):
        shuffled = [generator.sample(layer, len(layer)) for layer in counts]
        loads = [rank_loads(layer, ranks) for layer in shuffled]
        fullest.append(max(map(mean, zip(*loads, strict=True))))
    return mean(fullest)


def rank_loads(layer: list[int], ranks: int) -> list[float]:
    """Return the tokens of every rank relative to the mean of the ranks."""
    experts = len(layer) // ranks
    parts = [sum(layer[rank * experts : (rank + 1) * experts]) for rank in range(ranks)]
    return [part / mean(parts) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--inner", type=int, default=360, help="intermediate size of the experts")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()

    config = GptOssModelConfig(
        num_layers=options.layers,
        num_experts=options.experts,
        intermediate_size=options.inner,
        vocab_size=VOCABULARY,
    )
    distributed.initialize(ParallelConfig(), port=free_port())
    model = build_model(config, ParallelConfig(), torch.float32)
    draw_weights(model, options.inner)
    counts = count_tokens(model, options.sequences, options.length)
    distributed.shutdown()

    print(f"\n{options.experts} experts, {options.layers} layers: beyond the mean\n")
    print("| ranks | in one layer | in all layers | in the estimate |\n|---|---|---|---|")
    for ranks in options.ranks:
        estimate = expert_load(config, ParallelConfig(world_size=ranks, expert=ranks))
        loads = (layer_imbalance(counts, ranks), model_imbalance(counts, ranks), estimate)
        print(f"| {ranks} | " + " | ".join(f"{load - 1:.1%}" for load in loads) + " |")
