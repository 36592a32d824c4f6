"""A running sandbox for the tests, and a view of the processes that it leaves on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest

from rl_loop.sandbox import SandboxConfig, SandboxLimits
from tests.support.rl_loop.sandbox.under_test import SandboxUnderTest


@pytest.fixture(scope="module")
def make_sandbox() -> Iterator[Callable[..., SandboxUnderTest]]:
    """Start sandboxes with some settings; equal settings give the same one. All are closed at the end of the module.

    Where isolation is not available this fails with the reason: the suite never passes without having attacked.
    """
    made: dict[tuple[SandboxConfig, SandboxLimits], SandboxUnderTest] = {}
    names = {field.name for field in fields(SandboxLimits)}

    def make(**settings: Any) -> SandboxUnderTest:
        limits = SandboxLimits(**{name: settings.pop(name) for name in names & set(settings)})
        key = SandboxConfig.model_validate({"workers": 1, **settings}), limits
        if key not in made:
            made[key] = SandboxUnderTest(*key)
        return made[key]

    yield make
    for sandbox in made.values():
        sandbox.close()
