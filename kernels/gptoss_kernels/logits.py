"""Logits in fp32: the product of hidden states and the output layer without rounding its result.

Trainer and embedded engine both use it. In bf16 a logit of 16 to 32 is rounded by up to 0.06. With
full-width layers, this is the larger part of the mismatch if only one side rounds."""

import torch
from torch import Tensor

CPU_CHUNK = 1 << 19
"""Elements of the weight that a CPU converts at a time: 2 MB in fp32, which a cache holds."""


def fp32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute ``hidden @ weight.T``, accumulated and returned in fp32, or fp64 if these are.

    Not differentiable in bf16.

    Args:
        hidden: [tokens, hidden_size].
        weight: [vocab_size, hidden_size] of the same dtype.

    Returns:
        [tokens, vocab_size].
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.dtype == dtype:
        return hidden @ weight.t()
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=dtype)

    # CPUs have no such product. A whole vocabulary in fp32 would not fit into a cache: its
    # conversion would take 10 times as long as the product.
    hidden = hidden.to(dtype)
    logits = hidden.new_empty(len(hidden), len(weight))
    step = max(1, CPU_CHUNK // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        torch.mm(hidden, weight[rows].to(dtype).t(), out=logits[:, rows])
    return logits
