"""Undisturbed reference run, which runs concurrently with the disturbed ones or after the first."""

import time
from pathlib import Path

from tests.faults.checks import compare_episodes
from tests.faults.observed_run import Attempt, Numbers, ObservedRun
from tests.faults.options import Options


class Reference:
    """A run without faults."""

    def __init__(self, options: Options, directory: Path) -> None:
        self._options = options
        self._run = ObservedRun(options, directory / "undisturbed")
        self._attempt: Attempt | None = None
        if not options.reference_follows:
            self._attempt = self._run.start()
        self._curve: dict[int, Numbers] = {}

    def curve(self) -> dict[int, Numbers]:
        """Return the numbers of completed steps, by step. Raises SystemExit if the run failed."""
        if self._curve or self._attempt is None:
            return self._curve
        if not self._attempt.has_ended:
            return self._run.curve()

        if self._attempt.driver.returncode != 0:
            raise SystemExit(f"the undisturbed run failed:\n{self._attempt.output[-3000:]}")
        problem = compare_episodes(self._run)
        if problem:
            raise SystemExit(f"the undisturbed run: {problem}")
        self._curve = self._run.curve()
        return self._curve

    def up_to(self, step: int) -> dict[int, Numbers]:
        """Wait until ``step`` is recorded, and return all numbers."""
        if self._attempt is None:
            self._attempt = self._run.start()
        while step not in self.curve():
            if self._attempt.has_ended and step not in self.curve():
                raise SystemExit(f"the undisturbed run has no step {step}")
            time.sleep(0.5)
        return self.curve()

    def close(self) -> None:
        """End the run if it is still running."""
        self._run.close()
