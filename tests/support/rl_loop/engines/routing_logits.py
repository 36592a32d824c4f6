"""Logits for tests of routing, with cases that kernels may get wrong."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("few values", "signed zeros", "negative", "all equal", "one token's")


def make_logits(kind: str, tokens: int, experts: int, dtype: torch.dtype) -> Tensor:
    """Return logits [tokens, experts] of a kind in ``KINDS``. The row stride is ``experts`` + 3."""
    whole = torch.randn(tokens, experts + 3)
    if kind == "few values":
        # Half of the tokens have many equal logits.
        whole[::2] = torch.randint(-6, 7, whole[::2].shape) / 4
    elif kind == "signed zeros":
        whole = torch.where(whole > 0, 0.0, -0.0)
    elif kind == "negative":
        whole = -whole.abs() - 1
    elif kind == "all equal":
        whole = torch.full_like(whole, 0.5)
    elif kind == "one token's":
        # All tokens choose the same experts, which are not the first ones.
        whole[:] = torch.arange(experts + 3) % 7
    else:
        raise ValueError(f"logits of kind {kind}: have {KINDS}")
    return whole.to(dtype)[:, :experts]


def choose_experts(logits: Tensor, top_k: int) -> Tensor:
    """Return the experts of each token, increasing, [tokens, top_k].

    They have the largest logits. Among equal logits the first ones count, and a negative zero is
    less than a positive zero.
    """
    by_sign = torch.argsort(logits.signbit().int(), dim=1, stable=True)
    values = logits.float().gather(1, by_sign)
    order = by_sign.gather(1, torch.argsort(values, dim=1, descending=True, stable=True))
    return order[:, :top_k].sort(1).values
