"""The differentiable op around a backend's forward and backward pass."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

SavedTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""What a forward pass leaves to its backward pass: q, k, v, sinks, O and LSE."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of q, k, v and the sinks, each like its tensor."""


class AttentionPasses(NamedTuple):
    """A backend's two passes with everything but the tensors bound: packing, window and scale."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(q, k, v, sinks) -> O [tokens, heads, head_size], LSE [tokens, heads]"""
    backward: Callable[[SavedTensors, Tensor], Gradients]
    """(saved tensors, dO) -> gradients"""


class SinkAttention(Function):
    """Computes O [tokens, heads, head_size] and LSE [tokens, heads] with a backend's ``passes``.

    O is differentiable in q, k, v and the sinks; LSE is not differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, passes: AttentionPasses
    ) -> tuple[Tensor, Tensor]:
        o, lse = passes.forward(q, k, v, sinks)
        ctx.backward_pass = passes.backward
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.backward_pass(ctx.saved_tensors, grad_o.contiguous())
        return (*gradients, None)
