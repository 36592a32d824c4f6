"""Bounds of rounding errors, for tests that compare floating-point results.

A library sums in the order of its kernels, and kernels differ between processors, numbers of
threads and versions. A bound from dtype, number of terms and magnitude of the operands holds for
every order. A tolerance that was read off one machine does not.

- ``sum_error``, ``product_error``, ``log_prob_error`` and ``attention_error`` bound one operation
  before it runs.
- ``rounding_error`` is for whole models and trainings, which amplify errors by an unknown factor.
It
  measures how far the reference itself is from float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

CONFIDENCE = 8.0
"""A sum of n rounding errors exceeds CONFIDENCE * sqrt(n) * u with a probability below 3e-14, if
errors are independent with mean 0: 2 exp(-CONFIDENCE^2 / 2) (Higham and Mary, doi
10.1137/18M1226312)."""

FUNCTION_ROUNDINGS = 4
"""Unit roundoffs by which exp, log and their arguments' scaling may be off: vectorized functions of
torch, numpy and Triton are correct to 2 units in the last place."""

OTHER_ORDER = 8.0
"""Ratio of the largest errors of two computations with equally many roundings in different orders.

The largest of many independent errors is within a factor of 2 of its usual size. The difference of
two computations has the errors of both, and a partition over ranks or chunks adds at most the same
number of roundings.
"""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to nearest: 2^-24 for float32."""
    return torch.finfo(dtype).eps / 2


def sum_error(dtype: torch.dtype, terms: int, magnitude: Tensor | float) -> Tensor | float:
    """Bound the error of a sum, in any order.

    Args:
        dtype: precision of the products and of the sum.
        terms: number of terms.
        magnitude: sum of the absolute values of the terms.
    """
    return magnitude * unit_roundoff(dtype) * min(terms + 1, CONFIDENCE * math.sqrt(terms + 1))


def product_error(x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bound the error of each value of ``x @ y``, computed and summed in ``dtype``."""
    return sum_error(dtype, x.shape[-1], x.double().abs() @ y.double().abs())


def log_prob_error(logits: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bound the error of each value of log_softmax over the last dimension.

    Args:
        logits: any precision, exact; -inf for masked ones.
        dtype: precision of the computation, which may have to scale logits first.
    """
    rows = logits.double()
    rows = rows.masked_fill(rows == -torch.inf, torch.finfo(dtype).min)
    u = unit_roundoff(dtype)
    largest = rows.amax(-1, keepdim=True)

    # The difference to the largest logit has the roundings of both logits and its own. Roundings of
    # equal logits cancel.
    sizes = torch.where(rows == largest, 0.0, rows.abs() + largest.abs() + (largest - rows))
    in_differences = u * sizes
    # The logarithm turns the relative error of the sum into an absolute one.
    in_exponents = (rows.softmax(-1) * in_differences).sum(-1, keepdim=True)
    in_sum = sum_error(dtype, rows.shape[-1], 1.0) + 2 * FUNCTION_ROUNDINGS * u
    log_of_sum = (rows - largest).logsumexp(-1, keepdim=True).abs()
    return in_differences + in_exponents + in_sum + FUNCTION_ROUNDINGS * u * (sizes + log_of_sum)


def attention_error(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sink: float | None = None,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
) -> Tensor:
    """Bound the error of the output of one query, [value size].

    Args:
        query: [head size].
        keys: [keys, head size].
        values: [keys, value size].
        scale: factor of the scores.
        sink: logit of an additional key without a value.
        dtype: precision of scores, softmax and sums.
        weight_dtype: precision to which the kernel rounds weights and output; None for ``dtype``.
    """
    if len(keys) == 0:
        return torch.zeros(values.shape[1], dtype=torch.float64)
    u = unit_roundoff(dtype)
    scores = keys.double() @ query.double() * scale
    largest = scores.amax() if sink is None else torch.clamp(scores.amax(), min=sink)
    logits = scores if sink is None else torch.cat([scores, scores.new_tensor([sink])])
    weights = logits.softmax(0)[: len(keys)]

    # A score's error and that of its distance to the largest become relative errors of its weight.
    in_scores = product_error(keys, query[:, None], dtype)[:, 0] * scale
    in_exponents = FUNCTION_ROUNDINGS * u * (1 + scores.abs() + (largest - scores))
    of_weight = in_scores + in_exponents
    # All weights share the error of their sum: the mean of their errors, and the summation error.
    of_sum = (weights * of_weight).sum() + sum_error(dtype, len(keys) + 1, 1.0)
    relative = of_weight + of_sum + sum_error(dtype, len(keys), 1.0)
    if weight_dtype is not None:
        relative = relative + 2 * unit_roundoff(weight_dtype)
    # Weights below the smallest normal number are 0 in some kernels.
    underflow = torch.finfo(dtype).tiny
    return (weights * relative + underflow) @ values.double().abs()


def assert_within(found: Tensor, exact: Tensor, bound: Tensor | float, name: object = "") -> None:
    """Assert that ``found`` differs from ``exact`` by at most ``bound``, value by value."""
    error = (found.double() - exact.double()).abs()
    allowed = torch.as_tensor(bound, dtype=torch.float64, device=error.device).expand_as(error)
    wrong = ~(error <= allowed)  # true for NaN
    if wrong.any():
        worst = int((error - allowed).nan_to_num(torch.inf).argmax())
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} values are off, the worst by "
            f"{float(error.flatten()[worst]):.2e} where rounding explains "
            f"{float(allowed.flatten()[worst]):.2e}"
        )


def rounding_error(reference: Tensor | float, exact: Tensor | float) -> float:
    """Return by how much another computation of ``reference`` may differ from it.

    Args:
        reference: a result in the precision of the test.
        exact: the same from float64.

    Returns:
        OTHER_ORDER times the largest difference, but no less than one rounding of the largest
        value.
    """
    found = torch.as_tensor(reference)
    wanted = torch.as_tensor(exact, dtype=torch.float64)
    dtype = found.dtype if isinstance(reference, Tensor) else torch.float32
    measured = float((found.double() - wanted).abs().max())
    return OTHER_ORDER * max(measured, unit_roundoff(dtype) * float(wanted.abs().max()))


def assert_same_training(
    found: Sequence[float],
    expected: Sequence[float],
    exact: Sequence[float],
    terms: int,
    name: str,
) -> None:
    """Assert that a figure of several steps, such as the loss, is that of another fp32 training.

    The first step has the rounding of a sum. Later steps drift: Adam's first update has the sign of
    the gradient, which rounding decides where the gradient is almost 0, and routes follow. float64
    measures the drift.

    Args:
        found: the figure of the last steps.
        expected: the figure of all steps of the other training.
        exact: the same from float64.
        terms: number of terms that the figure sums.
        name: name of the figure.
    """
    drift = 0.0
    of_sum = float(sum_error(torch.float32, terms, 1.0))
    steps = list(zip(expected, exact, strict=True))
    for step, (want, float64) in enumerate(steps):
        drift = max(drift, abs(want - float64))
        allowed = max(of_sum * abs(want), OTHER_ORDER * drift)
        assert allowed < 1e-2 * abs(want), f"{name} of step {step}: rounding would hide a fault"
        position = step - len(steps)
        if -position <= len(found):
            error = abs(found[position] - want)
            assert error <= allowed, f"{name} of step {step}: off by {error:.1e} of {allowed:.1e}"
