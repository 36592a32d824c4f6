"""Differentiable op around the forward and backward pass of a backend."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

SavedTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Tensors that a backward pass needs: q, k, v, sinks, O and LSE."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""Gradients of q, k, v and the sinks, each with the shape and dtype of its tensor."""


class AttentionPasses(NamedTuple):
    """Forward and backward pass of a backend, with packing, window and scale bound."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(q, k, v, sinks) -> O [tokens, heads, head_size], LSE [tokens, heads]."""
    backward: Callable[[SavedTensors, Tensor], Gradients]
    """(saved tensors, dO) -> gradients of q, k, v and the sinks."""


class SinkAttentionFunction(Function):
    """Attention with sinks, differentiable in q, k, v and the sinks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, passes: AttentionPasses
    ) -> tuple[Tensor, Tensor]:
        """Compute O and LSE with a backend.

        Args:
            ctx: context of autograd.
            q: [tokens, heads, head_size].
            k: [tokens, kv_heads, head_size].
            v: [tokens, kv_heads, head_size].
            sinks: [heads].
            passes: the passes of the backend.

        Returns:
            O [tokens, heads, head_size] of the dtype of q, and LSE [tokens, heads], which is not
            differentiable.
        """
        o, lse = passes.forward(q, k, v, sinks)
        # An attribute, because only tensors can be saved. The pass holds the packing, and no tensor
        # of the graph.
        ctx.backward_pass = passes.backward
        # With LSE, a backend computes the probabilities again, tile by tile, so they are never in
        # memory as a whole. With O, it gets delta without another pass over the keys.
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    # The kernels have no second derivative. Without the decorator, autograd would treat these
    # gradients as constants and return a wrong second derivative instead of an error.
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of q, k, v and the sinks, each with its tensor's dtype.

        ``grad_o`` is dO [tokens, heads, head_size], of the dtype of O.
        """
        # Autograd may pass an expanded gradient, for example from a sum. Kernels need it in memory.
        gradients = ctx.backward_pass(ctx.saved_tensors, grad_o.contiguous())
        return (*gradients, None)
