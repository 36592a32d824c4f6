"""Check of an update to other weights, and of an update back to the first weights."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from rl_loop.certify import faults
from rl_loop.certify.check_run import CheckRun, ReferenceName, concatenate, gap
from rl_loop.certify.checks.titles import TITLES
from rl_loop.certify.checks.verdict import judge_log_probs
from rl_loop.certify.faults import ModelFault
from rl_loop.certify.implementation import UnsupportedOperationError, checked_scores
from rl_loop.certify.report import CheckOutcome, CheckResult, DiagnosedFault
from rl_loop.certify.variants import EXACT, FaultyVariant


def check_update(check_run: CheckRun) -> CheckResult:
    """Update the implementation to the second weights, check that all arrived, and update it back."""
    title = TITLES["update"]
    if check_run.second is None:
        raise UnsupportedOperationError("there is no second set of weights")
    sequences = [*check_run.sequences.short, check_run.sequences.window[0]]
    # Before the update, because cached scores must be of the first weights.
    before = check_run.log_probs(sequences)

    check_run.implementation.load_weights(check_run.second.directory)
    ids = [sequence.ids for sequence in sequences]
    # Not ``check_run.scored``, which would cache scores of the second weights for these sequences.
    scores = checked_scores(check_run.implementation, check_run.implementation.score(ids), ids)
    updated = concatenate([scored.log_probs for scored in scores])
    check_run.implementation.load_weights(check_run.first_directory)
    again = checked_scores(check_run.implementation, check_run.implementation.score(ids), ids)

    def evaluate(variant: FaultyVariant, which: ReferenceName = "updated") -> Tensor:
        return check_run.expected(sequences, variant, which)

    candidates = faults.update_faults(check_run.weights.config)
    noise = (evaluate(EXACT, "updated_rounded") - evaluate(EXACT)).abs()
    result = judge_log_probs(
        check_run, "update", title, updated, evaluate, candidates, noise, _sample(candidates)
    )

    # Compare with the reference, too. The updates may have corrected a fault of the first loading.
    returned = concatenate([scored.log_probs for scored in again])
    back = min(gap(returned, before), gap(returned, check_run.expected(sequences, EXACT)))
    summary = f"{result.summary}; after the update back, tokens differ by {back:.1e} nats"
    result = replace(result, summary=summary)
    if result.status is CheckOutcome.PASSED and back > check_run.mean_limit(noise):
        cause = DiagnosedFault("the second update did not restore the first weights")
        result = replace(result, status=CheckOutcome.FAILED, causes=(cause,))
    return result


def _sample(candidates: Sequence[ModelFault]) -> list[ModelFault]:
    """Return the candidates with the faults of only one expert per layer, to save time."""
    kept = []
    layers = set()
    for fault in candidates:
        if fault.variant.expert_not_updated is not None:
            layer = fault.variant.expert_not_updated[0]
            if layer in layers:
                continue
            layers.add(layer)
        kept.append(fault)
    return kept
