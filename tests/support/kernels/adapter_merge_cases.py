"""MXFP4 weights with updates, for tests of the adapter-merge kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    blocks: torch.Tensor
    scales: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scale: float


def mxfp4_case(experts: int, rows: int, columns: int, rank: int, scale: float = 1.7) -> Case:
    """Random weights with zeros of both signs, and an update that is 0 in some rows."""
    generator = torch.Generator().manual_seed(rank)
    blocks = torch.randint(
        0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator
    )
    scales = torch.randint(
        112, 122, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator
    )
    # the subnormal scale
    scales[0, 0, 0] = 0

    a = torch.randn(experts, rank, columns, generator=generator) / 8
    b = torch.randn(experts, rows, rank, generator=generator) / 8
    b[:, 1::4] = 0
    return Case(blocks, scales, a.bfloat16(), b.bfloat16(), scale)
