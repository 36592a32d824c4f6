"""Lookup of environments. Classes with wrong signatures are rejected before the start."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from rl_loop.environments import (
    Environment,
    RewardConfig,
    ScriptedPolicy,
    Task,
    environment_class,
    make_offline_environment,
)
from rl_loop.environments.scripted_messages import final
from rl_loop.infrastructure import InfrastructureError


class OldScript(Environment):
    @classmethod
    def solve(cls, task: Task, rng: Random, careless: bool) -> ScriptedPolicy:
        yield [final("1")]


class CallWithoutArguments(Environment):
    async def call(self, tool: str) -> str:
        return "done"


class OtherNames(Environment):
    """Environment with other names of positional arguments, and with optional arguments."""

    async def call(self, name: str, text: str, more: int = 0) -> str:
        return "done"

    async def answer(self, *texts: str) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "OldScript",
            r"OldScript: solve\(task: .*must take \(task, rng, inject_errors\): "
            "missing a .* 'careless'",
        ),
        (
            "CallWithoutArguments",
            r"call\(self, tool: .*must take \(self, tool, arguments\): too many positional",
        ),
    ],
)
def test_environment_class_with_wrong_signature_is_rejected(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        environment_class(f"{__name__}:{name}")


def test_environment_methods_may_name_arguments_differently() -> None:
    assert environment_class(f"{__name__}:OtherNames") is OtherNames


def test_scripted_policy_without_python_is_rejected_with_reason() -> None:
    class Calls(Environment):
        async def call(self, tool: str, arguments: str) -> str:
            return (await self.execute(arguments)).output

    environment = Calls(Task("t", [], ""), Calls.simulate_python, RewardConfig())
    from rl_loop.harmony.codec import ParsedMessage

    with pytest.raises(
        InfrastructureError,
        match=r"Calls\.solve calls Python, which needs Calls\.simulate_python",
    ):
        asyncio.run(environment.step([ParsedMessage("analysis", "python", "code", "print(1)")]))


def test_offline_environment_runs_programs_of_scripted_policies() -> None:
    environment = make_offline_environment(Task("t", [{"role": "user", "content": "1+1?"}], "2"))
    assert asyncio.run(environment.execute("print(2*(3+4))")).output == "14\n"
