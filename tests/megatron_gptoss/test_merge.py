"""The merged weight has a bit-exact definition, and the gradients of an explicit merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gptoss_kernels import mxfp4
from megatron_gptoss.layers import merge as merge_module
from megatron_gptoss.layers.merge import merge, merge_in_pieces, merged_linear, merged_weight
from megatron_gptoss.layers.mxfp4_weight import Mxfp4Weight
from tests.support.tolerances import assert_within, sum_error

OUT, IN, RANK, SCALE = 41, 70, 5, 1.7


def factors(*batch: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return a weight, A and B. The update is a tenth of the weight."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*batch, *shape, generator=generator, dtype=torch.float64)

    weight, a, b = draw(OUT, IN), 0.3 * draw(RANK, IN), 0.1 * draw(OUT, RANK)
    return weight.to(dtype), a.to(dtype), b.to(dtype)


def test_merged_weight_is_rounded_sum_over_ranks() -> None:
    weight, a, b = factors()
    total = np.zeros((OUT, IN), np.float32)
    for i in range(RANK):
        total = total + b.numpy()[:, i, None] * a.numpy()[i]
    expected = weight.numpy() + total * np.float32(SCALE)
    assert torch.equal(merge(weight, a, b, SCALE), torch.from_numpy(expected))


def test_a_bf16_weight_is_rounded_once() -> None:
    weight, a, b = factors(dtype=torch.bfloat16)
    exact = weight.double() + SCALE * (b.double() @ a.double())
    merged = merge(weight, a, b, SCALE)
    assert merged.dtype == torch.bfloat16
    # only values within fp32's error of the middle of two bf16 numbers may round differently
    assert (merged != exact.bfloat16()).sum() <= 2
    rounded_twice = (weight + (SCALE * (b @ a)).bfloat16()).bfloat16()
    assert (rounded_twice != exact.bfloat16()).sum() > 50


@pytest.mark.parametrize("rows", [slice(0, 20), slice(7, 8), slice(20, 41), slice(3, 41, 2)])
@pytest.mark.parametrize("columns", [slice(0, 35), slice(1, 2), slice(33, 70)])
def test_a_part_of_a_weight_merges_to_the_same_bits(rows: slice, columns: slice) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight, a, b = factors(dtype=dtype)
        part = merge(weight[rows, columns], a[:, columns], b[rows], SCALE)
        assert torch.equal(part, merge(weight, a, b, SCALE)[rows, columns])


def test_a_weight_merges_in_pieces_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # pieces of three rows, and a last piece of two
    monkeypatch.setattr("megatron_gptoss.layers.merge.PIECE", 3 * IN + 1)
    for dtype in (torch.float32, torch.bfloat16):
        weight, a, b = factors(dtype=dtype)
        merged = merge_in_pieces(weight.float(), a, b, SCALE, dtype)
        assert merged.dtype == dtype
        assert torch.equal(merged, merge(weight.float(), a, b, SCALE, dtype))


@pytest.mark.parametrize(("has_kernel", "launches"), [(True, [OUT]), (False, 13 * [3] + [2])])
def test_large_weight_is_merged_whole_only_by_the_kernel(
    has_kernel: bool, launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_module, "PIECE", 3 * IN + 1)
    expected = merge(*factors(), SCALE)
    rows = []

    def recorded(weight: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        rows.append(len(weight))
        monkeypatch.setattr(merge_module, "_has_dense_kernel", lambda *tensors: False)
        return merge(weight, *arguments, **options)

    monkeypatch.setattr(merge_module, "_has_dense_kernel", lambda *tensors: has_kernel)
    monkeypatch.setattr(merge_module, "merge", recorded)
    assert torch.equal(merge_in_pieces(*factors(), SCALE), expected)
    assert rows == launches


def test_experts_merge_together_as_each_alone() -> None:
    weight, a, b = factors(3)
    together = merge(weight, a, b, SCALE)
    for expert in range(3):
        alone = merge(weight[expert], a[expert], b[expert], SCALE)
        assert torch.equal(together[expert], alone)


def test_zero_update_keeps_every_bit() -> None:
    weight, a, b = factors(dtype=torch.bfloat16)
    weight[0, :3] = torch.tensor([-0.0, 0.0, -0.0])
    merged = merge(weight, a, torch.zeros_like(b), SCALE)
    assert torch.equal(merged.view(torch.int16), weight.view(torch.int16))


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def by_merged_linear(
    x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    return merged_linear(x, lambda: weight, a, b, SCALE)


def by_merged_weight(
    x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    return x @ merged_weight(weight, a, b, SCALE).t()


@pytest.mark.parametrize("product", [by_merged_linear, by_merged_weight])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_are_those_of_the_explicit_merged_weight(
    product: Product, dtype: torch.dtype
) -> None:
    weight, a, b = (x.to(dtype) for x in factors())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 9, IN, generator=generator, dtype=dtype)
    upstream = torch.randn(2, 9, OUT, generator=generator, dtype=dtype)
    inputs = [tensor.requires_grad_() for tensor in (x, a, b)]

    output = product(x, weight, a, b)
    found = torch.autograd.grad(output, inputs, upstream)

    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    explicit = exact[0] @ (weight.double() + SCALE * exact[2] @ exact[1]).t()
    expected = torch.autograd.grad(explicit, exact, upstream.double())

    # Positive operands do not cancel, so these results are the magnitudes of the sums.
    positive = [tensor.detach().abs().requires_grad_() for tensor in exact]
    weights = weight.double().abs() + SCALE * positive[2] @ positive[1]
    magnitude = positive[0] @ weights.t()
    magnitudes = torch.autograd.grad(magnitude, positive, upstream.double().abs())
    # Each result has at most one sum over each size. The float64 reference is also rounded.
    rows = x[..., 0].numel()
    relative = 2 * sum(float(sum_error(dtype, size, 1.0)) for size in (IN, OUT, RANK, rows))

    results = zip((output, *found), (explicit, *expected), (magnitude, *magnitudes), strict=True)
    for got, want, size in results:
        assert_within(got, want, relative * size)
        assert want.abs().max() > 0.1


def test_weights_in_a_shared_buffer_give_equal_gradients() -> None:
    # two layers share the buffer, and the second overwrites the input of the first
    torch.manual_seed(0)
    dense = [mxfp4.dequantize(*mxfp4.quantize(torch.randn(64, 64).bfloat16())) for _ in range(2)]
    packed = [Mxfp4Weight(64, 64) for _ in range(2)]
    for weight, values in zip(packed, dense, strict=True):
        weight.load(values)

    x = torch.randn(5, 64)
    a = torch.randn(3, 64, requires_grad=True)
    b = torch.randn(64, 3, requires_grad=True)
    gradients = []
    for first, second in ([weight.read for weight in packed], [lambda w=w: w for w in dense]):
        hidden = merged_linear(x, first, a, b, 0.1)
        output = merged_linear(hidden.tanh(), second, a, b, 0.1)
        gradients.append(torch.autograd.grad(output.square().sum(), [a, b]))
    for got, want in zip(*gradients, strict=True):
        assert torch.equal(got, want)


def test_merge_rejects_values_that_mxfp4_cannot_hold() -> None:
    weight = Mxfp4Weight(2, 32)
    values = torch.ones(2, 32)
    weight.load(values)
    assert torch.equal(weight.read(), values.bfloat16())
    values[1, 3] = 1.1
    with pytest.raises(ValueError, match="1 of 64 values are not MXFP4 values"):
        weight.load(values)


def test_merge_rejects_rows_of_incomplete_blocks() -> None:
    with pytest.raises(ValueError, match="columns must be a multiple of 32 for MXFP4, got 48"):
        Mxfp4Weight(2, 48)
