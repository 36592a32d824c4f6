"""Checks for faults in the forward pass. Each scores the sequences in which its faults show most."""

from dataclasses import dataclass

from rl_loop.certify import faults
from rl_loop.certify.check_run import CheckRun
from rl_loop.certify.checks.verdict import judge_visibilities
from rl_loop.certify.faults import ModelFault
from rl_loop.certify.report import CheckOutcome, CheckResult, DiagnosedFault
from rl_loop.certify.variants import EXACT


@dataclass(frozen=True)
class ForwardCheck:
    """Check for one kind of fault that is visible in scores."""

    name: str
    title: str
    probes: str
    """Attribute of ``ProbeSequences`` with the sequences to score."""
    faults: tuple[ModelFault, ...] = ()

    def list_faults(self, check_run: CheckRun) -> tuple[ModelFault, ...]:
        """Return the faults that are possible for the model's shape."""
        # Only square matrices can be transposed without an error, and that depends on the shape.
        if self.name == "orientation":
            return faults.orientation_faults(check_run.weights.config)
        return self.faults

    def __call__(self, check_run: CheckRun) -> CheckResult:
        """Search for each fault in the sequences of this check."""
        sequences = getattr(check_run.sequences, self.probes)
        possible = self.list_faults(check_run)
        known = [fault for fault in check_run.found_faults if fault in possible]
        # The agreement check has found a fault of this check. Report it here as well.
        if known:
            # Compare with EXACT, because the reference with the fault would show no deviation.
            visibilities = check_run.visibilities(possible, sequences, EXACT)
            names = " and ".join(fault.name for fault in known)
            causes = tuple(DiagnosedFault(fault.name, fault.source) for fault in known)
            return CheckResult(
                self.name, self.title, CheckOutcome.FAILED, names, causes, visibilities
            )

        # Compare with the faults that were found elsewhere, so that they do not count here.
        visibilities = check_run.visibilities(possible, sequences, check_run.explanation)
        suffix = " in addition to the faults of other checks" if check_run.found_faults else ""
        return judge_visibilities(self.name, self.title, visibilities, suffix)


FORWARD = (
    ForwardCheck("window", "keys that a window layer attends to", "window", faults.WINDOW),
    ForwardCheck("sinks", "sinks in the forward pass", "short", faults.SINKS),
    ForwardCheck("yarn", "rotary positions, beyond YaRN's original length", "long", faults.YARN),
    ForwardCheck("router", "the router: its bias and its softmax", "short", faults.ROUTER),
    ForwardCheck("activation", "the experts' clamped activation", "short", faults.ACTIVATION),
    ForwardCheck(
        "interleaving", "alternating channels of gate and up", "short", faults.INTERLEAVING
    ),
    ForwardCheck("orientation", "orientation of square weights", "short"),
    ForwardCheck("biases", "biases of attention and experts", "short", faults.BIASES),
)
