"""Parameters, names and initial values of low-rank adapters, in any parallel layout."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_gptoss.named_random import named_generator
from megatron_gptoss.transformer_config import set_distribution

EXPERT_LINEARS = {"gate_up": "linear_fc1", "down": "linear_fc2"}
"""Megatron's name of each expert matrix, by adapter name."""

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERTS_ADAPTER = re.compile(r"\.experts\.adapters\.(\w+)$")


class LowRank(torch.nn.Module):
    """Factors of a low-rank update s (B A) with A [rank, in] and B [out, rank].

    A layer's expert adapters are one object with two parameters, because the cost of
    accumulating gradients and planning checkpoints grows with the number of parameters.

    Tensor parallelism splits a weight along its rows or columns, and with it B or A. The other
    factor is the same on all ranks, but each rank computes only a part of its gradient: from its
    rows or columns, or with sequence parallelism from its tokens.
    """

    a: torch.nn.Parameter
    """A [rank, in / ranks that split columns]; for experts [experts, rank, in]."""
    b: torch.nn.Parameter
    """B [out / ranks that split rows, rank]; for experts [experts, out, rank]."""

    def __init__(
        self,
        out_features: int,
        in_features: int,
        rank: int,
        alpha: float,
        dtype: torch.dtype,
        *,
        split: int | None = None,
        tensor_parallel_size: int = 1,
        experts: range | None = None,
        **attributes: Any,
    ) -> None:
        """Allocate both factors, uninitialized.

        Args:
            out_features: rows of the whole weight.
            in_features: columns of the whole weight.
            rank: rank of the update.
            alpha: numerator of the scale, which is alpha / rank.
            dtype: data type of both factors.
            split: dimension of the weight that tensor-parallel ranks split; None if each rank has
                the whole weight.
            tensor_parallel_size: number of these ranks.
            experts: numbers of this rank's experts in the layer; None outside of experts.
            attributes: attributes of both parameters, see ``set_distribution``.
        """
        super().__init__()
        self.rank = rank
        self.alpha = alpha
        self.use_rank(rank)
        self.split = split
        self.experts = experts
        self.full_shape = torch.Size((out_features, in_features))

        rows = out_features
        columns = in_features
        if split == 0:
            rows //= tensor_parallel_size
        elif split == 1:
            columns //= tensor_parallel_size
        stack = () if experts is None else (len(experts),)
        self.a = torch.nn.Parameter(torch.empty(*stack, rank, columns, dtype=dtype))
        self.b = torch.nn.Parameter(torch.empty(*stack, rows, rank, dtype=dtype))

        set_distribution(self.a, **attributes)
        set_distribution(self.b, **attributes)
        if tensor_parallel_size > 1:
            self._mark_as_split()

    def _mark_as_split(self) -> None:
        """Mark the split factor, and the factors whose gradient Megatron must sum over ranks."""
        if self.split == 0:
            split_factors, whole_factors = [self.b], [self.a]
        elif self.split == 1:
            split_factors, whole_factors = [self.a], [self.b]
        else:
            split_factors, whole_factors = [], [self.a, self.b]

        for parameter in split_factors:
            set_distribution(
                parameter, tensor_model_parallel=True, partition_dim=self.split, partition_stride=1
            )
        # Megatron sums the gradients of parameters with this mark over tensor-parallel ranks.
        # Layouts with tensor parallelism always have sequence parallelism.
        for parameter in whole_factors:
            set_distribution(parameter, sequence_parallel=True)

    def use_rank(self, rank: int) -> None:
        """Set the scale for an adapter of a lower rank, whose factors are 0 beyond it."""
        self.used_rank = rank
        self.scale = self.alpha / rank

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank], or with a first dimension of experts.

        Both have the dtype of the constructor.

        Read the factors through this call: Megatron's distributed optimizer gathers a module's
        parameters when the module is called.
        """
        return self.a, self.b

    @property
    def tensor_parallel_dims(self) -> dict[str, int]:
        """Dimension along which each factor is split, for sharded state dicts."""
        names = {0: "b", 1: "a"}
        return {} if self.split is None else {names[self.split]: self.split}

    @torch.no_grad()
    def initialize(self, seed: int, name: str) -> None:
        """Draw A from U(-1/sqrt(in), 1/sqrt(in)), as PEFT does, and set B to 0.

        The values depend on seed and name only, and not on the layout.

        Args:
            seed: seed of the run.
            name: name of this adapter in the whole model.
        """
        self.b.zero_()
        if self.experts is not None:
            # Drawn by the expert's number in the layer, so that expert parallelism changes no
            # value.
            for a, expert in zip(self.a, self.experts, strict=True):
                a.copy_(self._random_a(seed, expert_name(name, expert)))
            return

        # Every rank draws the whole A and keeps its part, so that no layout changes the values.
        full_a = self._random_a(seed, name)
        if self.split == 1:
            group = parallel_state.get_tensor_model_parallel_group()
            full_a = full_a.chunk(group.size(), dim=1)[group.rank()]
        self.a.copy_(full_a)

    def _random_a(self, seed: int, name: str) -> Tensor:
        """Return the whole A [rank, in] of the adapter ``name``."""
        in_features = self.full_shape[1]
        uniform = torch.rand(self.rank, in_features, generator=named_generator(seed, name))
        return (2 * uniform - 1) / math.sqrt(in_features)


def initialize_adapters(model: torch.nn.Module, seed: int) -> None:
    """Set all adapters of ``model`` to their initial values. The model then equals its base.

    The values do not depend on the layout. Not collective.

    Args:
        model: model of this rank.
        seed: seed of the run.
    """
    for name, adapter in named_adapters(model):
        adapter.initialize(seed, name)


def named_adapters(model: torch.nn.Module) -> Iterator[tuple[str, LowRank]]:
    """Yield the adapters of this rank with their names in the whole model.

    Layer numbers count all ranks: ``decoder.layers.3.self_attention.linear_qkv.adapters.q``. All
    experts of a layer have one adapter: ``decoder.layers.3.mlp.experts.adapters.gate_up``.
    """
    chunks: list[Any] = list(model) if isinstance(model, torch.nn.ModuleList) else [model]
    for chunk in chunks:
        # Megatron counts layers from 1.
        first_layer = chunk.decoder.layers[0].layer_number - 1
        for name, module in chunk.named_modules():
            if isinstance(module, LowRank):
                yield _global_layer(name, first_layer), module


def _global_layer(name: str, first_layer: int) -> str:
    """Replace the layer number within the chunk by the number in the model."""
    return _LAYER.sub(lambda match: str(int(match[0]) + first_layer), name)


def expert_name(name: str, expert: int) -> str:
    """Return the name of one expert's part of a layer's expert adapter.

    It names the matrix of the expert: ``decoder.layers.3.mlp.experts.local_experts.17.linear_fc1.
    adapters.gate_up``. Initial values depend on it.

    Args:
        name: name of the adapter in the whole model.
        expert: number of the expert in the layer.
    """

    def insert_expert(match: re.Match[str]) -> str:
        kind = match[1]
        return f".experts.local_experts.{expert}.{EXPERT_LINEARS[kind]}.adapters.{kind}"

    return _EXPERTS_ADAPTER.sub(insert_expert, name)


def freeze_base(model: torch.nn.Module) -> None:
    """Freeze all parameters except adapters.

    Call it before building the trainer, because Megatron's gradient buffers contain only parameters
    that require gradients.
    """
    # A set, because tied layers share a parameter.
    trained: set[torch.nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, LowRank):
            trained.update(module.parameters())

    for parameter in model.parameters():
        parameter.requires_grad = parameter in trained


def copy_factors(model: torch.nn.Module) -> list[Tensor]:
    """Copy the factors of this rank's adapters to the host.

    Returns:
        A and B of each adapter in order, with the shapes of ``LowRank``: [rank, in], [out, rank].
        They keep their dtype.
    """
    return [factor.detach().to("cpu", copy=True) for factor in _factors(model)]


@contextmanager
def replaced_factors(model: torch.nn.Module, factors: Sequence[Tensor]) -> Iterator[None]:
    """Make ``model`` compute with other factors in the block, and restore its own afterwards.

    Args:
        model: model with adapters.
        factors: earlier result of ``copy_factors`` for this model: A [rank, in] and B [out, rank]
            of each adapter, of any float dtype.
    """
    # Copy instead of swapping tensors: Megatron's buffers own the memory of the parameters.
    original = copy_factors(model)
    _set_factors(model, factors)
    try:
        yield
    finally:
        _set_factors(model, original)


@torch.no_grad()
def _set_factors(model: torch.nn.Module, factors: Sequence[Tensor]) -> None:
    """Copy ``factors`` into the adapters of ``model``."""
    for parameter, factor in zip(_factors(model), factors, strict=True):
        parameter.copy_(factor)


def _factors(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return A and B of each adapter in ``model``, in the order of modules."""
    adapters = [module for module in model.modules() if isinstance(module, LowRank)]
    return [factor for adapter in adapters for factor in (adapter.a, adapter.b)]


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Disable all adapters of ``model`` in the block, by a scale of 0."""
    # W + 0 (B A) equals W bit for bit (``merge``). Therefore a reference policy needs no second
    # model.
    adapters = [module for module in model.modules() if isinstance(module, LowRank)]
    scales = [adapter.scale for adapter in adapters]
    for adapter in adapters:
        adapter.scale = 0.0
    try:
        yield
    finally:
        for adapter, scale in zip(adapters, scales, strict=True):
            adapter.scale = scale
