"""Both sets of the checks' weights, and summaries of check results."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rl_loop.certify.check_run import CheckRun, ResultCache
from rl_loop.certify.implementation import ModelImplementation
from rl_loop.certify.model import Precision, WeightSet, vocabulary
from rl_loop.certify.probe_sequences import ProbeSequences
from rl_loop.certify.report import CheckOutcome, CheckResult
from rl_loop.certify.run import run_checks, special_ids


@dataclass(repr=False)
class Prepared:
    """Both sets of tiny weights."""

    directory: Path
    precision: Precision
    first: WeightSet
    second: WeightSet
    memory: ResultCache = field(default_factory=ResultCache)

    def run_checks(self, implementation: ModelImplementation, *only: str) -> dict[str, CheckResult]:
        """Run the checks. All tests share the reference's results."""
        words = vocabulary()
        sequences = ProbeSequences(self.first.config, special_ids(words, self.first.config))
        check_run = CheckRun(
            implementation, self.first, self.second, self.precision, sequences, words
        )
        check_run.memory = self.memory
        return {result.name: result for result in run_checks(check_run, only)}


def causes(results: dict[str, CheckResult]) -> set[str]:
    return {cause.name for result in results.values() for cause in result.causes}


def failed(results: dict[str, CheckResult]) -> set[str]:
    return {name for name, result in results.items() if result.status is CheckOutcome.FAILED}
