"""The layer specification for GPUs: Transformer Engine's linears and grouped experts around our attention, router."""

from copy import copy
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_submodules
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from gptoss_kernels.swiglu import clamped_swiglu
from megatron_gptoss.layers.attention import SinkAttention
from megatron_gptoss.layers.router import GptOssRouter
from megatron_gptoss.step_clock import TimedMoELayer
from megatron_gptoss.transformer_config import GptOssTransformerConfig, mark


class GptOssGroupedMLP(TEGroupedMLP):
    """All experts of this rank: two grouped matrix products around one fused activation.

    Megatron's own forward clamps, gates and weighs in separate passes and keeps their results for the backward pass,
    and adds the second bias through an fp32 copy of every expert's rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, parameter in self.named_parameters():
            if ".bias" in name:
                # where Transformer Engine sets this mark, Megatron sums an expert's gradient over tensor-parallel ranks
                # that have all of it already
                mark(parameter, sequence_parallel=False)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor, *unused: Any
    ) -> tuple[Tensor, None]:
        """[rows, hidden_size] sorted by expert, rows per expert, probabilities [rows] -> [rows, hidden_size]."""
        counts: list[int] = tokens_per_expert.tolist()
        limit = self.config.activation_func_clamp_value
        gates_and_ups, _ = self.linear_fc1(permuted_local_hidden_states, counts)
        if self.activation_recompute:
            checkpoint = CheckpointWithoutOutput()
            activated = checkpoint.checkpoint(
                lambda x, probs: clamped_swiglu(x, probs, limit), gates_and_ups, permuted_probs
            )
        else:
            activated = clamped_swiglu(gates_and_ups, permuted_probs, limit)
        output, biases = self.linear_fc2(activated, counts)
        if self.activation_recompute:
            checkpoint.discard_output_and_register_recompute(output)
        return add_weighted_bias(output, torch.stack(list(biases)), permuted_probs, counts), None


def add_weighted_bias(output: Tensor, biases: Tensor, probs: Tensor, counts: list[int]) -> Tensor:
    """output[row] + probs[row] * biases[expert of row], as one product with a matrix that has one entry per row.

    output: [rows, hidden_size] sorted by expert; biases: [experts, hidden_size]; probs: [rows]; counts: of rows."""
    # from pinned memory: a copy from elsewhere would wait until the GPU has done what is queued
    repeats = torch.tensor(counts, pin_memory=output.is_cuda).to(output.device, non_blocking=True)
    of_row = torch.arange(len(counts), device=output.device).repeat_interleave(repeats, output_size=len(output))
    weights = torch.zeros(len(output), len(counts), dtype=output.dtype, device=output.device)
    weights = weights.scatter(1, of_row[:, None], probs[:, None].to(output.dtype))
    return torch.addmm(output, weights, biases.to(output.dtype))


class NoRecomputeLayer(TransformerLayer):
    """A layer that computes nothing again, whatever others do."""

    def __init__(self, config: GptOssTransformerConfig, *args: Any, **kwargs: Any) -> None:
        config = copy(config)
        config.recompute_granularity = config.recompute_modules = None
        super().__init__(config, *args, **kwargs)


def transformer_engine_block_spec(config: GptOssTransformerConfig, stage: int) -> TransformerBlockSubmodules:
    """The layers of one chunk of this pipeline rank. Raises RuntimeError where Transformer Engine is missing."""
    if not HAVE_TE:
        raise RuntimeError("training on GPUs needs Transformer Engine 2.x (pip install transformer-engine[pytorch])")
    submodules = get_gpt_layer_with_transformer_engine_submodules(
        num_experts=config.num_moe_experts, moe_grouped_gemm=True
    )
    grouped = submodules.mlp.keywords["submodules"].experts.keywords["submodules"]
    experts = partial(GptOssGroupedMLP, submodules=grouped)
    submodules.mlp = partial(TimedMoELayer, submodules=MoESubmodules(experts=experts, router=GptOssRouter))
    submodules.self_attention.submodules.core_attention = config.core_attention or SinkAttention
    layers: list[Any] = [TransformerLayer] * get_num_layers_to_build(config, stage)
    if (again := config.recompute_layers) is not None:
        layers[again:] = [NoRecomputeLayer] * len(layers[again:])
    specs = [ModuleSpec(module=layer, submodules=submodules) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm)
