"""A custom environment: pay an amount with as few coins as possible.

    python examples/custom_environment.py

runs scripted episodes, without a model, Ray or a GPU. To train on it, name the class in a
configuration, with this folder in PYTHONPATH (docs/environments.md has a complete run):

    tasks: {sources: {coins: {environment: "custom_environment:CoinEnvironment"}}}
"""

import asyncio
import random
from typing import Any

from rl_loop.environments import (
    Environment,
    EnvironmentOptions,
    RewardConfig,
    StepResult,
    Task,
    ToolError,
    UnknownToolError,
)
from rl_loop.environments.base import ScriptedPolicy, Split
from rl_loop.environments.scripted_messages import final, function_call
from rl_loop.environments.tool_calls import parse_arguments
from rl_loop.harmony.codec import Tool

COINS = (8, 5, 1)
"""Coins for which taking the largest coin first is often wrong: 10 is 5 + 5."""


def fewest_coins(amount: int) -> list[int]:
    """Return the shortest list of coins with the sum ``amount``."""
    best: list[list[int]] = [[]]
    for total in range(1, amount + 1):
        best.append(min(([coin, *best[total - coin]] for coin in COINS if coin <= total), key=len))
    return best[amount]


class CoinOptions(EnvironmentOptions):
    """Options in ``tasks.sources.NAME.options``."""

    largest: int = 40
    """Largest amount to pay."""


class CoinEnvironment(Environment):
    """One episode: the agent pays coin by coin with a tool, then answers the number of coins."""

    Options = CoinOptions

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.paid: list[int] = []

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: CoinOptions) -> Task:
        """Return a task that depends only on the arguments, so that resumed runs repeat it."""
        amount = random.Random(f"{split}/{seed}/{index}").randint(1, options.largest)
        text = f"Pay {amount} with as few coins of {COINS} as possible. How many did you need?"
        messages = [{"role": "user", "content": text}]
        return Task(f"{split}-{index}", messages, ground_truth=str(amount))

    def tools(self) -> list[Tool]:
        """Describe the tool to the agent, in the developer message."""
        coin = {
            "type": "object",
            "properties": {"coin": {"enum": list(COINS)}},
            "required": ["coin"],
        }
        return [Tool("pay", "Pays one coin and says what remains.", coin)]

    async def call(self, tool: str, arguments: str) -> str:
        """Run one call. The agent sees a ToolError. Other exceptions are not its fault."""
        if tool != "functions.pay":
            raise UnknownToolError
        coin = parse_arguments(arguments).get("coin")
        if coin not in COINS:
            raise ToolError(f"there are coins of {COINS} only")
        if coin > self.remaining:
            raise ToolError(f"{coin} is too much: {self.remaining} remain")

        self.paid.append(coin)
        return f"{self.remaining} remain"

    async def answer(self, text: str) -> StepResult:
        """Score 1 for the fewest coins, less for more of them, 0 if the amount is not paid."""
        if self.remaining > 0 or text.strip() != str(len(self.paid)):
            return self.end_truncated()
        best = len(fewest_coins(int(self.task.ground_truth)))
        return self.end_with_score(
            score=best / len(self.paid), answer=text.strip(), coins=len(self.paid)
        )

    def end_truncated(self) -> StepResult:
        """Score an episode without an answer. It has all reward parts, as every end must."""
        return self.end_with_score(score=0.0, coins=len(self.paid))

    @property
    def remaining(self) -> int:
        return int(self.task.ground_truth) - sum(self.paid)

    @classmethod
    def solve(cls, task: Task, rng: random.Random, inject_errors: bool) -> ScriptedPolicy:
        """Solve a task as an expert, or greedily with ``inject_errors``, for ``gptoss sft``."""
        amount = int(task.ground_truth)
        coins = sorted(COINS * amount, reverse=True) if inject_errors else fewest_coins(amount)
        count = 0
        for coin in coins:
            result = yield [function_call("pay", coin=coin)]
            count += 1 - result.tool_errors
        yield [final(str(count))]


async def play(task: Task, inject_errors: bool) -> StepResult:
    """Run one episode by script, as the agent loop runs it with a model's turns."""
    # The environment has no Python tool, so it needs no sandbox.
    environment = CoinEnvironment(task, execute=None, reward=RewardConfig())
    script = CoinEnvironment.solve(task, random.Random(0), inject_errors)
    result = await environment.step(next(script))
    while not result.done:
        result = await environment.step(script.send(result))
    return result


def main() -> None:
    for index in range(4):
        task = CoinEnvironment.generate("train", 0, index, CoinOptions())
        print(task.messages[0]["content"])
        for script, inject_errors in {"expert": False, "greedy": True}.items():
            result = asyncio.run(play(task, inject_errors))
            print(
                f"  {script}: {result.reward_parts['coins']:.0f} coins, reward {result.reward:+.2f}"
            )


if __name__ == "__main__":
    main()
