"""The kernel that merges adapters returns the same bits as the explicit sum in torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from gptoss_kernels import adapter_merge, mxfp4
from gptoss_kernels.nvrtc import compile_cubin
from megatron_gptoss.layers.merge import merge, merge_mxfp4
from tests.support.kernels.adapter_merge_cases import mxfp4_case
from tests.support.kernels.adapter_merge_on_host import build, run


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(torch.int16)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of kernels compiled for this machine."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    return tmp_path_factory.mktemp("adapter_merge")


@pytest.mark.parametrize("is_mxfp4", [True, False])
@pytest.mark.parametrize(
    ("experts", "rows", "columns", "rank"),
    # The cases have row lengths that are not multiples of a thread's values, partly filled blocks,
    # and odd ranks. The last case has enough values that a fused multiply-add would change some of
    # them.
    [(2, 41, 160, 3), (1, 5, 32, 0), (1, 33, 64, 8), (3, 16, 96, 17), (1, 640, 2880, 8)],
)
def test_kernel_source_on_cpu_equals_torch_sum_bit_by_bit(
    libraries: Path, experts: int, rows: int, columns: int, rank: int, is_mxfp4: bool
) -> None:
    case = mxfp4_case(experts=experts, rows=rows, columns=columns, rank=rank)
    weight = mxfp4.dequantize(case.blocks, case.scales)
    expected = merge(weight, case.a, case.b, case.scale)

    kernel = build(libraries, is_mxfp4=is_mxfp4, rank=rank)
    out = torch.full_like(expected, torch.nan)
    if is_mxfp4:
        run(kernel, case.blocks, case.scales, case.a, case.b, case.scale, out)
    else:
        run(kernel, weight, None, case.a, case.b, case.scale, out)
    assert torch.equal(bits(out), bits(expected))


def test_every_code_with_every_scale_is_decoded(libraries: Path) -> None:
    # 255 encodes NaN
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | codes.flip(0) << 4).expand(255, 1, 16).contiguous()
    expected = mxfp4.dequantize(blocks, scales)

    out = torch.full_like(expected, torch.nan)
    no_a = torch.empty(0, 32, dtype=torch.bfloat16)
    no_b = torch.empty(255, 0, dtype=torch.bfloat16)
    kernel = build(libraries, is_mxfp4=True, rank=0)
    run(kernel, blocks, scales, no_a, no_b, 1.0, out)
    assert torch.equal(bits(out), bits(expected))


@pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA has no NVRTC")
@pytest.mark.parametrize("is_mxfp4", [True, False])
@pytest.mark.parametrize("rank", [8, 32])
def test_the_kernel_compiles_for_a_gpu(
    rank: int, is_mxfp4: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPTOSS_KERNELS_CACHE", str(tmp_path))
    macros = adapter_merge.macros(is_mxfp4=is_mxfp4, rank=rank)
    cubin = compile_cubin(adapter_merge.SOURCE, macros, "sm_90a")
    assert cubin[:4] == b"\x7fELF" and b"merge_adapters" in cubin


def test_mxfp4_weight_merges_as_its_values_do() -> None:
    case = mxfp4_case(experts=3, rows=10, columns=64, rank=4)
    weight = mxfp4.dequantize(case.blocks, case.scales)
    out = torch.empty_like(weight)
    assert merge_mxfp4(case.blocks, case.scales, case.a, case.b, case.scale, out) is out
    assert torch.equal(bits(out), bits(merge(weight, case.a, case.b, case.scale)))
    # the comparison includes zeros of the base, and the update changes most values
    assert (weight == 0).any() and (out != weight).float().mean() > 0.5


def test_unsuitable_arguments_are_named() -> None:
    case = mxfp4_case(experts=2, rows=4, columns=64, rank=2)
    out = torch.empty(2, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"a must be torch.bfloat16 \[2, 2, 64\]"):
        adapter_merge.merge_mxfp4(case.blocks, case.scales, case.a[:1], case.b, 1.0, out)
    with pytest.raises(ValueError, match="b must be"):
        adapter_merge.merge_mxfp4(case.blocks, case.scales, case.a, case.b.float(), 1.0, out)
    with pytest.raises(ValueError, match="scales must be"):
        adapter_merge.merge_mxfp4(case.blocks, case.scales[:1], case.a, case.b, 1.0, out)
    with pytest.raises(ValueError, match="weight must be"):
        adapter_merge.merge_dense(out.float(), case.a, case.b, 1.0, out)
    with pytest.raises(ValueError, match="out must be a contiguous"):
        adapter_merge.merge_dense(out, case.a, case.b, 1.0, out.mT)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(5760, 2880), (41, 96)])
@pytest.mark.parametrize("rank", [0, 1, 8, 33])
@pytest.mark.parametrize("scale", [1.7, 4.0])
def test_merge_kernel_on_gpu_equals_cpu_bit_by_bit(
    rows: int, columns: int, rank: int, scale: float
) -> None:
    case = mxfp4_case(experts=2, rows=rows, columns=columns, rank=rank, scale=scale)
    weight = mxfp4.dequantize(case.blocks, case.scales)
    expected = merge(weight, case.a, case.b, scale)

    a = case.a.cuda()
    b = case.b.cuda()
    out = torch.full_like(weight, torch.nan).cuda()
    merge_mxfp4(case.blocks.cuda(), case.scales.cuda(), a, b, scale, out)
    assert torch.equal(bits(out), bits(expected))
    assert torch.equal(bits(merge(weight.cuda(), a, b, scale)), bits(expected))


@pytest.mark.gpu
def test_a_fused_multiply_add_would_give_other_bits() -> None:
    # the kernel must not use a fused multiply-add, because it would fail the comparison above
    case = mxfp4_case(experts=2, rows=5760, columns=2880, rank=8)
    weight = mxfp4.dequantize(case.blocks, case.scales).cuda()
    merged = merge(weight, case.a.cuda(), case.b.cuda(), case.scale)
    update = torch.zeros(weight.shape, device="cuda")
    for i in range(8):
        update += case.b.cuda().float()[..., i, None] * case.a.cuda().float()[..., i, None, :]
    scale = torch.tensor(case.scale, dtype=torch.float32).double().item()
    fused = (update.double() * scale + weight.double()).float()
    assert (fused.bfloat16() != merged).any()
