"""The kernel that merges adapters gives the bits of the sum that is written out in torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gptoss_kernels import adapter_merge, mxfp4
from megatron_gptoss.layers.merge import merge, merge_packed
from tests.kernels.adapter_merge_cases import packed_case

ROOT = Path(__file__).parents[2]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(torch.int16)


def test_interpreted_on_a_cpu_the_kernel_gives_the_same_bits() -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.adapter_merge_interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_packed_weight_merges_as_its_values_do() -> None:
    case = packed_case(experts=3, rows=10, columns=64, rank=4)
    weight = mxfp4.dequantize(case.blocks, case.scales)
    out = torch.empty_like(weight)
    assert merge_packed(case.blocks, case.scales, case.a, case.b, case.scale, out) is out
    assert torch.equal(bits(out), bits(merge(weight, case.a, case.b, case.scale)))
    # zeros of the base are among what is compared, and the update is large enough to be seen
    assert (weight == 0).any() and (out != weight).float().mean() > 0.5


def test_arguments_that_do_not_fit_are_named() -> None:
    case = packed_case(experts=2, rows=4, columns=64, rank=2)
    out = torch.empty(2, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"a must be torch.bfloat16 \[2, 2, 64\]"):
        adapter_merge.merge_packed(case.blocks, case.scales, case.a[:1], case.b, 1.0, out)
    with pytest.raises(ValueError, match="b must be"):
        adapter_merge.merge_packed(case.blocks, case.scales, case.a, case.b.float(), 1.0, out)
    with pytest.raises(ValueError, match="scales must be"):
        adapter_merge.merge_packed(case.blocks, case.scales[:1], case.a, case.b, 1.0, out)
    with pytest.raises(ValueError, match="weight must be"):
        adapter_merge.merge_dense(out.float(), case.a, case.b, 1.0, out)
    with pytest.raises(ValueError, match="out must be a contiguous"):
        adapter_merge.merge_dense(out, case.a, case.b, 1.0, out.mT)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(5760, 2880), (41, 96)])
@pytest.mark.parametrize("rank", [0, 1, 8, 33])
@pytest.mark.parametrize("scale", [1.7, 4.0])
def test_on_a_gpu_the_kernel_gives_the_bits_of_the_cpu(
    rows: int, columns: int, rank: int, scale: float
) -> None:
    case = packed_case(experts=2, rows=rows, columns=columns, rank=rank, scale=scale)
    weight = mxfp4.dequantize(case.blocks, case.scales)
    expected = merge(weight, case.a, case.b, scale)

    a = case.a.cuda()
    b = case.b.cuda()
    out = torch.full_like(weight, torch.nan).cuda()
    merge_packed(case.blocks.cuda(), case.scales.cuda(), a, b, scale, out)
    assert torch.equal(bits(out), bits(expected))
    assert torch.equal(bits(merge(weight.cuda(), a, b, scale)), bits(expected))


@pytest.mark.gpu
def test_a_fused_multiply_add_would_give_other_bits() -> None:
    # what the kernel is kept from: with it, the comparison above fails
    case = packed_case(experts=2, rows=5760, columns=2880, rank=8)
    weight = mxfp4.dequantize(case.blocks, case.scales).cuda()
    merged = merge(weight, case.a.cuda(), case.b.cuda(), case.scale)
    update = torch.zeros(weight.shape, device="cuda")
    for i in range(8):
        update += case.b.cuda().float()[..., i, None] * case.a.cuda().float()[..., i, None, :]
    scale = torch.tensor(case.scale, dtype=torch.float32).double().item()
    fused = (update.double() * scale + weight.double()).float()
    assert (fused.bfloat16() != merged).any()
