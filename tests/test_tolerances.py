"""Rounding bounds hold for every summation order, and they are small enough to show faults."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.tolerances import (
    assert_same_training,
    assert_within,
    attention_error,
    log_prob_error,
    product_error,
    rounding_error,
    sum_error,
)

LENGTHS = [1, 7, 64, 576, 2880]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def sums(terms: Tensor) -> dict[str, Tensor]:
    """Sum over the last dimension in several orders, and round each addition."""
    forward = terms[..., 0].clone()
    for term in terms.unbind(-1)[1:]:
        forward = forward + term
    lanes = torch.zeros(*terms.shape[:-1], 16, dtype=terms.dtype)
    for start in range(0, terms.shape[-1], 16):
        part = terms[..., start : start + 16]
        lanes[..., : part.shape[-1]] += part
    vector = lanes[..., 0].clone()
    for lane in lanes.unbind(-1)[1:]:
        vector = vector + lane
    order = terms.abs().argsort(-1, descending=True)
    largest_first = terms.gather(-1, order)
    total = largest_first[..., 0].clone()
    for term in largest_first.unbind(-1)[1:]:
        total = total + term
    return {"forward": forward, "vectors": vector, "largest first": total, "torch": terms.sum(-1)}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_error_holds_in_every_order(dtype: torch.dtype, length: int) -> None:
    x = draw(50, length, dtype=dtype)
    y = draw(50, length, seed=1, dtype=dtype)
    exact = (x.double() * y.double()).sum(-1)
    if dtype == torch.float64:
        exact = torch.tensor([math.fsum(row) for row in (x * y).tolist()], dtype=torch.float64)
    bound = sum_error(dtype, length, (x.double() * y.double()).abs().sum(-1))
    for order, found in sums(x * y).items():
        assert_within(found, exact, bound, order)


@pytest.mark.parametrize("length", [64, 576, 2880])
@pytest.mark.parametrize("fault", ["a term is missing", "a term counts twice", "bf16 operands"])
def test_product_error_shows_a_fault(length: int, fault: str) -> None:
    x = draw(200, length, dtype=torch.float32)
    y = draw(length, 30, seed=1, dtype=torch.float32)
    exact = x.double() @ y.double()
    bound = product_error(x, y)
    assert_within(x @ y, exact, bound)
    assert_within((x.flip(1) @ y.flip(0)), exact, bound)

    faulty = {
        "a term is missing": lambda: x[:, 1:] @ y[1:],
        "a term counts twice": lambda: x @ y + x[:, :1] @ y[:1],
        "bf16 operands": lambda: x.bfloat16().float() @ y.bfloat16().float(),
    }
    with pytest.raises(AssertionError, match="values are off, the worst by"):
        assert_within(faulty[fault](), exact, bound)


def log_softmax_of_parts(logits: Tensor, parts: int) -> Tensor:
    """Compute log-probs as kernels that process the vocabulary in parts."""
    largest = logits.amax(-1, keepdim=True)
    total = torch.zeros_like(largest)
    for part in logits.chunk(parts, -1):
        total += (part - largest).exp().sum(-1, keepdim=True)
    return logits - largest - total.log()


@pytest.mark.parametrize("size", [10, 576, 50_000])
@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_log_prob_error_holds_and_shows_a_fault(size: int, spread: float) -> None:
    logits = (spread * draw(20, size)).float()
    exact = logits.double().log_softmax(-1)
    bound = log_prob_error(logits)
    assert_within(logits.log_softmax(-1), exact, bound)
    for parts in (1, 7):
        assert_within(log_softmax_of_parts(logits, parts), exact, bound)

    without_largest = logits.scatter(-1, logits.argmax(-1, keepdim=True), -1e4)
    for faulty in (without_largest, logits.bfloat16().float(), logits / 1.001):
        with pytest.raises(AssertionError, match="values are off"):
            assert_within(faulty.log_softmax(-1), exact, bound)


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, sink: float | None) -> Tensor:
    """Compute the output in the dtype of the arguments, key by key with a running maximum."""
    largest = query.new_tensor(-1e30 if sink is None else sink)
    total = torch.zeros_like(largest) if sink is None else torch.ones_like(largest)
    output = torch.zeros(values.shape[1], dtype=values.dtype)
    for key, value in zip(keys, values, strict=True):
        score = (key * query).sum() * scale
        new = torch.maximum(largest, score)
        correction = (largest - new).exp()
        weight = (score - new).exp()
        output = output * correction + weight * value
        total = total * correction + weight
        largest = new
    return output / total


@pytest.mark.parametrize("sink", [None, -3.0, 2.0, 300.0])
@pytest.mark.parametrize("keys", [1, 65, 500])
def test_attention_error_holds_and_shows_a_fault(keys: int, sink: float | None) -> None:
    query = 2 * draw(64, dtype=torch.float32)
    key, value = draw(keys, 64, seed=1).float(), draw(keys, 32, seed=2).float()
    arguments = (query, key, value)
    exact = attend(*(x.double() for x in arguments), 0.3, sink)
    bound = attention_error(*arguments, 0.3, sink)
    assert_within(attend(*arguments, 0.3, sink), exact, bound)
    heaviest = int((key @ query).argmax())
    others = torch.arange(keys) != heaviest
    faults = [
        attend(query, key, value, 0.31, sink),
        attend(query, key[others], value[others], 0.3, sink),
        attend(query, key, value.roll(1, 0), 0.3, sink),
        attend(query, key, value, 0.3, None if sink is not None else 2.0),
    ]
    seen = 0
    for faulty in faults:
        # A scale has no effect with one key. A sink far below the scores has no effect either.
        if (faulty - exact).abs().max() > 1e-3:
            seen += 1
            with pytest.raises(AssertionError, match="values are off"):
                assert_within(faulty, exact, bound)
    assert seen > 0


def test_rounding_error_fits_deep_networks_and_shows_a_fault() -> None:
    """Twelve layers amplify rounding by an unknown factor."""

    def network(x: Tensor, layers: list[Tensor], parts: int = 1) -> Tensor:
        for layer in layers:
            products = [a @ b for a, b in zip(x.chunk(parts, -1), layer.chunk(parts), strict=True)]
            x = torch.stack(products).sum(0).tanh()
        return x

    layers = [3 * draw(64, 64, seed=seed) / 8 for seed in range(12)]
    x = draw(5, 64, seed=20)
    exact = network(x, layers)
    single = [layer.float() for layer in layers]
    reference = network(x.float(), single)
    allowed = rounding_error(reference, exact)
    for parts in (2, 4, 16):
        assert_within(network(x.float(), single, parts), reference, allowed, parts)

    changed = [*single[:6], single[6].clone(), *single[7:]]
    changed[6][0, 0] += 0.01
    for faulty in (network(x.float(), changed), network(x.float(), single[::-1])):
        with pytest.raises(AssertionError, match="values are off"):
            assert_within(faulty, reference, allowed)
    assert rounding_error(3.0, 3.0) == pytest.approx(8 * 3 * 2**-24)


def test_nan_is_never_within_a_bound() -> None:
    with pytest.raises(AssertionError, match="1 of 2 values are off"):
        assert_within(torch.tensor([1.0, math.nan]), torch.ones(2), 1e9)


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ([5.000002, 4.0001, 3.001], None),
        ([4.0001, 3.001], None),
        ([5.001, 4.0001, 3.001], "of step 0: off by 1.0e-03"),
        ([5.0, 4.01, 3.0], "of step 1: off by 1.0e-02"),
        ([3.02], "of step 2: off by 2.0e-02"),
    ],
)
def test_same_training_allows_drift_but_no_fault(found: list[float], fault: str | None) -> None:
    expected, exact = [5.0, 4.0, 3.0], [5.0000001, 4.00002, 3.0003]
    if fault is None:
        assert_same_training(found, expected, exact, terms=100, name="loss")
        return
    with pytest.raises(AssertionError, match=fault):
        assert_same_training(found, expected, exact, terms=100, name="loss")
