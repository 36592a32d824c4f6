"""The weights of the certificate, made once, and the reference's answers, computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from rl_loop.certify.certificate import CheckResult, Status
from rl_loop.certify.examination import Examination, Memory
from rl_loop.certify.model import Precision, Weights, prepare, vocabulary
from rl_loop.certify.run import open_weights, run_checks, special_ids
from rl_loop.certify.subject import Subject
from rl_loop.certify.texts import Texts


@dataclass(repr=False)
class Prepared:
    """Both sets of tiny weights."""

    directory: Path
    precision: Precision
    first: Weights
    second: Weights
    memory: Memory = field(default_factory=Memory)

    def examine(self, subject: Subject, *only: str) -> dict[str, CheckResult]:
        """Run the checks; the reference's answers are shared by all tests."""
        words = vocabulary()
        texts = Texts(self.first.config, special_ids(words, self.first.config))
        exam = Examination(subject, self.first, self.second, self.precision, texts, words)
        exam.memory = self.memory
        return {result.name: result for result in run_checks(exam, only)}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def prepared_as(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Precision], Prepared]:
    made: dict[Precision, Prepared] = {}

    def make(precision: Precision) -> Prepared:
        if precision not in made:
            directory = tmp_path_factory.mktemp("certify") / precision
            prepare(directory, "tiny", precision)
            first, second = open_weights(directory)
            assert second is not None
            made[precision] = Prepared(directory, precision, first, second)
        return made[precision]

    return make


@pytest.fixture(scope="session")
def prepared(prepared_as: Callable[[Precision], Prepared]) -> Prepared:
    return prepared_as("fp32")


def causes(results: dict[str, CheckResult]) -> set[str]:
    return {cause.name for result in results.values() for cause in result.causes}


def failed(results: dict[str, CheckResult]) -> set[str]:
    return {name for name, result in results.items() if result.status is Status.FAILED}
