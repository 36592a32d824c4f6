"""Logits on CPUs: fp32 results from 16-bit inputs, and the bits of torch for fp32 and fp64 inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gptoss_kernels import logits
from gptoss_kernels.logits import fp32_logits
from tests.support.tolerances import assert_within, product_error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [1, 64 * 7, logits.CPU_CHUNK])
def test_fp32_logits_are_not_rounded(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases are a vocabulary of several uneven chunks and a vocabulary of one chunk."""
    monkeypatch.setattr(logits, "CPU_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden = (4 * torch.randn(5, 64, generator=generator)).to(dtype)
    weight = torch.randn(40, 64, generator=generator).to(dtype)
    exact = hidden.double() @ weight.double().t()

    ours = fp32_logits(hidden, weight)
    assert ours.dtype == torch.float32
    assert_within(ours.double(), exact, product_error(hidden.double(), weight.double().t()))
    rounded = (F.linear(hidden, weight).double() - exact).abs().max()
    assert (ours.double() - exact).abs().max() < rounded / 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("tokens", "vocab_size"), [(1, 96), (7, 2048), (64, 20_000)])
def test_fp32_logits_have_the_bits_of_a_linear_layer(
    dtype: torch.dtype, tokens: int, vocab_size: int
) -> None:
    hidden = torch.randn(tokens, 64, dtype=dtype)
    weight = torch.randn(vocab_size, 64, dtype=dtype)
    assert torch.equal(fp32_logits(hidden, weight), F.linear(hidden, weight))
