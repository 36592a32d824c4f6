"""Which known faults explain a subject's answers: a fault is not reported because something
deviates, but because the reference *with the fault* gives what the subject gave."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from rl_loop.certify.examination import gap
from rl_loop.certify.faults import Fault
from rl_loop.certify.variants import Variant, combined

MOST_FAULTS = 3
"""Of one subject."""
WORTHWHILE = 0.6
"""A fault must bring the gap below this share of itself to count as an explanation."""
UNEXPLAINED = 0.25
"""Share of the gap that faults which are named may leave."""


@dataclass(frozen=True)
class Explanation:
    """Faults that explain answers, as far as they do."""

    faults: tuple[Fault, ...]
    variant: Variant
    """The model with them."""
    before: float
    """Mean gap to the model without them, in nats."""
    after: float
    """Mean gap to the model with them."""
    is_complete: bool
    """Whether precision explains the rest."""

    @property
    def is_good(self) -> bool:
        """Whether the faults may be named: they explain everything, or nearly so beside another
        one that is not known."""
        return self.is_complete or self.after < UNEXPLAINED * self.before


def explain(
    answered: Tensor,
    evaluate: Callable[[Variant], Tensor],
    candidates: Sequence[Fault],
    limit: float,
    start: Variant,
) -> Explanation:
    """Find the faults with which the reference comes closest to the answers, one after the other.

    Args:
        answered: the subject's numbers.
        evaluate: gives the reference's with a variant.
        candidates: faults to try, the simplest first: of equal ones the first is taken.
        limit: of the mean gap, below which precision explains it.
        start: the variant to begin with.
    """
    variant = start
    before = after = gap(answered, evaluate(variant))
    faults: list[Fault] = []
    while after > limit and len(faults) < MOST_FAULTS:
        gaps = {}
        for fault in candidates:
            if fault not in faults:
                gaps[fault] = gap(answered, evaluate(combined(variant, fault.variant)))
        best = min(gaps, key=lambda fault: gaps[fault])
        if gaps[best] > WORTHWHILE * after:
            break
        faults.append(best)
        variant = combined(variant, best.variant)
        after = gaps[best]
    return Explanation(tuple(faults), variant, before, after, after <= limit)
