"""Experts with a frozen base and adapters, computed one expert at a time.

Each expert has its own base weights, in bf16 or MXFP4, and its own biases. The adapters of all
experts of a rank are one pair of parameters per matrix.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from megatron_gptoss.layers.adapted_linears import AdaptedLinear, adapter_settings, sharded_state
from megatron_gptoss.layers.adapters import EXPERT_LINEARS, LowRank
from megatron_gptoss.layers.mxfp4_weight import Mxfp4Weight
from megatron_gptoss.layers.unmerged import unmerged_product
from megatron_gptoss.transformer_config import (
    PolicyTransformerConfig,
    parameter_device,
    set_distribution,
)


@dataclass(frozen=True)
class ExpertAdapter:
    """One expert's part of a layer's expert adapters."""

    adapters: LowRank
    """Expert adapters of this rank."""
    index: int
    """Index of the expert on this rank."""

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank] in the model's dtype."""
        a, b = self.adapters()
        return a[self.index], b[self.index]


class AdaptedExpertLinear(AdaptedLinear):
    """One matrix of one expert, in bf16 or MXFP4, with or without an adapter.

    Ranks hold whole experts, so this layer does not communicate.
    """

    adapter: ExpertAdapter | None = None
    """Adapter of this expert, set by ``AdaptedExperts``, which owns the parameters."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: PolicyTransformerConfig,
        tp_group: Any,
        **unused: Any,
    ) -> None:
        """Allocate the layer, uninitialized, with the interface of Megatron's linear layers.

        Args:
            input_size: columns of the weight.
            output_size: rows of the weight.
            config: configuration of the model.
            tp_group: group of the expert tensor-parallel ranks. It has one rank.
            unused: options of Megatron's layers for initialization and splitting.
        """
        super().__init__()
        self.config = config
        self.tp_group = tp_group
        dtype = config.params_dtype
        device = parameter_device(config)

        # An MXFP4 weight is not a parameter: it has no gradient and is not in checkpoints.
        if config.has_mxfp4_base:
            self.weight = Mxfp4Weight(output_size, input_size, device)
        else:
            weight = torch.empty(output_size, input_size, dtype=dtype, device=device)
            self.weight = torch.nn.Parameter(weight)
            set_distribution(self.weight, allreduce=not has_separate_reduction(config))
        self.bias = torch.nn.Parameter(torch.empty(output_size, dtype=dtype, device=device))
        set_distribution(self.bias, allreduce=not has_separate_reduction(config))

    @property
    def scale(self) -> float:
        """Scale of the update."""
        return 0.0 if self.adapter is None else self.adapter.adapters.scale

    @property
    def is_merged(self) -> bool:
        """True if products use merged weights."""
        return not self.config.has_unmerged_experts

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank], in the model's dtype; rank 0 without adapter."""
        if self.adapter is not None:
            return self.adapter.factors()
        # Rank 0 lets the merge dequantize an MXFP4 base without a special case.
        return self.bias.new_empty(0, self.weight.shape[1]), self.bias.new_empty(len(self.bias), 0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the product [rows, out] of x [rows, in], and the bias [out], in the dtype of x."""
        if self.is_merged:
            return self.multiply(x), self.bias

        a, b = self.factors()
        read_base = lambda: self.read_base()[None].to(x.dtype)  # noqa: E731
        return unmerged_product(x, a[None], b[None], read_base, [len(x)], self.scale), self.bias

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded tensors of bias and bf16 base."""
        return sharded_state(self, {}, prefix, sharded_offsets, metadata)


ADAPTED_EXPERT_LINEARS = MLPSubmodules(
    linear_fc1=AdaptedExpertLinear,
    linear_fc2=AdaptedExpertLinear,
)
"""Layers of an expert with a frozen base."""


def has_adapted_experts(config: PolicyTransformerConfig) -> bool:
    """Return True if experts have adapters or an MXFP4 base."""
    has_adapters = config.adapter is not None and "experts" in config.adapter.targets
    return has_adapters or config.has_mxfp4_base


def has_separate_reduction(config: PolicyTransformerConfig) -> bool:
    """Return True if Megatron reduces gradients of experts separately.

    It then reduces them over the ranks that hold the same experts instead of all data-parallel
    ranks.
    """
    # Tensor parallelism does not split experts, so more ranks hold an expert than another weight.
    return config.expert_model_parallel_size > 1 or config.tensor_model_parallel_size > 1


class AdaptedExperts(SequentialMLP):
    """All experts of this rank as separate modules, and their adapters."""

    adapters: torch.nn.ModuleDict
    """LowRank of all experts, by "gate_up" and "down". Empty if experts have no adapters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapters = torch.nn.ModuleDict()
        if "experts" not in adapter_settings(self.config).targets:
            return

        # This module owns the factors, so that they are two parameters instead of two per expert.
        for target in EXPERT_LINEARS:
            linears = self.linears(target)
            adapters = self._allocate(linears[0])
            self.adapters[target] = adapters
            for i, linear in enumerate(linears):
                linear.adapter = ExpertAdapter(adapters, i)

    def linears(self, target: str) -> list[AdaptedExpertLinear]:
        """Return the layer of every expert for ``target``, "gate_up" or "down"."""
        experts: list[Any] = list(self.local_experts)
        return [getattr(expert, EXPERT_LINEARS[target]) for expert in experts]

    def _allocate(self, linear: AdaptedExpertLinear) -> LowRank:
        """Allocate adapters for all experts, whose layers have the shape of ``linear``."""
        config = self.config
        settings = adapter_settings(config)
        # Initial values depend on the number of the expert in the layer, not on the rank.
        first_expert = self.ep_group.rank() * self.num_local_experts
        rows, columns = linear.weight.shape
        return LowRank(
            rows,
            columns,
            settings.rank_of_experts(config.architecture),
            settings.alpha,
            config.params_dtype,
            experts=range(first_expert, first_expert + self.num_local_experts),
            allreduce=not has_separate_reduction(config),
        )

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded tensors of the experts and their adapters."""
        # A factor is one global tensor [layers, experts, ...]. This rank has one part of it per
        # layer: its own experts. Any expert-parallel size can therefore load it.
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        # The axis of layers, if there is one, comes before the axis of experts.
        experts_axis = len(sharded_offsets)
        for target, adapters in self.adapters.items():
            key = f"{prefix}experts.{EXPERT_LINEARS[target]}.adapters.{target}"
            for name, factor in adapters.named_parameters():
                state[f"{prefix}adapters.{target}.{name}"] = ShardedTensor.from_rank_offsets(
                    f"{key}.{name}",
                    factor,
                    *sharded_offsets,
                    (experts_axis, self.ep_group.rank(), self.ep_group.size()),
                    # This group holds the same experts. Its first rank writes them.
                    replica_id=(0, 0, self.dp_group.rank()),
                    prepend_axis_num=experts_axis,
                )
        return state
