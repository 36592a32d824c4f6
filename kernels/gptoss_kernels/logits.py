"""Logits in fp32: the product of hidden states and output layer, without rounding to bf16.

The trainer and the embedded engine both use it. In bf16 a logit between 16 and 32 has a rounding
error of up to 0.06. If only one side rounds, this error is the larger part of the mismatch between
trainer and engine.
"""

import torch
from torch import Tensor

CPU_CHUNK = 1 << 19
"""Weight elements that a CPU converts to fp32 at a time: 2 MB, which fit into its cache."""


def fp32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute ``hidden @ weight.T``, accumulated and returned in fp32.

    Inputs in fp64 give fp64. Not differentiable in bf16.

    Args:
        hidden: [tokens, hidden_size], any floating dtype.
        weight: [vocab_size, hidden_size] with the dtype of ``hidden``.

    Returns:
        [tokens, vocab_size] fp32, or fp64 for fp64 inputs.

    Example:
        >>> hidden, weight = torch.randn(3, 8), torch.randn(100, 8)
        >>> logits = fp32_logits(hidden.bfloat16(), weight.bfloat16())
        >>> logits.shape, logits.dtype
        (torch.Size([3, 100]), torch.float32)
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.dtype == dtype:
        return hidden @ weight.t()
    # Tensor cores read bf16 and accumulate in fp32. out_dtype returns the accumulator unrounded.
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=dtype)

    # torch.mm has no out_dtype on CPUs, so convert the weight to fp32. A whole vocabulary does not
    # fit into the cache: converting all of it at once takes 10x the time of the product.
    hidden = hidden.to(dtype)
    logits = hidden.new_empty(len(hidden), len(weight))
    step = max(1, CPU_CHUNK // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        torch.mm(hidden, weight[rows].to(dtype).t(), out=logits[:, rows])
    return logits
