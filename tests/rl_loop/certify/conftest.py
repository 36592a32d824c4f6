"""Fixtures: the weights of the checks and the answers of the reference, made once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rl_loop.certify.model import Precision, prepare
from rl_loop.certify.run import open_weights
from tests.support.rl_loop.certify.prepared import Prepared


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
