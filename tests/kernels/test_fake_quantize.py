"""Rounding to MXFP4 equals quantization followed by dequantization, bit by bit."""

from __future__ import annotations

import pytest
import torch

from gptoss_kernels.mxfp4 import dequantize, fake_quantize, quantize
from tests.support.kernels.fake_quantize_interpreted import cases
from tests.support.kernels.interpreted import run_interpreted


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.int16)


def compute_expected(matrices: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([dequantize(*quantize(matrix)) for matrix in matrices])


def test_interpreted_kernel_equals_codec_bit_by_bit() -> None:
    run_interpreted("fake_quantize_interpreted")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_floats_of_any_width_are_rounded_to_bf16_first(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrices = [torch.randn(5, 96, dtype=dtype) for _ in range(3)]
    out = torch.full((3, 5, 96), torch.nan, dtype=dtype)
    assert fake_quantize(matrices, out) is out
    assert torch.equal(out, compute_expected([m.bfloat16() for m in matrices]).to(dtype))
    assert (out != torch.stack(matrices)).float().mean() > 0.5


def test_rounded_values_do_not_change_again() -> None:
    torch.manual_seed(0)
    once = fake_quantize([torch.randn(8, 64).bfloat16()], torch.empty(1, 8, 64).bfloat16())
    again = fake_quantize([once[0]], torch.empty_like(once))
    assert torch.equal(bits(once), bits(again))


def test_unsuitable_arguments_are_named() -> None:
    x = torch.zeros(2, 64)
    with pytest.raises(ValueError, match="divisible by 32"):
        fake_quantize([x[:, :33]], torch.zeros(1, 2, 33))
    with pytest.raises(ValueError, match="room for 2 matrices, got 1"):
        fake_quantize([x], torch.zeros(2, 2, 64))
    with pytest.raises(ValueError, match=r"matrices\[1\] must be a contiguous torch.float32"):
        fake_quantize([x, x.bfloat16()], torch.zeros(2, 2, 64))
    with pytest.raises(ValueError, match="NaN or Inf in block 3"):
        bad = x.clone()
        bad[1, 40] = torch.nan
        fake_quantize([bad], torch.zeros(1, 2, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(4))
def test_fake_quantize_on_gpu_equals_codec_bit_by_bit(case: int) -> None:
    torch.manual_seed(0)
    matrices = cases()[case]
    expected = compute_expected(matrices)
    out = torch.full_like(expected, torch.nan).cuda()
    fake_quantize([matrix.cuda() for matrix in matrices], out)
    assert torch.equal(bits(out), bits(expected))


@pytest.mark.gpu
def test_fake_quantize_equals_two_kernels_for_a_20b_layer_on_gpu() -> None:
    torch.manual_seed(0)
    matrices = [0.02 * torch.randn(5760, 2880, device="cuda").bfloat16() for _ in range(4)]
    out = torch.empty(4, 5760, 2880, dtype=torch.bfloat16, device="cuda")
    fake_quantize(matrices, out)
    for matrix, rounded in zip(matrices, out, strict=True):
        assert torch.equal(bits(rounded), bits(dequantize(*quantize(matrix))))
