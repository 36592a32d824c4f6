"""A running sandbox for the tests, and a view of the processes that it leaves on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rl_loop.sandbox import SandboxConfig
from tests.support.rl_loop.sandbox.under_test import SandboxUnderTest


@pytest.fixture(scope="module")
def make_sandbox() -> Iterator[Callable[..., SandboxUnderTest]]:
    """Start sandboxes with some settings; equal settings give the same one. All are closed at the end of the module.

    Where isolation is not available this fails with the reason: the suite never passes without having attacked.
    """
    made: dict[SandboxConfig, SandboxUnderTest] = {}

    def make(**settings: object) -> SandboxUnderTest:
        config = SandboxConfig.model_validate({"workers": 1, **settings})
        if config not in made:
            made[config] = SandboxUnderTest(config)
        return made[config]

    yield make
    for sandbox in made.values():
        sandbox.close()
