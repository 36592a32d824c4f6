"""Hostile commands: each is contained, and the sandbox works afterwards."""

from __future__ import annotations

import platform
import re

import pytest

from tests.support.rl_loop.sandbox.shell_attacks import ATTACKS, LIMITS, Attack
from tests.support.rl_loop.sandbox.shells import Shells

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the attacks use system calls of x86_64"
)


def failures(shells: Shells, attack: Attack) -> list[str]:
    """Run an attack in a new sandbox, and return what it achieved."""
    found = []
    with shells.open(**LIMITS) as shell:
        result = shell.run(attack.command, seconds=attack.seconds, persistent=attack.persistent)
        if result.killed_for not in attack.killed_for:
            found.append(f"killed for {result.killed_for}, not {attack.killed_for}")
        if attack.expected and not re.search(attack.expected, result.output, re.MULTILINE):
            found.append(f"{attack.expected!r} is missing: {result.output[-500:]!r}")
        if attack.absent and re.search(attack.absent, result.output):
            found.append(f"{attack.absent!r} was found: {result.output[-500:]!r}")
        # A full process table is the command's fault, and ends with its processes.
        shell.wait_for(shell.sandbox.end_processes())
        for persistent in (False, True):
            after = shell.run("echo ok", persistent=persistent)
            if not after.output.endswith("ok\n") or after.exit_code != 0:
                found.append(f"the sandbox does not work afterwards: {after}")
        if shell.wait_for(shell.sandbox.usage()).processes > 1:
            found.append("processes are left")
    return found


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_contained(name: str, shells: Shells) -> None:
    assert not failures(shells, ATTACKS[name])
