"""MXFP4 against Hugging Face's dequantization and an independent quantizer."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_kernels.mxfp4 import dequantize, quantize

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def bits(x):
    return x.contiguous().view(torch.int16)


def independent_quantize(x):
    """Quantize in fp64 with scale 2^ceil(log2(amax / 6)) and an exhaustive search.

    The result has the nearest code of each value, and the even code for ties.
    """
    x = x.double().unflatten(-1, (-1, 32))
    amax = x.abs().amax(-1)
    exponent = torch.where(amax > 0, torch.log2(amax / 6).ceil().clamp(min=-126), -127.0)
    scaled = x / torch.exp2(exponent)[..., None]
    distance = (scaled.abs()[..., None] - CODES[:8].double()).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    even_first = torch.where(nearest, torch.arange(8) % 2 + torch.arange(8) * 1e-3, 9.0)
    code = even_first.argmin(-1) | (torch.signbit(x).long() << 3)
    return (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8), (exponent + 127).to(
        torch.uint8
    )


@pytest.mark.parametrize("device", DEVICES)
def test_every_byte_and_scale_dequantizes_as_in_hugging_face(device):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    theirs = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    ours = dequantize(blocks.to(device), scales.to(device)).cpu()
    differs = bits(theirs).unflatten(-1, (16, 32)) != bits(ours).unflatten(-1, (16, 32))
    assert not differs[0, :253].any()
    # 253..255 overflow bf16 to the same infinities. The result of 0 * 2^128 may differ.
    overflows = torch.isinf(theirs)
    assert overflows.any() and torch.equal(ours[overflows], theirs[overflows])


@pytest.mark.parametrize("device", DEVICES)
def test_quantize_equals_an_exhaustive_search(device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 320, generator=generator) * torch.exp2(
        torch.randint(-20, 20, (64, 1), generator=generator)
    )
    x[3], x[4, :32], x[5] = 0, -0.0, x[5] * 2.0**-120
    x[6, :7] = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    )  # these are ties if the largest value of the block is 6
    x[6, 7:32] = 6.0
    x = x.bfloat16()
    blocks, scales = quantize(x.to(device))
    expected_blocks, expected_scales = independent_quantize(x)
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(blocks.cpu(), expected_blocks)


@pytest.mark.parametrize("device", DEVICES)
def test_round_trip_with_scale_hint_is_byte_exact(device):
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 500, 16), dtype=torch.uint8, generator=generator)
    blocks[0, :20] &= 0x99  # small codes only, which would get another scale without the hint
    blocks[0, 20:24] = 0x80
    scales = torch.randint(0, 253, (3, 500), dtype=torch.uint8, generator=generator)
    blocks, scales = blocks.to(device), scales.to(device)
    again, again_scales = quantize(dequantize(blocks, scales), scale_hint=scales)
    assert torch.equal(again, blocks) and torch.equal(again_scales, scales)


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_hint_is_not_trusted(device):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(10, 64, generator=generator).bfloat16()
    hint = torch.randint(0, 255, (10, 2), dtype=torch.uint8, generator=generator)
    with_hint, without = quantize(x.to(device), hint.to(device)), quantize(x.to(device))
    assert torch.equal(with_hint[0], without[0]) and torch.equal(with_hint[1], without[1])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**16 - 1), min_size=32, max_size=32))
def test_any_finite_block_survives_a_second_round_trip(values):
    x = torch.tensor(values, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    once = dequantize(*quantize(x))
    if torch.isfinite(once).all():
        assert torch.equal(bits(dequantize(*quantize(once))), bits(once))
        assert torch.equal(torch.signbit(once), torch.signbit(x))


def test_the_sign_of_zero_is_kept():
    x = torch.zeros(64).bfloat16()
    x[1::2] = -0.0
    x[40] = 6.0
    assert torch.equal(bits(dequantize(*quantize(x))), bits(x))


def test_out_is_written_in_place():
    blocks, scales = quantize(torch.randn(4, 64).bfloat16())
    out = torch.full((4, 64), torch.nan).bfloat16()
    assert dequantize(blocks, scales, out=out) is out
    assert torch.equal(bits(out), bits(dequantize(blocks, scales)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_quantize_rejects_nan_and_inf_with_their_place(value):
    x = torch.zeros(2, 64).bfloat16()
    x[1, 40] = value
    with pytest.raises(ValueError, match="block 3"):
        quantize(x)


def test_wrong_arguments_are_named():
    blocks, scales = torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="blocks"):
        dequantize(blocks[..., :8], scales)
    with pytest.raises(ValueError, match="scales"):
        dequantize(blocks, scales[:, :2])
    with pytest.raises(ValueError, match="out"):
        dequantize(blocks, scales, out=torch.zeros(2, 96))
    with pytest.raises(ValueError, match="x must"):
        quantize(torch.zeros(33).bfloat16())
    with pytest.raises(ValueError, match="scale_hint"):
        quantize(torch.zeros(64).bfloat16(), scale_hint=torch.zeros(3, dtype=torch.uint8))


@pytest.mark.parametrize("processes", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_codec_is_correct_when_threads_use_it_first_concurrently(processes):
    script = Path(__file__).parents[1] / "support/kernels/mxfp4_first_use.py"
    result = subprocess.run(
        [sys.executable, str(script), str(processes)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
