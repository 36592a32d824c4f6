"""Options of the fault-injection test, and time limits for a busy machine."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Settings of a fault-injection test."""

    seed: int = 0
    count: int = 0
    """Number of faults; 0 for one of each kind."""
    kinds: tuple[str, ...] = ()
    """Names of tests.faults.kinds; all if empty."""
    workers: int = 2
    """Number of rollout workers of a run."""
    servers: int = 0
    """Number of mock SGLang servers that sample (server.py); 0 for the embedded engine."""
    pairs: bool = False
    """Inject two faults at a time."""
    steps: int = 80
    """Steps of a run after which no fault is injected.

    A run has ``observed_run.RESERVED_STEPS`` more steps. The learning rate schedule counts both.
    """
    turn_tokens: int = 60
    """Maximum number of sampled tokens of a turn."""
    faults_per_run: int = 12
    """Number of faults after which a run is stopped and examined, and a new run begins."""
    stopped_seconds: float = 20.0
    """Seconds between SIGSTOP and SIGCONT."""
    starved_seconds: float = 10.0
    """Seconds that the busy loops run."""
    patience: float = 60.0
    """Seconds until a fault must have recovered or ended the run, on a machine without overload."""
    minutes: float = 60.0
    """Minutes after the first step in which faults are injected."""
    fewest: int = 0
    """Minimum number of injected faults, independent of ``minutes``."""
    tolerance: float = 0.0
    """Allowed difference of a loss from the undisturbed run."""
    deterministic: bool = True
    """Make the engine's numbers independent of timing. If false, set ``tolerance`` to 1e-7."""

    reference_follows: bool = False
    """Start the undisturbed run after the first disturbed run, instead of concurrently.

    It then ends at the last step of the disturbed run. Effects on a loss are seen only at the end.
    """

    def limit(self) -> float:
        """Return ``patience`` multiplied by the load average per core, at least by 1."""
        load, _, _ = os.getloadavg()
        return self.patience * max(1.0, load / (os.cpu_count() or 1))
