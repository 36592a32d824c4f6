"""External worlds that are restored by replaying actions, and parsing of a policy's calls."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from rl_loop.environments.base import RewardConfig, StepResult
from rl_loop.environments.replayed import (
    ATTEMPTS,
    ReplayedEnvironment,
    ReplayedOptions,
    ToolServerLostError,
)
from rl_loop.environments.row_tasks import row_task
from rl_loop.environments.tool_calls import (
    ToolError,
    UnknownToolError,
    parse_arguments,
    parse_recipient,
)
from rl_loop.infrastructure import InfrastructureError


class Counting(ReplayedEnvironment[ReplayedOptions]):
    """World that adds numbers. The first addition of 13 succeeds, then the connection is lost."""

    Options: ClassVar = ReplayedOptions

    def __init__(self) -> None:
        task = row_task("counting", {"prompt": "Count."}, "t", ReplayedOptions())
        super().__init__(task, None, RewardConfig())  # type: ignore[arg-type]
        self.worlds: list[int] = []
        self._is_open = False
        self._was_lost = False

    async def connect(self) -> None:
        self.worlds.append(0)
        self._is_open = True

    async def disconnect(self) -> None:
        self._is_open = False

    @property
    def is_connected(self) -> bool:
        return self._is_open

    async def do(self, action: int) -> int:
        self.worlds[-1] += action
        if action == 13 and not self._was_lost:
            self._was_lost = True
            raise InfrastructureError("tool", "lost")
        if action == 666:
            self._is_open = False
            raise ToolServerLostError("tool", "lost in the action")
        return self.worlds[-1]

    async def answer(self, text: str) -> StepResult:
        return self.end_with_score(0.0)


def test_restored_world_is_a_new_one_with_the_actions_replayed() -> None:
    async def run() -> list[int]:
        environment = Counting()
        await environment.act(1)
        state = environment.save_state()
        assert await environment.act(2) == 3
        environment.restore_state(state)
        assert await environment.act(5) == 6
        # The world is replayed once. The next action continues in it.
        assert await environment.act(1) == 7
        return environment.worlds

    assert asyncio.run(run()) == [3, 7]


def test_action_after_a_failure_runs_in_a_new_world() -> None:
    async def run() -> list[int]:
        environment = Counting()
        await environment.act(1)
        with pytest.raises(InfrastructureError, match="lost"):
            await environment.act(13)
        assert environment.is_connected
        assert await environment.act(2) == 3
        return environment.worlds

    assert asyncio.run(run()) == [14, 3]


def test_action_that_ends_every_world_is_a_policy_error() -> None:
    async def run() -> list[int]:
        environment = Counting()
        await environment.act(1)
        for _ in range(ATTEMPTS - 1):
            with pytest.raises(ToolServerLostError):
                await environment.act(666)
        with pytest.raises(ToolError, match="ended the server"):
            await environment.act(666)
        # The failed action is not part of the world in which the episode continues.
        assert await environment.act(2) == 3
        # Attempts are counted separately for each action of the episode.
        with pytest.raises(ToolServerLostError):
            await environment.act(666)
        return environment.worlds

    assert asyncio.run(run()) == [667] * ATTEMPTS + [669]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{amount", "the arguments are not JSON"),
        ("[" * 100_000, "the arguments are not JSON"),
        ("[1]", "the arguments must be a JSON object"),
        ("null", "the arguments must be a JSON object"),
        ('{"a": NaN}', "NaN is not a number of JSON"),
        ('{"a": [-Infinity]}', "-Infinity is not a number of JSON"),
        ('{"a": 1e999}', "1e999 is too large a number"),
        ('{"a": ' + "9" * 5000 + "}", "the arguments are not JSON"),
        (r'{"a": "\ud800"}', "the arguments are not JSON"),
        (r'{"\udfff": 1}', "the arguments are not JSON"),
        ('{"a": ' + "[" * 64 + "]" * 64 + "}", "the arguments have more than 64 levels"),
    ],
)
def test_invalid_arguments_are_reported_to_the_policy(text: str, said: str) -> None:
    with pytest.raises(ToolError, match=said):
        parse_arguments(text)


def test_only_function_namespace_calls_are_executed() -> None:
    assert parse_recipient("functions.balance") == "balance"
    for recipient in ("balance", "python", "browser.balance", "functions"):
        with pytest.raises(UnknownToolError):
            parse_recipient(recipient)


def test_environment_has_the_row_of_its_task() -> None:
    environment: Any = Counting()
    assert environment.row == {"prompt": "Count."}
    assert environment.can_be_restored
    assert environment.save_state() == []
