"""Low-rank adapters: their parameters, names and initial values, in any parallel layout."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_gptoss.named_random import named_generator
from megatron_gptoss.transformer_config import mark

EXPERT_LINEARS = {"gate_up": "linear_fc1", "down": "linear_fc2"}
"""Megatron's names of an expert's two matrices, by the names of their adapters."""

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERTS_ADAPTER = re.compile(r"\.experts\.adapters\.(\w+)$")


class LowRank(torch.nn.Module):
    """The factors of one update, s (B A) with A [rank, in] and B [out, rank].

    Of experts, those of all updates of one matrix together: two parameters for a layer and not for
    each of its experts. Gradients are added, and checkpoints planned, parameter by parameter.

    Tensor parallelism splits a weight along its rows or its columns, and with it B or A. The other
    factor is the same on all ranks, but the gradient that a rank computes for it is a share: that of
    its rows or columns, or under sequence parallelism of its tokens.
    """

    a: torch.nn.Parameter
    """[rank, in / ranks that split columns], of experts [experts, rank, in]."""
    b: torch.nn.Parameter
    """[out / ranks that split rows, rank], of experts [experts, out, rank]."""

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
        """Allocate both factors, uninitialised.

        Args:
            out_features: rows of the weight, all ranks together.
            in_features: its columns, all ranks together.
            rank: of the update.
            alpha: the scale is alpha / rank.
            dtype: of both.
            split: dimension of the weight that tensor-parallel ranks split; None if each has all.
            tensor_parallel_size: so many ranks.
            experts: the experts of this rank, by their numbers in the layer; None if the weight is
                not of experts.
            attributes: marks of both parameters, see ``mark``.
        """
        super().__init__()
        self.rank = rank
        self.scale = alpha / rank
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

        mark(self.a, **attributes)
        mark(self.b, **attributes)
        if tensor_parallel_size > 1:
            self._mark_as_split()

    def _mark_as_split(self) -> None:
        """Tell Megatron which factor is split, and whose gradient it must sum over the ranks."""
        if self.split == 0:
            split_factors, whole_factors = [self.b], [self.a]
        elif self.split == 1:
            split_factors, whole_factors = [self.a], [self.b]
        else:
            split_factors, whole_factors = [], [self.a, self.b]

        for parameter in split_factors:
            mark(
                parameter, tensor_model_parallel=True, partition_dim=self.split, partition_stride=1
            )
        # Megatron's name for it, whatever the reason why gradients are shares. Layouts with tensor
        # parallelism always have sequence parallelism.
        for parameter in whole_factors:
            mark(parameter, sequence_parallel=True)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return A and B.

        Reading them goes through a call, because Megatron's distributed optimizer gathers a
        module's parameters when the module is called.
        """
        return self.a, self.b

    @property
    def tensor_parallel_dims(self) -> dict[str, int]:
        """The dimension along which each factor is split, as sharded state dicts want it."""
        names = {0: "b", 1: "a"}
        return {} if self.split is None else {names[self.split]: self.split}

    @torch.no_grad()
    def initialize(self, seed: int, name: str) -> None:
        """Draw A from U(-1/sqrt(in), 1/sqrt(in)), as PEFT does, and set B to 0.

        Args:
            seed: of the run.
            name: of this adapter in the whole model. Seed and name decide, not the layout.
        """
        self.b.zero_()
        if self.experts is not None:
            for a, expert in zip(self.a, self.experts, strict=True):
                a.copy_(self._draw_a(seed, expert_name(name, expert)))
            return

        full_a = self._draw_a(seed, name)
        if self.split == 1:
            group = parallel_state.get_tensor_model_parallel_group()
            full_a = full_a.chunk(group.size(), dim=1)[group.rank()]
        self.a.copy_(full_a)

    def _draw_a(self, seed: int, name: str) -> Tensor:
        """Draw A [rank, in] of the adapter ``name``, all ranks together."""
        in_features = self.full_shape[1]
        uniform = torch.rand(self.rank, in_features, generator=named_generator(seed, name))
        return (2 * uniform - 1) / math.sqrt(in_features)


def initialize_adapters(model: torch.nn.Module, seed: int) -> None:
    """Give all adapters of ``model`` their initial values: the model then equals its base.

    Depends on the seed and not on the layout. Not collective.
    """
    for name, adapter in named_adapters(model):
        adapter.initialize(seed, name)


def named_adapters(model: torch.nn.Module) -> Iterator[tuple[str, LowRank]]:
    """Yield this rank's adapters with their names in the whole model.

    Layers are numbered over all ranks: ``decoder.layers.3.self_attention.linear_qkv.adapters.q``.
    Those of a layer's experts are one: ``decoder.layers.3.mlp.experts.adapters.gate_up``.
    """
    chunks: list[Any] = list(model) if isinstance(model, torch.nn.ModuleList) else [model]
    for chunk in chunks:
        # Megatron counts layers from 1.
        first_layer = chunk.decoder.layers[0].layer_number - 1
        for name, module in chunk.named_modules():
            if isinstance(module, LowRank):
                yield _global_layer(name, first_layer), module


def _global_layer(name: str, first_layer: int) -> str:
    """Replace the number of a layer in this chunk by its number in the model."""
    return _LAYER.sub(lambda match: str(int(match[0]) + first_layer), name)


def expert_name(name: str, expert: int) -> str:
    """Return the name of one expert's part of the adapter ``name`` of all experts of a layer.

    It is that of the expert's matrix: ``decoder.layers.3.mlp.experts.local_experts.17.linear_fc1.
    adapters.gate_up``. Initial values follow from it.
    """

    def insert_expert(match: re.Match[str]) -> str:
        kind = match[1]
        return f".experts.local_experts.{expert}.{EXPERT_LINEARS[kind]}.adapters.{kind}"

    return _EXPERTS_ADAPTER.sub(insert_expert, name)


def freeze_base(model: torch.nn.Module) -> None:
    """Exclude everything but adapters from training.

    Must run before the trainer is built: Megatron's gradient buffers hold what is trained.
    """
    trained: set[torch.nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, LowRank):
            trained.update(module.parameters())

    for parameter in model.parameters():
        parameter.requires_grad = parameter in trained


def copy_factors(model: torch.nn.Module) -> list[Tensor]:
    """Copy all factors of this rank's adapters to host memory, for ``replaced_factors``."""
    return [factor.detach().to("cpu", copy=True) for factor in _factors(model)]


@contextmanager
def replaced_factors(model: torch.nn.Module, factors: Sequence[Tensor]) -> Iterator[None]:
    """Let ``model`` compute with other factors, and then again with its own, bit for bit.

    ``factors``: what ``copy_factors`` returned for this model at another time.
    """
    own = copy_factors(model)
    _set_factors(model, factors)
    try:
        yield
    finally:
        _set_factors(model, own)


@torch.no_grad()
def _set_factors(model: torch.nn.Module, factors: Sequence[Tensor]) -> None:
    for parameter, factor in zip(_factors(model), factors, strict=True):
        parameter.copy_(factor)


def _factors(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    adapters = [module for module in model.modules() if isinstance(module, LowRank)]
    return [factor for adapter in adapters for factor in (adapter.a, adapter.b)]


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Let ``model`` compute what its base computes: in the block all adapters have scale 0.

    W + 0 (B A) is W, bit for bit (``merge``), so a reference policy needs no model of its own.
    """
    adapters = [module for module in model.modules() if isinstance(module, LowRank)]
    scales = [adapter.scale for adapter in adapters]
    for adapter in adapters:
        adapter.scale = 0.0
    try:
        yield
    finally:
        for adapter, scale in zip(adapters, scales, strict=True):
            adapter.scale = scale
