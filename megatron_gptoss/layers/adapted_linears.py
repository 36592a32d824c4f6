"""Linear layers with a frozen base and adapters: their base class, attention and router.

Each layer multiplies by the merged weight (``merge``). Communication is that of Megatron's layers.
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
from megatron_gptoss.layers.mxfp4_weight import Mxfp4Weight
from megatron_gptoss.layers.router import GptOssRouter
from megatron_gptoss.transformer_config import PolicyTransformerConfig

SEPARATE_NORM_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
"""Mapping of checkpoint keys for a separate norm before attention.

The values are the keys of Transformer Engine's projection, which contains the norm. One checkpoint
therefore works for both.
"""


class AdaptedLinear(torch.nn.Module):
    """Base class of linear layers with a frozen weight and adapters."""

    weight: torch.nn.Parameter | Mxfp4Weight
    """Base [out, in] on this rank."""
    adapters: torch.nn.ModuleDict
    """LowRank by target."""
    config: PolicyTransformerConfig
    """Configuration of the model."""

    @property
    def scale(self) -> float:
        """Scale of the update, the same for all adapters of a layer."""
        adapters: list[Any] = list(self.adapters.values())
        return float(adapters[0].scale) if adapters else 0.0

    def read_base(self) -> Tensor:
        """Return the base [out, in], in its own dtype or bf16 if it is MXFP4.

        An MXFP4 base is in memory that the next read overwrites.
        """
        if isinstance(self.weight, Mxfp4Weight):
            return self.weight.read()
        return self.weight

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank] of the whole update, in the model's dtype."""
        raise NotImplementedError

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """Return the merged weight [out, in] in the model's dtype, as a new tensor."""
        dtype = self.config.params_dtype
        return merge_in_pieces(self.read_base(), *self.factors(), self.scale, dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """Return the product of x [..., in] and the merged weight, [..., out] in the dtype of x."""
        return merged_linear(x, self.read_base, *self.factors(), self.scale)

    def tensor_parallel_dims(self) -> dict[str, int]:
        """Return the dimension along which each factor of an adapter is split, by its name."""
        dims = {}
        adapters: dict[str, Any] = dict(self.adapters.items())
        for target, adapter in adapters.items():
            for name, dim in adapter.tensor_parallel_dims.items():
                dims[f"adapters.{target}.{name}"] = dim
        return dims


class AdaptedQkv(AdaptedLinear, ColumnParallelLinear):
    """Fused projection to queries, keys and values, with separate adapters for the three.

    The rows of the weight are ordered by key/value group: query heads, key head, value head of the
    group. B of an adapter has only the rows of one projection, in the order of heads.
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
        # Tensor parallelism splits between key/value groups, so each rank has whole groups. Rows of
        # B are in the order of heads, and so are split at the same places.
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
        """Return the update of the fused weight, in the model's dtype.

        A is [sum of ranks, in], and B is [out, sum of ranks].
        """
        # Stack the A factors. B is 0 except for the columns of each row's adapter.
        factors = {target: adapter() for target, adapter in self.adapters.items()}
        a = torch.cat([a for a, _ in factors.values()])

        # [groups, rows per group, sum of ranks], concatenated from one block per projection.
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
        """Replace the product in Megatron's forward pass: input [tokens, ..., in]."""
        # Megatron's own product would gather the input itself.
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
        """Return the sharded tensors of base and adapters."""
        # Column-parallel layers split the rows of the weight, and with them the bias.
        dims = {"weight": 0, "bias": 0, **self.tensor_parallel_dims()}
        return sharded_state(self, dims, prefix, sharded_offsets, metadata)


class AdaptedProjection(AdaptedLinear, RowParallelLinear):
    """Output projection of attention, with an adapter."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: PolicyTransformerConfig,
        **options: Any,
    ) -> None:
        RowParallelLinear.__init__(self, input_size, output_size, config=config, **options)
        # A is split like the columns of the weight. Every rank has the whole B.
        adapter = low_rank(config, output_size, input_size, split=1)
        self.adapters = torch.nn.ModuleDict({"o": adapter})

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, in / tensor] and B [out, rank], in the model's dtype."""
        factors: tuple[Tensor, Tensor] = self.adapters["o"]()
        return factors

    def _forward_impl(self, input: Tensor, weight: Tensor, **unused: Any) -> Tensor:
        """Replace the product in Megatron's forward pass: input [tokens, ..., in / tensor]."""
        # The caller adds the bias after the sum over ranks, so that it counts once.
        return self.multiply(input)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded tensors of base and adapter."""
        # Row-parallel layers split the columns of the weight. Every rank has the whole bias.
        dims = {"weight": 1, **self.tensor_parallel_dims()}
        return sharded_state(self, dims, prefix, sharded_offsets, metadata)


class AdaptedRouter(AdaptedLinear, GptOssRouter):
    """Router with an adapter for its weight. The bias is frozen."""

    def __init__(self, config: PolicyTransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        # The router is not split, because every rank routes its own tokens.
        adapter = low_rank(config, config.architecture.num_experts, config.architecture.hidden_size)
        self.adapters = torch.nn.ModuleDict({"router": adapter})

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, hidden_size] and B [experts, rank], in the model's dtype."""
        factors: tuple[Tensor, Tensor] = self.adapters["router"]()
        return factors

    def gating_weight(self) -> Tensor:
        """Return the merged weight [experts, hidden_size], in the dtype of the base."""
        return merged_weight(self.read_base(), *self.factors(), self.scale)


def choose_projections(attention: SelfAttentionSubmodules, config: PolicyTransformerConfig) -> None:
    """Set the classes of attention's projections that have adapters.

    Args:
        attention: specification to change in place.
        config: configuration of the model.
    """
    # Projections without adapters keep their class, so that the norm stays fused on GPUs.
    targets = set(config.adapter.targets if config.adapter is not None else ())
    if has_adapted_qkv(config):
        attention.linear_qkv = AdaptedQkv
    if "o" in targets:
        attention.linear_proj = AdaptedProjection


def has_adapted_qkv(config: PolicyTransformerConfig) -> bool:
    """Return True if the fused projection to queries, keys and values has adapters."""
    return config.adapter is not None and bool({"q", "k", "v"} & set(config.adapter.targets))


def choose_router(config: PolicyTransformerConfig) -> type[GptOssRouter]:
    """Return the class of the router."""
    if config.adapter is not None and "router" in config.adapter.targets:
        return AdaptedRouter
    return GptOssRouter


def adapter_settings(config: PolicyTransformerConfig) -> AdapterConfig:
    """Return the adapter settings of a model that has adapters."""
    assert config.adapter is not None
    return config.adapter


def low_rank(
    config: PolicyTransformerConfig,
    output_size: int,
    input_size: int,
    split: int | None = None,
) -> LowRank:
    """Allocate the adapter of a weight outside of experts.

    Args:
        config: configuration of the model.
        output_size: rows of the whole weight.
        input_size: columns of the whole weight.
        split: dimension that tensor-parallel ranks split; None if each rank has the whole weight.
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
    """Return the sharded tensors of a layer.

    Args:
        module: the layer.
        dims: dimension along which tensor-parallel ranks split a tensor, by its name. Other tensors
            are the same on all ranks.
        prefix: prefix of the keys.
        sharded_offsets: position in global tensors, as (axis, index, size).
        metadata: options of ``sharding_metadata``.
    """
    # Megatron's helper marks the other ranks' copies as replicas, so that one rank writes each.
    state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        dims,
        sharded_offsets,
        tp_group=module.tp_group,
        dp_cp_group=(metadata or {})["dp_cp_group"],
    )
    return state
