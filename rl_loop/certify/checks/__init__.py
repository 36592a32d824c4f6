"""The checks. Each takes a check run and returns its result.

agreement.py    log-probs of all texts, and the known faults that explain differences
forward.py      kinds of faults in the forward pass, each where it is most visible
packing.py      sequences in one packed row
routes.py       routed experts, returned and given
harmony.py      token ids of conversations
generation.py   decoded tokens; repeated scores
gradients.py    gradients of all tensors
update.py       an update of all weights, and back
verdict.py      results from visibilities and explanations
titles.py       titles of the checks
"""

from collections.abc import Callable

from rl_loop.certify.check_run import CheckRun
from rl_loop.certify.checks.agreement import check_agreement
from rl_loop.certify.checks.forward import FORWARD
from rl_loop.certify.checks.generation import check_decoding, check_determinism
from rl_loop.certify.checks.gradients import check_gradients
from rl_loop.certify.checks.harmony import check_harmony
from rl_loop.certify.checks.packing import check_packing
from rl_loop.certify.checks.routes import check_given_routes, check_returned_routes
from rl_loop.certify.checks.titles import TITLES
from rl_loop.certify.checks.update import check_update
from rl_loop.certify.report import CheckResult

CHECKS: dict[str, Callable[[CheckRun], CheckResult]] = {
    "agreement": check_agreement,
    **{check.name: check for check in FORWARD},
    "packing": check_packing,
    "gradients": check_gradients,
    "harmony": check_harmony,
    "routes returned": check_returned_routes,
    "routes given": check_given_routes,
    "decoding": check_decoding,
    "determinism": check_determinism,
    "update": check_update,
}
"""Checks in their order. The first one finds faults that the others take into account."""
TITLES |= {check.name: check.title for check in FORWARD}

__all__ = ["CHECKS", "FORWARD", "TITLES"]
