"""Both sets of a certificate's weights, and summaries of check results."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rl_loop.certify.certificate import CheckOutcome, CheckResult
from rl_loop.certify.examination import Examination, ResultCache
from rl_loop.certify.model import Precision, WeightSet, vocabulary
from rl_loop.certify.run import run_checks, special_ids
from rl_loop.certify.subject import CertifySubject
from rl_loop.certify.texts import ProbeTexts


@dataclass(repr=False)
class Prepared:
    """Both sets of tiny weights."""

    directory: Path
    precision: Precision
    first: WeightSet
    second: WeightSet
    memory: ResultCache = field(default_factory=ResultCache)

    def examine(self, subject: CertifySubject, *only: str) -> dict[str, CheckResult]:
        """Run the checks. All tests share the reference's results."""
        words = vocabulary()
        texts = ProbeTexts(self.first.config, special_ids(words, self.first.config))
        exam = Examination(subject, self.first, self.second, self.precision, texts, words)
        exam.memory = self.memory
        return {result.name: result for result in run_checks(exam, only)}


def causes(results: dict[str, CheckResult]) -> set[str]:
    return {cause.name for result in results.values() for cause in result.causes}


def failed(results: dict[str, CheckResult]) -> set[str]:
    return {name for name, result in results.items() if result.status is CheckOutcome.FAILED}
