"""Random weights of a model with adapters. The base is never completely in bf16."""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from gptoss_kernels import mxfp4
from megatron_gptoss.layers.mxfp4_weight import Mxfp4Weight


@torch.no_grad()
def draw_adapted_model(model: torch.nn.Module, seed: int = 0, std: float = 0.02) -> None:
    """Fill ``model`` with normally distributed weights. Norms are 1, biases and sinks 0.

    An MXFP4 base gets the nearest MXFP4 values, one layer's matrices at a time. B is random, too,
    because a merged weight would equal its base with B = 0. Ranks draw equal replicas and different
    experts.

    Args:
        model: model with adapters.
        seed: seed of the random numbers.
        std: standard deviation of the weights.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    expert_generator = torch.Generator(device).manual_seed(seed + 1000 * (expert_rank + 1))

    for module in model.modules():
        if isinstance(module, Mxfp4Weight):
            values = torch.empty(module.shape, dtype=module.dtype, device=device)
            blocks, scales = mxfp4.quantize(values.normal_(0, std, generator=expert_generator))
            module.blocks.copy_(blocks)
            module.scales.copy_(scales)

    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1)
        elif parameter.dim() == 1:
            parameter.zero_()
        elif "experts" in name:
            parameter.normal_(0, std, generator=expert_generator)
        else:
            parameter.normal_(0, std, generator=generator)
