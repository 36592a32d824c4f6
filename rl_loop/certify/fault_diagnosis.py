"""Finds the known faults that explain an implementation's results.

A deviation alone is not enough to report a fault. The reference with the fault must give the
implementation's results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from rl_loop.certify.check_run import gap
from rl_loop.certify.faults import ModelFault
from rl_loop.certify.variants import FaultyVariant, combine

MAX_FAULTS = 3
"""Maximum number of faults per implementation."""
WORTHWHILE = 0.6
"""A fault counts as an explanation if it reduces the gap below this share."""
UNEXPLAINED = 0.25
"""Maximum share of the gap that may remain when faults are reported."""


@dataclass(frozen=True)
class FaultExplanation:
    """Faults that explain an implementation's results in full or in part."""

    faults: tuple[ModelFault, ...]
    variant: FaultyVariant
    """Model with the faults."""
    before: float
    """Mean gap to the model without the faults, in nats."""
    after: float
    """Mean gap to the model with the faults, in nats."""
    is_complete: bool
    """True if precision explains the remaining gap."""

    @property
    def is_good(self) -> bool:
        """True if the faults may be reported. An unknown fault may cause a small remaining gap."""
        return self.is_complete or self.after < UNEXPLAINED * self.before


def explain(
    actual: Tensor,
    evaluate: Callable[[FaultyVariant], Tensor],
    candidates: Sequence[ModelFault],
    limit: float,
    start: FaultyVariant,
) -> FaultExplanation:
    """Find faults greedily, each time the one with which the reference is closest to the results.

    Args:
        actual: results of the implementation.
        evaluate: function that returns the results of the reference with a variant.
        candidates: faults to try, simple ones first. The first of equally good ones is taken.
        limit: mean gap that precision explains.
        start: variant to start from.
    """
    # Begin with the faults that are known already, so that only the remaining gap is explained.
    variant = start
    before = after = gap(actual, evaluate(variant))
    faults: list[ModelFault] = []
    # Greedy, because trying all sets of up to 3 of about 30 faults needs thousands of evaluations.
    while after > limit and len(faults) < MAX_FAULTS:
        gaps = {}
        for fault in candidates:
            if fault not in faults:
                gaps[fault] = gap(actual, evaluate(combine(variant, fault.variant)))
        # min keeps the first of equal gaps, and the dict keeps the order of the candidates.
        best = min(gaps, key=lambda fault: gaps[fault])
        # Some fault is always the closest. If it explains little, it is not the cause.
        if gaps[best] > WORTHWHILE * after:
            break
        faults.append(best)
        variant = combine(variant, best.variant)
        after = gaps[best]
    return FaultExplanation(tuple(faults), variant, before, after, after <= limit)
