"""Options of the fault-injection test, and time limits for a busy machine."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Settings of a campaign."""

    seed: int = 0
    count: int = 0
    """Faults; 0 for one of each kind."""
    kinds: tuple[str, ...] = ()
    """Names of tests.faults.kinds; all if empty."""
    workers: int = 2
    """Rollout workers of a run."""
    servers: int = 0
    """Servers of SGLang's protocol that sample (server.py); 0 for the embedded engine."""
    pairs: bool = False
    """Whether faults come two at a time."""
    steps: int = 80
    """Of a course, after which no fault is injected any more. It has further ones in reserve
    (``course.RESERVED_STEPS``), and the schedule of the learning rate depends on both."""
    faults_per_course: int = 12
    """After which a course is stopped and examined, and a new one begins."""
    stopped_seconds: float = 20.0
    """Between SIGSTOP and SIGCONT."""
    starved_seconds: float = 10.0
    """That busy loops run."""
    patience: float = 60.0
    """Seconds until a fault must have healed or ended the run, on a machine that is not
    overloaded."""
    minutes: float = 60.0
    """After the first step, after which no fault is injected any more."""
    fewest: int = 0
    """Faults that are injected however long it takes."""
    tolerance: float = 0.0
    """By which a loss may differ from the undisturbed run's."""
    deterministic: bool = True
    """Whether the engine's numbers do not depend on timing; without it, tolerate 1e-7."""

    reference_follows: bool = False
    """Whether the undisturbed run begins when the first course has ended, instead of going on beside it.
    It then ends where the course did; what a fault does to a loss is seen only at the end."""

    def limit(self) -> float:
        """Return the patience in seconds that the machine's load asks for now: twice as much where
        two processes wait for each core."""
        load, _, _ = os.getloadavg()
        return self.patience * max(1.0, load / (os.cpu_count() or 1))
