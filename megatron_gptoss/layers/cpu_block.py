"""The layer specification for CPUs: Megatron's own modules where they run without CUDA.

Nothing is patched. Each class says what of megatron-core 0.19.2 it steps around; the mathematics
is Megatron's.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_gptoss.layers.adapted_experts import (
    ADAPTED_EXPERT_LINEARS,
    AdaptedExperts,
    has_adapted_experts,
)
from megatron_gptoss.layers.adapted_grouped_experts import AdaptedGroupedExperts
from megatron_gptoss.layers.adapted_linears import (
    SEPARATE_NORM_KEYS,
    choose_projections,
    choose_router,
)
from megatron_gptoss.layers.attention import SinkAttention
from megatron_gptoss.layers.quantized_experts import QUANTIZED_EXPERT_LINEARS, QuantizedExperts
from megatron_gptoss.step_clock import TimedMoELayer
from megatron_gptoss.transformer_config import GptOssTransformerConfig, mark


class CpuRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm under sequence parallelism.

    Tensor parallelism needs it, and Megatron's wrapper (torch_norm.py) refuses it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        **unused: Any,
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)

        # The gradient covers only this rank's share of the tokens: Megatron must sum it over
        # tensor-parallel ranks.
        mark(self.weight, sequence_parallel=config.sequence_parallel)


class ExpertRowParallelLinear(RowParallelLinear):
    """The down projection of one expert that is not split over ranks.

    It steps around two faults of RowParallelLinear in this place:

    - It marks the bias ``sequence_parallel``, so that with tensor plus sequence parallelism its
      gradient is summed twice (exactly doubled).
    - Its reduction over one rank returns the input itself, on which the expert's in-place bias
      addition fails in training.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.bias is not None:
            mark(self.bias, sequence_parallel=False)

        # Leaves the reduction to the dispatcher.
        self.explicit_expert_comm = True


class CpuAlltoAllTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """The all-to-all dispatcher without its CUDA side stream.

    On a CPU the split sizes can become plain lists at once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Anything but None keeps the parent from creating a CUDA stream.
        if MoEAlltoAllTokenDispatcher.cuda_dtoh_stream is None:
            MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none: CPU"
        super().__init__(*args, **kwargs)

    def _maybe_dtoh_and_synchronize(
        self,
        point: str,
        tokens_per_expert: Tensor | None = None,
    ) -> Tensor | None:
        if self.drop_and_pad or point != self.cuda_dtoh_point:
            return tokens_per_expert

        for name in ("input_splits", "output_splits", "output_splits_tp", "num_out_tokens"):
            value = getattr(self, name, None)
            if torch.is_tensor(value):
                setattr(self, name, value.tolist())
        return tokens_per_expert


class CpuMoELayer(TimedMoELayer):
    """MoELayer with the dispatcher above."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        # The parent offers no way to name another dispatcher, and building its all-to-all one
        # fails without CUDA. It builds the one that works everywhere, which is then replaced.
        config.moe_token_dispatcher_type = "allgather"
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.moe_token_dispatcher_type = "alltoall"

        self.token_dispatcher = CpuAlltoAllTokenDispatcher(
            self.num_local_experts,
            self.local_expert_indices,
            config=self.config,
            pg_collection=kwargs["pg_collection"],
        )


def cpu_block_spec(config: GptOssTransformerConfig, stage: int) -> TransformerBlockSubmodules:
    """Specify the layers of one chunk of this pipeline rank."""
    # Grouped products of experts are Transformer Engine's; here one expert follows the other.
    submodules = get_gpt_layer_local_submodules(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        normalization="RMSNorm",
    )
    moe_submodules = MoESubmodules(experts=_experts(config), router=choose_router(config))
    submodules.mlp = partial(CpuMoELayer, submodules=moe_submodules)
    attention = submodules.self_attention.submodules
    attention.core_attention = SinkAttention
    choose_projections(attention, config)
    submodules.input_layernorm = CpuRMSNorm
    submodules.pre_mlp_layernorm = CpuRMSNorm
    submodules.sharded_state_dict_keys_map = SEPARATE_NORM_KEYS

    layer = ModuleSpec(module=TransformerLayer, submodules=submodules)
    layers = [layer] * get_num_layers_to_build(config, stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=CpuRMSNorm)


def _experts(config: GptOssTransformerConfig) -> partial[SequentialMLP]:
    """Choose the class of all experts and those of an expert's two matrices."""
    if config.quantization == "mxfp4":
        return partial(QuantizedExperts, submodules=QUANTIZED_EXPERT_LINEARS)

    if has_adapted_experts(config):
        # One expert after the other takes the memory of one merged matrix; grouped is what GPUs do.
        grouped = config.moe_grouped_gemm
        experts = AdaptedGroupedExperts if grouped else AdaptedExperts
        return partial(experts, submodules=ADAPTED_EXPERT_LINEARS)

    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertRowParallelLinear)
    return partial(SequentialMLP, submodules=linears)
