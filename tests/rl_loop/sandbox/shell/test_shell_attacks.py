"""Hostile commands: each is contained, and the sandbox works afterwards."""

from __future__ import annotations

import platform

import pytest

from tests.support.rl_loop.sandbox.shell_attacks import ATTACKS, failures
from tests.support.rl_loop.sandbox.shells import Shells

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the attacks use system calls of x86_64"
)


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_contained(name: str, shells: Shells) -> None:
    assert not failures(shells, ATTACKS[name])
