"""Experts with a frozen base and adapters, all experts of a rank in one grouped product.

The merged or dequantized weights of all experts are computed in memory that all layers share, and computed again for
the backward pass. A layer keeps only its base, in bf16 or MXFP4, and its adapters.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_gptoss.layers.adapted_experts import AdaptedExpertLinear, AdaptedExperts
from megatron_gptoss.layers.adapters import LowRank
from megatron_gptoss.layers.grouped_gemm import (
    multiply_by_transposed_weights,
    multiply_by_weights,
    outer_products,
    project,
)
from megatron_gptoss.layers.merge import merge, merge_mxfp4
from megatron_gptoss.layers.mxfp4_weight import Mxfp4Weight
from megatron_gptoss.layers.scratch_memory import BufferLease, scratch_memory
from megatron_gptoss.layers.stacked_experts import StackedExperts
from megatron_gptoss.layers.unmerged import unmerged_product


class AdaptedGroupedExperts(AdaptedExperts, StackedExperts):
    """All experts of this rank, computed in grouped GEMMs.

    Modules and parameters are those of AdaptedExperts. Checkpoints and converters therefore have
    one set of names.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate_up = self._stack("gate_up")
        self.down = self._stack("down")

    def _stack(self, target: str) -> "AdaptedExpertStack":
        """Return the stack of one matrix, "gate_up" or "down"."""
        adapters: dict[str, Any] = dict(self.adapters.items())
        return AdaptedExpertStack(target, self.linears(target), adapters.get(target))


class AdaptedExpertStack:
    """One of a layer's two expert matrices, for all experts, with their adapters.

    The modules of the experts own the parameters. This class places their bases and biases in
    contiguous memory, so that they can be read as one tensor.
    """

    def __init__(
        self, target: str, linears: Sequence[AdaptedExpertLinear], adapters: LowRank | None
    ) -> None:
        """Place the bases and biases of ``linears`` in contiguous memory.

        Args:
            target: "gate_up" or "down". Stacks of a target share the memory of merged weights.
            linears: this rank's expert layers.
            adapters: adapters of all these experts; None if there are none.
        """
        self.target = target
        self.linears = linears
        self.adapters = adapters
        # Done here instead of in the first pass: a layer's bases exist twice for a moment, and the
        # GPU has memory for that before there are activations.
        for tensors in self._tensors():
            _arrange(tensors)

    def multiply(self, x: Tensor, row_counts: Sequence[int], with_bias: bool = False) -> Tensor:
        """Compute x W'^T, with the adapted weight W' of each row's expert.

        Differentiable in x and the adapters, see ``merged_linear`` and ``unmerged_product``.

        Args:
            x: [rows, in] in the model's dtype, sorted by expert.
            row_counts: rows per expert.
            with_bias: whether to add the biases, which have no gradient.

        Returns:
            [rows, out] in the dtype of x.
        """
        a, b = self.factors()
        if not self.is_merged:
            biases = self.biases() if with_bias else None
            read_base = self._base_reader(a, b)
            return unmerged_product(x, a, b, read_base, row_counts, self.scale, biases)

        # A and B are arguments of the function, because autograd tracks only tensors among them.
        product: Tensor = _MergedGroupedLinear.apply(x, a, b, self, row_counts, with_bias)
        return product

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [experts, rank, in] and B [experts, out, rank], in the model's dtype.

        The rank is 0 without adapters.
        """
        if self.adapters is not None:
            factors: tuple[Tensor, Tensor] = self.adapters()
            return factors

        experts = len(self.linears)
        rows, columns = self.linears[0].weight.shape
        bias = self.linears[0].bias
        return bias.new_empty(experts, 0, columns), bias.new_empty(experts, rows, 0)

    def biases(self) -> Tensor:
        """Return all biases, [experts, out] in the model's dtype, without a copy."""
        return self._stack_tensors([linear.bias for linear in self.linears])

    @property
    def scale(self) -> float:
        """Scale of the updates."""
        return self.linears[0].scale

    @property
    def is_merged(self) -> bool:
        """True if products use merged weights."""
        return self.linears[0].is_merged

    def merge_weights(self, a: Tensor, b: Tensor, scale: float) -> BufferLease:
        """Merge the base with updates in scratch memory.

        Args:
            a: [experts, rank, in] in the model's dtype.
            b: [experts, out, rank] in the model's dtype.
            scale: scale of the updates.

        Returns:
            Merged weights [experts, out, in], valid until another layer is merged.
        """
        # The two matrices of a layer use separate memory. After recomputation of a layer, its
        # backward pass finds both.
        memory = scratch_memory(f"merged {self.target}", a.device, a.dtype)
        lease = memory.lease(torch.Size((len(a), b.shape[1], a.shape[2])))
        if isinstance(self.linears[0].weight, Mxfp4Weight):
            _, blocks, scales = (self._stack_tensors(tensors) for tensors in self._tensors())
            merge_mxfp4(blocks, scales, a, b, scale, out=lease.tensor)
        else:
            _, weights = (self._stack_tensors(tensors) for tensors in self._tensors())
            merge(weights, a, b, scale, out=lease.tensor)
        return lease

    def _base_reader(self, a: Tensor, b: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns the base [experts, out, in] in the dtype of the factors.

        Args:
            a: [experts, rank, in], whose values are not used.
            b: [experts, out, rank], whose values are not used.
        """
        # A merge of rank 0 is the base.
        empty = (a.detach()[:, :0], b.detach()[:, :, :0], 0.0)
        lease: BufferLease | None = None

        def read_base() -> Tensor:
            nonlocal lease
            weights = None if lease is None else lease.read()
            if weights is None:
                lease = self.merge_weights(*empty)
                weights = lease.tensor
            return weights

        return read_base

    def _tensors(self) -> list[list[Tensor]]:
        """Return the lists of tensors to stack: biases, and bf16 weights or blocks and scales."""
        tensors: list[list[Tensor]] = [[linear.bias for linear in self.linears]]
        weights: list[Any] = [linear.weight for linear in self.linears]
        if isinstance(weights[0], Mxfp4Weight):
            tensors.append([weight.blocks for weight in weights])
            tensors.append([weight.scales for weight in weights])
        else:
            tensors.append(weights)
        return tensors

    def _stack_tensors(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return contiguous tensors as one view [experts, ...]."""
        stack = _as_stack(tensors)
        if stack is None:
            # Moving the model to another device or dtype allocates every tensor separately.
            _arrange(tensors)
            stack = _as_stack(tensors)
            assert stack is not None
        return stack


def _arrange(tensors: Sequence[Tensor]) -> None:
    """Move tensors of one shape to contiguous memory."""
    if _as_stack(tensors) is not None:
        return
    # The parameters keep their names and become views of one tensor. Set ``data`` instead of
    # replacing the parameter objects, because other objects hold references to them.
    stack = torch.stack([tensor.detach() for tensor in tensors])
    for tensor, place in zip(tensors, stack, strict=True):
        tensor.data = place


def _as_stack(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return n tensors of one shape as a view [n, ...]; None if they are not contiguous."""
    first = tensors[0].detach()
    storage = first.untyped_storage().data_ptr()
    for i, tensor in enumerate(tensors):
        # Also compare storages: tensors can be adjacent by accident, and a view has one storage.
        is_next = tensor.data_ptr() == first.data_ptr() + i * first.nbytes
        if not is_next or tensor.untyped_storage().data_ptr() != storage:
            return None
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


class _MergedGroupedLinear(torch.autograd.Function):
    """Product of ``merged_linear`` for all experts in one call."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        stack: AdaptedExpertStack,
        row_counts: Sequence[int],
        with_bias: bool,
    ) -> Tensor:
        x = x.contiguous()
        scale = stack.scale
        merged = stack.merge_weights(a, b, scale)

        ctx.save_for_backward(x, a, b)
        ctx.stack = stack
        ctx.scale = scale
        ctx.row_counts = row_counts
        ctx.merged = merged
        biases = stack.biases() if with_bias else None
        return multiply_by_weights(x, merged.tensor, row_counts, biases)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, a, b = ctx.saved_tensors
        needs_x, needs_a, needs_b, *_ = ctx.needs_input_grad
        grad = grad.contiguous()
        grad_x = None
        grad_a = None
        grad_b = None

        # The lease still holds this layer's weights if no other layer was merged in between, which
        # is the case if the layer has just been recomputed.
        if needs_x:
            weights = ctx.merged.read()
            if weights is None:
                weights = ctx.stack.merge_weights(a, b, ctx.scale).tensor
            grad_x = multiply_by_transposed_weights(grad, weights, ctx.row_counts)
        if needs_a or needs_b:
            grad_a, grad_b = _factor_gradients(grad, x, a, b, ctx.row_counts)
            grad_a *= ctx.scale
            grad_b *= ctx.scale
        return grad_x, grad_a, grad_b, None, None, None


def _factor_gradients(
    grad: Tensor, x: Tensor, a: Tensor, b: Tensor, row_counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of A and B, not multiplied by the scale.

    Args:
        grad: [rows, out] gradient of the product.
        x: [rows, in].
        a: [experts, rank, in].
        b: [experts, out, rank].
        row_counts: rows per expert.

    Returns:
        [experts, rank, in] and [experts, out, rank].
    """
    rank = a.shape[1]
    # Grouped products on GPUs need rows whose bytes are a multiple of 16. Pad the rank with zeros and
    # remove them from the result.
    missing = -rank % 8
    if missing:
        a = torch.nn.functional.pad(a, (0, 0, 0, missing))
        b = torch.nn.functional.pad(b, (0, missing))

    # dA = (dY B)^T x and dB = dY^T (x A^T) per expert. The intermediate [rows, rank] is small; the
    # gradient [out, in] of W' never exists.
    grad_a = outer_products(project(grad, b, row_counts), x, row_counts)
    grad_b = outer_products(grad, project(x, a.mT, row_counts), row_counts)
    return grad_a[:, :rank], grad_b[:, :, :rank]
