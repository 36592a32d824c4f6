"""Running sandboxes for the tests, which also show the processes left on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest

from rl_loop.sandbox import SandboxConfig, SandboxLimits
from tests.support.rl_loop.sandbox.under_test import SandboxUnderTest


@pytest.fixture(scope="module")
def make_sandbox() -> Iterator[Callable[..., SandboxUnderTest]]:
    """Return a function that starts a sandbox with some settings, or returns an equal one.

    All sandboxes close at the end of the module. If isolation is not available, the fixture fails
    with the reason, so the suite cannot pass without attacks.
    """
    made: dict[tuple[SandboxConfig, SandboxLimits], SandboxUnderTest] = {}
    names = {field.name for field in fields(SandboxLimits)}

    def make(**settings: Any) -> SandboxUnderTest:
        limits = SandboxLimits(**{name: settings.pop(name) for name in names & set(settings)})
        key = SandboxConfig.model_validate({"servers": 1, **settings}), limits
        if key not in made:
            made[key] = SandboxUnderTest(*key)
        return made[key]

    yield make
    for sandbox in made.values():
        sandbox.close()
