"""Checks of routed experts, both returned and given."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rl_loop.certify.check_run import CheckRun, concatenate, gap
from rl_loop.certify.checks.titles import TITLES
from rl_loop.certify.implementation import UnsupportedOperationError, checked_scores
from rl_loop.certify.probe_sequences import ProbeSequence
from rl_loop.certify.report import CheckOutcome, CheckResult, DiagnosedFault
from rl_loop.certify.variants import EXACT, FaultyVariant, ReferenceModel

SURE_MARGIN = {"fp32": 1e-3, "bf16": 0.5}
"""Minimum margin of a router's choice, in logits, for comparing it with the implementation's."""
ROUTES_AGREEING = 0.98
"""Minimum share of clear choices that must agree."""


def check_returned_routes(check_run: CheckRun) -> CheckResult:
    """Compare the experts that the implementation reports with the reference's."""
    title = TITLES["routes returned"]
    sequences = [*check_run.sequences.short, *check_run.sequences.window]
    returned = [scored.routes for scored in check_run.scored(sequences)]
    if any(routes is None for routes in returned):
        raise UnsupportedOperationError(
            f"{check_run.implementation.name} does not return routed experts"
        )

    config = check_run.weights.config
    agreeing = compared = 0
    for routes, sequence in zip(returned, sequences, strict=True):
        expected = check_run.evaluated(sequence, check_run.explanation)
        actual = np.asarray(routes)
        shape = (len(sequence.ids) - 1, config.num_layers, config.experts_per_token)
        if actual.shape != shape:
            summary = f"routes have the shape {actual.shape}, expected {shape}"
            return CheckResult("routes returned", title, CheckOutcome.FAILED, summary)
        # Implementations may list the experts of a token in any order.
        same = np.sort(actual, -1) == np.sort(expected.routes.numpy(), -1)
        # Precision can decide between near-tied experts, so compare only clear choices.
        is_clear = expected.margins.numpy() > SURE_MARGIN[check_run.precision]
        agreeing += int((same.all(-1) & is_clear).sum())
        compared += int(is_clear.sum())

    share = agreeing / max(compared, 1)
    summary = (
        f"{agreeing} of {compared} clear choices of routers agree with the reference ({share:.1%})"
    )
    if share >= ROUTES_AGREEING:
        return CheckResult("routes returned", title, CheckOutcome.PASSED, summary)
    causes = _route_causes(check_run, sequences, [np.asarray(routes) for routes in returned])
    return CheckResult("routes returned", title, CheckOutcome.FAILED, summary, causes)


def _route_causes(
    check_run: CheckRun, sequences: Sequence[ProbeSequence], returned: Sequence[np.ndarray]
) -> tuple[DiagnosedFault, ...]:
    """Return the known fault of the routes, if any."""
    if not any(routes.any() for routes in returned):
        source = "SGLang with the MoE backend triton_kernel: docs/design/sglang.md"
        return (DiagnosedFault("all returned routes are zero", source),)

    expected = [
        check_run.evaluated(sequence, check_run.explanation).routes.numpy()
        for sequence in sequences
    ]

    def share(change: Callable[[np.ndarray], np.ndarray]) -> float:
        """Return the share of routes that are correct after ``change``."""
        same = []
        for actual, correct in zip(returned, expected, strict=True):
            is_equal = np.sort(change(actual), -1) == np.sort(correct, -1)
            same.append(is_equal.all(-1).mean())
        return float(np.mean(same))

    # Less than all, because near-tied choices differ and the shifted rows wrap around.
    if share(lambda routes: np.roll(routes, 1, axis=0)) > 0.8:
        return (DiagnosedFault("returned routes are one token too early"),)
    if share(lambda routes: np.roll(routes, -1, axis=0)) > 0.8:
        return (DiagnosedFault("returned routes are one token too late"),)
    if share(lambda routes: routes[:, ::-1]) > 0.8:
        return (DiagnosedFault("returned routes have the wrong order of layers"),)
    return ()


def check_given_routes(check_run: CheckRun) -> CheckResult:
    """Give experts that the router would not choose, and check that the implementation uses them."""
    title = TITLES["routes given"]
    sequences = check_run.sequences.short
    ids = [sequence.ids for sequence in sequences]
    experts = check_run.weights.config.num_experts
    # These experts are distinct, too, and mostly not those of the router.
    routes = [(check_run.evaluated(sequence).routes + 1) % experts for sequence in sequences]
    scores = checked_scores(
        check_run.implementation,
        check_run.implementation.score_with_routes(ids, [r.numpy() for r in routes]),
        ids,
    )
    actual = concatenate([scored.log_probs for scored in scores])

    def expected(reference: ReferenceModel, given: bool, variant: FaultyVariant) -> Tensor:
        pieces = []
        for sequence, route in zip(ids, routes, strict=True):
            chosen = route if given else None
            pieces.append(reference.evaluate(sequence, variant, routes=chosen).log_probs)
        return torch.cat(pieces)

    expected_log_probs = expected(check_run.exact, True, check_run.explanation)
    noise = (
        expected(check_run.rounded, True, EXACT) - expected(check_run.exact, True, EXACT)
    ).abs()
    distance = gap(actual, expected_log_probs)
    limit = check_run.mean_limit(noise)
    summary = f"tokens differ by {distance:.1e} nats on average. Precision explains {limit:.1e}"
    if distance <= limit:
        return CheckResult("routes given", title, CheckOutcome.PASSED, summary)
    causes: tuple[DiagnosedFault, ...] = ()
    # The scores may be those of the router's own choice.
    if gap(actual, expected(check_run.exact, False, check_run.explanation)) <= limit:
        causes = (DiagnosedFault("given routes are ignored"),)
    return CheckResult("routes given", title, CheckOutcome.FAILED, summary, causes)
