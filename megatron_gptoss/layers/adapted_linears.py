"""Linear layers of a frozen base with adapters: attention and router, and what all have in common.

Each multiplies with the merged weight (``merge``); communication is that of Megatron's layers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_gptoss.config import AdapterConfig
from megatron_gptoss.layers.adapters import LowRank
from megatron_gptoss.layers.merge import merge_in_pieces, merged_linear, merged_weight
from megatron_gptoss.layers.packed_weight import PackedWeight
from megatron_gptoss.layers.router import GptOssRouter
from megatron_gptoss.transformer_config import PolicyTransformerConfig

SEPARATE_NORM_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
"""Checkpoint keys of the norm before attention where it is a module of its own: those of Transformer
Engine's projection, which includes it, so that one checkpoint serves both."""


class AdaptedLinear(torch.nn.Module):
    """What linear layers with a frozen weight and adapters have in common."""

    weight: torch.nn.Parameter | PackedWeight
    """The base, [out, in] on this rank."""
    adapters: torch.nn.ModuleDict
    """LowRank by target."""
    config: PolicyTransformerConfig

    @property
    def scale(self) -> float:
        """Of the update; all adapters of a layer share it."""
        adapters: list[Any] = list(self.adapters.values())
        return float(adapters[0].scale) if adapters else 0.0

    def read_base(self) -> Tensor:
        """Return the base; a packed one in memory that the next read overwrites."""
        if isinstance(self.weight, PackedWeight):
            return self.weight.read()
        return self.weight

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank] of the update of the whole weight."""
        raise NotImplementedError

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """Compute what the layer multiplies with, [out, in], as a new tensor."""
        dtype = self.config.params_dtype
        return merge_in_pieces(self.read_base(), *self.factors(), self.scale, dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """Compute the product of x [..., in] with the merged weight, [..., out]."""
        return merged_linear(x, self.read_base, *self.factors(), self.scale)

    def tensor_parallel_dims(self) -> dict[str, int]:
        """Return along which dimension each adapter's factors are split, by name in this layer."""
        dims = {}
        adapters: dict[str, Any] = dict(self.adapters.items())
        for target, adapter in adapters.items():
            for name, dim in adapter.tensor_parallel_dims.items():
                dims[f"adapters.{target}.{name}"] = dim
        return dims


class AdaptedQkv(AdaptedLinear, ColumnParallelLinear):
    """The fused projection to queries, keys and values; each has an adapter of its own.

    The weight's rows are ordered by key/value group: its query heads, its key head, its value head.
    An adapter's B has the rows of its own projection only, in the order of the heads.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: PolicyTransformerConfig,
        **options: Any,
    ) -> None:
        ColumnParallelLinear.__init__(self, input_size, output_size, config=config, **options)
        # Tensor parallelism cuts whole key/value groups, so that each rank has the heads that
        # belong together.
        settings = adapter_settings(config)
        ranks = config.tensor_model_parallel_size
        self.groups = config.architecture.num_key_value_heads // ranks
        sizes = {
            "q": config.architecture.query_size,
            "k": config.architecture.key_size,
            "v": config.architecture.key_size,
        }
        self.rows_per_group = {
            target: size // ranks // self.groups for target, size in sizes.items()
        }

        self.adapters = torch.nn.ModuleDict()
        for target, size in sizes.items():
            if target in settings.targets:
                self.adapters[target] = low_rank(config, size, input_size, split=0)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the adapters of this layer as one.

        The A's lie below one another; a row of B is zero but for the columns of its own adapter.
        """
        factors = {target: adapter() for target, adapter in self.adapters.items()}
        a = torch.cat([a for a, _ in factors.values()])

        # [groups, rows of a group, rank of all adapters], made of one block per projection.
        blocks = []
        first_column = 0
        for target, rows in self.rows_per_group.items():
            block = a.new_zeros(self.groups, rows, len(a))
            if target in factors:
                b = factors[target][1]
                last_column = first_column + b.shape[1]
                block[:, :, first_column:last_column] = b.view(self.groups, rows, -1)
                first_column = last_column
            blocks.append(block)
        return a, torch.cat(blocks, dim=1).flatten(0, 1)

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence_parallel: bool,
        tp_group: Any,
        **unused: Any,
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        output = self.multiply(input)
        return output if bias is None else output + bias

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe base and adapters for checkpoints."""
        dims = {"weight": 0, "bias": 0, **self.tensor_parallel_dims()}
        return sharded_state(self, dims, prefix, sharded_offsets, metadata)


class AdaptedProjection(AdaptedLinear, RowParallelLinear):
    """The projection of the heads' outputs back to the residual stream."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: PolicyTransformerConfig,
        **options: Any,
    ) -> None:
        RowParallelLinear.__init__(self, input_size, output_size, config=config, **options)
        adapter = low_rank(config, output_size, input_size, split=1)
        self.adapters = torch.nn.ModuleDict({"o": adapter})

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A and B of this rank."""
        factors: tuple[Tensor, Tensor] = self.adapters["o"]()
        return factors

    def _forward_impl(self, input: Tensor, weight: Tensor, **unused: Any) -> Tensor:
        # The bias is added behind the sum over ranks, by the caller.
        return self.multiply(input)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe base and adapter for checkpoints."""
        dims = {"weight": 1, **self.tensor_parallel_dims()}
        return sharded_state(self, dims, prefix, sharded_offsets, metadata)


class AdaptedRouter(AdaptedLinear, GptOssRouter):
    """The router with an adapter of its weight; the bias stays as it is."""

    def __init__(self, config: PolicyTransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        adapter = low_rank(config, config.architecture.num_experts, config.architecture.hidden_size)
        self.adapters = torch.nn.ModuleDict({"router": adapter})

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A and B."""
        factors: tuple[Tensor, Tensor] = self.adapters["router"]()
        return factors

    def gating_weight(self) -> Tensor:
        """Return the merged weight [experts, hidden_size]."""
        return merged_weight(self.read_base(), *self.factors(), self.scale)


def choose_projections(attention: SelfAttentionSubmodules, config: PolicyTransformerConfig) -> None:
    """Replace the projections of attention that have adapters, in place."""
    targets = set(config.adapter.targets if config.adapter is not None else ())
    if has_adapted_qkv(config):
        attention.linear_qkv = AdaptedQkv
    if "o" in targets:
        attention.linear_proj = AdaptedProjection


def has_adapted_qkv(config: PolicyTransformerConfig) -> bool:
    """Return whether the fused projection to queries, keys and values has adapters."""
    return config.adapter is not None and bool({"q", "k", "v"} & set(config.adapter.targets))


def choose_router(config: PolicyTransformerConfig) -> type[GptOssRouter]:
    """Return the class of the router."""
    if config.adapter is not None and "router" in config.adapter.targets:
        return AdaptedRouter
    return GptOssRouter


def adapter_settings(config: PolicyTransformerConfig) -> AdapterConfig:
    """Return the settings of the adapters that a model has."""
    assert config.adapter is not None
    return config.adapter


def low_rank(
    config: PolicyTransformerConfig,
    output_size: int,
    input_size: int,
    split: int | None = None,
) -> LowRank:
    """Allocate the adapter of a weight [output_size, input_size] that is not of an expert.

    split: the weight's dimension that tensor-parallel ranks split; None if each has all of it.
    """
    settings = adapter_settings(config)
    return LowRank(
        output_size,
        input_size,
        settings.rank,
        settings.alpha,
        config.params_dtype,
        split=split,
        tensor_parallel_size=config.tensor_model_parallel_size,
    )


def sharded_state(
    module: torch.nn.Module,
    dims: Mapping[str, int],
    prefix: str,
    sharded_offsets: tuple[tuple[int, int, int], ...],
    metadata: dict[str, Any] | None,
) -> dict[str, Any]:
    """Describe all tensors of a layer, of which tensor-parallel ranks split those in ``dims``."""
    state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        dims,
        sharded_offsets,
        tp_group=module.tp_group,
        dp_cp_group=(metadata or {})["dp_cp_group"],
    )
    return state
