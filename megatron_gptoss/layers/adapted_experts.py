"""The experts of a layer with a frozen base and adapters, one after the other.

Every expert has a base and biases of its own, dense or in four bits. The adapters of all experts of
this rank lie in one pair of parameters for each of the two matrices.
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
from megatron_gptoss.layers.packed_weight import PackedWeight
from megatron_gptoss.transformer_config import PolicyTransformerConfig, mark, parameter_device


@dataclass(frozen=True)
class ExpertAdapter:
    """One expert's part of the adapters of all experts of a layer."""

    adapters: LowRank
    index: int
    """Of the expert on this rank."""

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank]."""
        a, b = self.adapters()
        return a[self.index], b[self.index]


class AdaptedExpertLinear(AdaptedLinear):
    """One matrix of one expert, dense or in four bits, with an adapter or none.

    Experts are spread over ranks whole, so there is nothing to communicate here.
    """

    adapter: ExpertAdapter | None = None
    """Set by ``AdaptedExperts``, whose parameters it consists of."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: PolicyTransformerConfig,
        tp_group: Any,
        **unused: Any,
    ) -> None:
        """Allocate the layer, uninitialised, with the interface of Megatron's linear layers.

        Args:
            input_size: columns of the weight.
            output_size: its rows.
            config: of the model.
            tp_group: the expert tensor-parallel ranks, one.
            unused: how Megatron's layers would be initialised and split.
        """
        super().__init__()
        self.config = config
        self.tp_group = tp_group
        dtype = config.params_dtype
        device = parameter_device(config)

        if config.base == "mxfp4":
            self.weight = PackedWeight(output_size, input_size, device)
        else:
            weight = torch.empty(output_size, input_size, dtype=dtype, device=device)
            self.weight = torch.nn.Parameter(weight)
            mark(self.weight, allreduce=not is_spread(config))
        self.bias = torch.nn.Parameter(torch.empty(output_size, dtype=dtype, device=device))
        mark(self.bias, allreduce=not is_spread(config))

    @property
    def scale(self) -> float:
        """Of the update."""
        return 0.0 if self.adapter is None else self.adapter.adapters.scale

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A and B; without an adapter, those of an update of rank 0."""
        if self.adapter is not None:
            return self.adapter.factors()
        return self.bias.new_empty(0, self.weight.shape[1]), self.bias.new_empty(len(self.bias), 0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the product [rows, out], and the bias for the caller to add."""
        return self.multiply(x), self.bias

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe the bias, and a dense base, for checkpoints."""
        return sharded_state(self, {}, prefix, sharded_offsets, metadata)


ADAPTED_EXPERT_LINEARS = MLPSubmodules(
    linear_fc1=AdaptedExpertLinear,
    linear_fc2=AdaptedExpertLinear,
)
"""The two matrices of an expert whose base is frozen."""


def has_adapted_experts(config: PolicyTransformerConfig) -> bool:
    """Return whether experts have adapters, or a base in four bits."""
    has_adapters = config.adapter is not None and "experts" in config.adapter.targets
    return has_adapters or config.base == "mxfp4"


def is_spread(config: PolicyTransformerConfig) -> bool:
    """Return whether Megatron reduces gradients of experts over the ranks that hold these experts,
    and not over all data-parallel ranks."""
    return config.expert_model_parallel_size > 1 or config.tensor_model_parallel_size > 1


class AdaptedExperts(SequentialMLP):
    """All experts of this rank, each a module with weights and bias of its own, and their
    adapters."""

    adapters: torch.nn.ModuleDict
    """LowRank of all experts, by "gate_up" and "down"; empty if experts have no adapters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapters = torch.nn.ModuleDict()
        if "experts" not in adapter_settings(self.config).targets:
            return

        for target in EXPERT_LINEARS:
            linears = self.linears(target)
            adapters = self._allocate(linears[0])
            self.adapters[target] = adapters
            for i, linear in enumerate(linears):
                linear.adapter = ExpertAdapter(adapters, i)

    def linears(self, target: str) -> list[AdaptedExpertLinear]:
        """Return one of the two matrices, "gate_up" or "down", of every expert."""
        experts: list[Any] = list(self.local_experts)
        return [getattr(expert, EXPERT_LINEARS[target]) for expert in experts]

    def _allocate(self, linear: AdaptedExpertLinear) -> LowRank:
        """Allocate the adapters of all experts' matrices that are like ``linear``."""
        config = self.config
        settings = adapter_settings(config)
        first_expert = self.ep_group.rank() * self.num_local_experts
        rows, columns = linear.weight.shape
        return LowRank(
            rows,
            columns,
            settings.rank_of_experts(config.architecture),
            settings.alpha,
            config.params_dtype,
            experts=range(first_expert, first_expert + self.num_local_experts),
            allreduce=not is_spread(config),
        )

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe the experts for checkpoints.

        An adapter's factor is one tensor [layers, experts, ...] of which this rank has one piece
        per layer: all its experts. So any expert parallelism loads what another one saved.
        """
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        experts_axis = len(sharded_offsets)
        for target, adapters in self.adapters.items():
            key = f"{prefix}experts.{EXPERT_LINEARS[target]}.adapters.{target}"
            for name, factor in adapters.named_parameters():
                state[f"{prefix}adapters.{target}.{name}"] = ShardedTensor.from_rank_offsets(
                    f"{key}.{name}",
                    factor,
                    *sharded_offsets,
                    (experts_axis, self.ep_group.rank(), self.ep_group.size()),
                    replica_id=(0, 0, self.dp_group.rank()),
                    prepend_axis_num=experts_axis,
                )
        return state
