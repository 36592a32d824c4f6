"""Runs Triton kernels with strided inputs in Triton's interpreter, on the CPU.

TRITON_INTERPRET=1 python -m tests.support.kernels.strided_inputs_interpreted

Compares with the torch versions of the kernels, and exits with a traceback if a result differs.
Needs a separate process, because Triton decides at a kernel's definition whether to interpret it.
"""

import builtins
import contextlib
from typing import Any

import torch

from gptoss_kernels import rotary, swiglu, vocabulary_softmax
from megatron_gptoss import logit_blocks
from megatron_gptoss.layers.rotary import apply_rotary

TOKENS, COLUMNS, FIRST, TEMPERATURE = 7, 90, 40, 0.7
LIMIT = 7.0


def interpreted_range(*bounds: Any) -> range:
    """Return a range of bounds that may be the interpreter's scalars.

    The interpreter converts arrays of one element to int, which numpy 2.5 rejects.
    """
    as_int = [int(b.handle.data.item()) if hasattr(b, "handle") else int(b) for b in bounds]
    return builtins.range(*as_int)


def strided(x: torch.Tensor) -> torch.Tensor:
    """Return a view with the values of x, whose first dimension has a larger stride."""
    wide = torch.full((x.shape[0], 3, *x.shape[1:]), -9, dtype=x.dtype)
    wide[:, 1] = x
    assert not wide[:, 1].is_contiguous()
    return wide[:, 1]


def check_vocabulary_softmax() -> None:
    # Most labels are in the block of columns.
    labels = torch.randint(FIRST - 10, FIRST + COLUMNS + 10, (TOKENS,))
    logits = torch.randn(TOKENS, COLUMNS)

    empty = torch.zeros(4, TOKENS)
    empty[0] = -torch.inf
    got, want = empty.clone(), empty.clone()
    vocabulary_softmax.accumulate_statistics(logits, strided(labels), got, FIRST, TEMPERATURE)
    logit_blocks.add_to_statistics(logits, labels, want, FIRST, TEMPERATURE)
    torch.testing.assert_close(got, want)

    row_statistics = torch.rand(4, TOKENS) + 4
    got_gradient, want_gradient = torch.empty_like(logits), torch.empty_like(logits)
    rest = (row_statistics, FIRST, TEMPERATURE)
    vocabulary_softmax.logit_gradient(logits, strided(labels), *rest, got_gradient)
    logit_blocks._logit_gradient(logits, labels, *rest, want_gradient)
    torch.testing.assert_close(got_gradient, want_gradient)


def check_swiglu() -> None:
    x, probs, grad = torch.randn(TOKENS, 32) * 6, torch.rand(TOKENS), torch.randn(TOKENS, 16)
    leaves = [strided(x).requires_grad_(), strided(probs).requires_grad_()]
    out = swiglu._ClampedSwiGLU.apply(*leaves, LIMIT)
    exact = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
    want = swiglu.clamped_swiglu(*exact, LIMIT)
    torch.testing.assert_close(out, want)
    got_gradients = torch.autograd.grad(out, leaves, strided(grad))
    torch.testing.assert_close(got_gradients, torch.autograd.grad(want, exact, grad))


def check_rotary() -> None:
    x, angles = torch.randn(TOKENS, 3, 16), torch.rand(TOKENS, 1, 8) * 100
    cos, sin = angles.cos(), angles.sin()
    got = rotary.rotate_heads(strided(x), strided(cos), strided(sin))
    torch.testing.assert_close(got, apply_rotary(x, cos, sin))


def main() -> None:
    torch.manual_seed(0)
    # The launchers select the GPU of a tensor, and there is none.
    no_device: Any = lambda device: contextlib.nullcontext()  # noqa: E731
    torch.cuda.device = no_device
    for module in (vocabulary_softmax, swiglu):
        vars(module)["range"] = interpreted_range

    check_vocabulary_softmax()
    check_swiglu()
    check_rotary()


if __name__ == "__main__":
    main()
