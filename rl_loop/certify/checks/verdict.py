"""Builds results of checks from visibilities and explanations."""

from collections.abc import Callable, Sequence

from torch import Tensor

from rl_loop.certify.check_run import TOP, CheckRun, gap
from rl_loop.certify.fault_diagnosis import FaultExplanation, explain
from rl_loop.certify.faults import ModelFault
from rl_loop.certify.report import CheckOutcome, CheckResult, DiagnosedFault, FaultVisibility
from rl_loop.certify.variants import EXACT, FaultyVariant, combine


def describe(explanation: FaultExplanation) -> str:
    """Return a sentence with the faults and the part of the gap that they explain."""
    distance = f"tokens differ by {explanation.before:.1e} nats on average"
    if not explanation.faults or not explanation.is_good:
        return f"{distance}. No known fault explains it"
    names = " and ".join(fault.name for fault in explanation.faults)
    if explanation.is_complete:
        return f"{distance}. With this fault in the reference: {explanation.after:.1e} ({names})"
    return (
        f"{distance}. With this fault in the reference: {explanation.after:.1e} ({names}). There is "
        "another fault, because precision does not explain the rest"
    )


def list_causes(explanation: FaultExplanation) -> tuple[DiagnosedFault, ...]:
    """Return the faults of an explanation as causes. Empty if the explanation is not good."""
    if not explanation.is_good:
        return ()
    return tuple(DiagnosedFault(fault.name, fault.source) for fault in explanation.faults)


def judge_visibilities(
    name: str, title: str, visibilities: tuple[FaultVisibility, ...], suffix: str = ""
) -> CheckResult:
    """Return the result of a check for which no fault was identified.

    ``visibilities`` has the visibility of its faults. ``suffix`` is appended to the summary.
    """
    visible = [visibility for visibility in visibilities if visibility.is_visible]
    if not visible:
        reason = "none of the faults is visible with these weights in this precision"
        return CheckResult(name, title, CheckOutcome.NOT_VISIBLE, reason, visibilities=visibilities)

    worst = max(visible, key=lambda visibility: visibility.deviation / visibility.limit)
    if worst.deviation > worst.limit:
        summary = (
            f"tokens that '{worst.fault}' would change differ by {worst.deviation:.1e} nats. Precision "
            f"explains {worst.limit:.1e}. No known fault explains the difference{suffix}"
        )
        return CheckResult(name, title, CheckOutcome.FAILED, summary, visibilities=visibilities)

    # The fault that is hardest to see shows how much the check proves.
    weakest = min(visible, key=lambda visibility: visibility.visible / visibility.limit)
    summary = (
        f"{len(visible)} of {len(visibilities)} faults are visible: they would change tokens by "
        f"{weakest.visible:.1e} nats or more (limit {weakest.limit:.1e}). Tokens differ by "
        f"{worst.deviation:.1e} at most{suffix}"
    )
    return CheckResult(name, title, CheckOutcome.PASSED, summary, visibilities=visibilities)


def judge_log_probs(
    check_run: CheckRun,
    name: str,
    title: str,
    actual: Tensor,
    evaluate: Callable[[FaultyVariant], Tensor],
    candidates: Sequence[ModelFault],
    noise: Tensor,
    shown: Sequence[ModelFault],
    top: int = TOP,
) -> CheckResult:
    """Compare log-probs with the reference, and return the result of the check.

    For checks whose log-probs are not the scores of the check run.

    Args:
        check_run: state of the check run.
        name: name of the check.
        title: title of the check.
        actual: log-probs of the implementation.
        evaluate: function that returns the reference's log-probs with a variant.
        candidates: faults that may explain a deviation.
        noise: error per token of the implementation's precision.
        shown: faults whose visibility is reported.
        top: number of tokens to inspect per fault.
    """
    # A fault of the code remains after an update. A fault of the weights may be gone.
    start = min((EXACT, check_run.explanation), key=lambda variant: gap(actual, evaluate(variant)))
    expected = evaluate(start)

    def with_fault(fault: ModelFault) -> Tensor:
        return evaluate(combine(start, fault.variant))

    visibilities = check_run.measure_visibility(shown, with_fault, actual, expected, noise, top)
    result = judge_visibilities(name, title, visibilities)
    # The visibilities cover only tokens that known faults move. The mean covers all tokens.
    is_close = gap(actual, expected) <= check_run.mean_limit(noise)
    if result.status is not CheckOutcome.FAILED and is_close:
        return result

    explanation = explain(actual, evaluate, candidates, check_run.mean_limit(noise) / 2, start)
    return CheckResult(
        name,
        title,
        CheckOutcome.FAILED,
        describe(explanation),
        list_causes(explanation),
        visibilities,
    )
