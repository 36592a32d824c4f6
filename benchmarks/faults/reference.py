"""The undisturbed run, which goes on beside the disturbed ones."""

import time
from pathlib import Path

from benchmarks.faults.checks import compare_episodes
from benchmarks.faults.course import Course
from benchmarks.faults.options import Options


class Reference:
    """A run that nothing happens to."""

    def __init__(self, options: Options, directory: Path) -> None:
        self._options = options
        self._course = Course(options, directory / "undisturbed")
        self._attempt = self._course.start()
        self._losses: dict[int, float] = {}

    def losses(self) -> dict[int, float]:
        """Return the losses of the steps that are done, by step. Raises SystemExit if it failed."""
        if self._losses:
            return self._losses
        if not self._attempt.has_ended:
            return self._course.losses()

        if self._attempt.driver.returncode != 0:
            raise SystemExit(f"the undisturbed run failed:\n{self._attempt.said[-3000:]}")
        problem = compare_episodes(self._course)
        if problem:
            raise SystemExit(f"the undisturbed run: {problem}")
        self._losses = self._course.losses()
        return self._losses

    def up_to(self, step: int) -> dict[int, float]:
        """Wait until ``step`` is recorded, and return all losses."""
        while step not in self.losses():
            if self._attempt.has_ended and step not in self.losses():
                raise SystemExit(f"the undisturbed run has no step {step}")
            time.sleep(0.5)
        return self.losses()

    def close(self) -> None:
        """End the run, if it goes on."""
        self._attempt.kill_everything()
