"""Check of all tensors' gradients, including sinks."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_loop.certify import faults
from rl_loop.certify.check_run import CheckRun
from rl_loop.certify.checks.titles import TITLES
from rl_loop.certify.report import CheckOutcome, CheckResult, DiagnosedFault, FaultVisibility
from rl_loop.certify.variants import EXACT, combine

GRADIENT_FLOORS = {"fp32": 1e-4, "bf16": 2e-2}
"""Relative error of a tensor's gradient that is always allowed."""
MOVED_TENSORS = 4
"""Number of tensors to inspect for a fault of the backward pass."""


def check_gradients(check_run: CheckRun) -> CheckResult:
    """Compare the gradients of all tensors, including sinks."""
    title = TITLES["gradients"]
    # Every fault costs a backward pass over these sequences, so use only one of the window.
    sequences = [*check_run.sequences.short, check_run.sequences.window[0]]
    actual = check_run.implementation.gradients([sequence.ids for sequence in sequences])
    expected = check_run.gradients(sequences, check_run.explanation)
    missing = sorted(set(expected) - set(actual))
    if missing:
        summary = f"{len(missing)} tensors have no gradient, such as {missing[0]}"
        cause = _missing_gradients(missing)
        return CheckResult("gradients", title, CheckOutcome.FAILED, summary, cause)

    rounded = check_run.gradients(sequences, EXACT, "rounded")
    rounding_errors = _relative(rounded, check_run.gradients(sequences, EXACT))
    errors = _relative(actual, expected)
    known = (*faults.SINK_GRADIENTS, *faults.OTHER_GRADIENTS)
    with_fault = {}
    visibilities = []
    for fault in known:
        with_fault[fault] = check_run.gradients(
            sequences, combine(check_run.explanation, fault.variant)
        )
        # A fault of the backward pass moves few tensors, such as the sinks, so inspect these.
        moved = _relative(with_fault[fault], expected)
        names = sorted(moved, key=lambda name: -moved[name])[:MOVED_TENSORS]
        limit = max(_gradient_limit(check_run, rounding_errors[name]) for name in names)
        visible = float(np.median([moved[name] for name in names]))
        deviation = float(np.median([errors[name] for name in names]))
        visibilities.append(
            FaultVisibility(
                fault.name, fault.source, visible, deviation, limit, visible >= 1.5 * limit
            )
        )

    table = _gradient_table(check_run, errors, rounding_errors)
    wrong = [
        name for name in errors if errors[name] > _gradient_limit(check_run, rounding_errors[name])
    ]
    worst = max(errors, key=lambda name: errors[name])
    if not wrong:
        summary = f"{len(errors)} tensors, relative error {errors[worst]:.1e} at most ({worst})"
        return CheckResult(
            "gradients",
            title,
            CheckOutcome.PASSED,
            summary,
            visibilities=tuple(visibilities),
            table=table,
        )

    distances = {fault: _mean_error(actual, with_fault[fault]) for fault in known}
    closest = min(distances, key=lambda fault: distances[fault])
    summary = f"{len(wrong)} of {len(errors)} tensors are wrong, {worst} by {errors[worst]:.1e}"
    causes: tuple[DiagnosedFault, ...] = ()
    # One fault is always the closest. Name it only if it explains most of the error.
    if distances[closest] < 0.3 * _mean_error(actual, expected):
        causes = (DiagnosedFault(closest.name, closest.source),)
    return CheckResult(
        "gradients", title, CheckOutcome.FAILED, summary, causes, tuple(visibilities), table
    )


def _missing_gradients(missing: Sequence[str]) -> tuple[DiagnosedFault, ...]:
    if all(name.endswith("sinks") for name in missing):
        dropped = faults.SINK_GRADIENTS[0]
        return (DiagnosedFault(dropped.name, dropped.source),)
    return ()


def _relative(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of every tensor."""
    errors = {}
    for name, expected_gradient in expected.items():
        gradient = actual[name].detach().to("cpu", torch.float64)
        difference = (gradient - expected_gradient.double()).norm()
        # A gradient that should be zero has the norm 0.
        errors[name] = float(difference / expected_gradient.double().norm().clamp(min=1e-30))
    return errors


def _mean_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the mean relative error, with each error clamped to 2."""
    # A gradient that should be zero has no meaningful relative error.
    return float(np.mean([min(error, 2.0) for error in _relative(actual, expected).values()]))


def _gradient_limit(check_run: CheckRun, rounding_error: float) -> float:
    return max(3 * rounding_error, GRADIENT_FLOORS[check_run.precision])


def _gradient_table(
    check_run: CheckRun, errors: dict[str, float], rounding_errors: dict[str, float]
) -> tuple[tuple[str, ...], ...]:
    """Return the table of the largest relative error by kind of tensor."""
    kinds: dict[str, list[str]] = {}
    for name in errors:
        # For example layers.mlp.router.bias for model.layers.3.mlp.router.bias.
        kind = ".".join(part for part in name.split(".")[1:] if not part.isdigit())
        kinds.setdefault(kind, []).append(name)
    rows: list[tuple[str, ...]] = [("", "relative error", "in its precision")]
    for kind, names in kinds.items():
        largest = max(errors[name] for name in names)
        rows.append((kind, f"{largest:.1e}", f"{max(rounding_errors[name] for name in names):.1e}"))
    return tuple(rows)
