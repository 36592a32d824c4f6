"""What an agent of its own costs: the same episodes by the agent loop, and through the gateway.

    PYTHONPATH=. python benchmarks/agents.py runs/tiny_clerk_sft       # after configs/sft/tiny_clerk.yaml

The clerk of examples/clerk_agent.py, a process that talks OpenAI's API, and beside it the same task as an environment
of the agent loop. Both have one engine in this process with the weights of the run, and take turns, so that whatever
else the machine does strikes both. Tasks and seeds are the same, and a request's seed is its name: the episodes are
compared token for token before any time counts. Printed as JSON, of the repetitions behind the first:

    loop_ms, agent_ms     per episode, median of the repetitions
    ratio                 of these, and its least and largest among the pairs
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from benchmarks.in_process import LocalRollouts
from examples import clerk_agent
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.conversations.formats import read_tools
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.environments import Environment, StepResult, Task
from rl_loop.evaluation.evaluate import load_weights
from rl_loop.harmony.codec import Tool
from rl_loop.rollout.group_stream import GroupRequest

CONFIG = Path(__file__).parents[1] / "configs/rl/tiny_clerk.yaml"


class ClerkEnvironment(Environment):
    """The clerk's task for the agent loop."""

    @classmethod
    def generate(cls, split: Any, seed: int, index: int, options: Any) -> Task:
        return cls.of(clerk_agent.tasks(split, seed, index), f"{split}-{index}")

    @classmethod
    def of(cls, record: dict[str, Any], name: str) -> Task:
        messages = [
            {"role": "developer", "content": clerk_agent.INSTRUCTIONS},
            {"role": "user", "content": record["prompt"]},
        ]
        environment = "benchmarks.agents:ClerkEnvironment"
        return Task(name, messages, str(record["price"]), environment, record)

    def tools(self) -> Sequence[Tool]:
        return read_tools([clerk_agent.PRICE_LIST])

    async def call(self, tool: str, arguments: str) -> str:
        return clerk_agent.look_up(arguments, self.task.metadata)

    async def answer(self, text: str) -> StepResult:
        right = clerk_agent.told_price(self.task.metadata["item"], self.task.metadata["price"])
        return self.finished(float(text == right))


def requests_of(config: RlConfig, repetition: int, *, by_agent: bool) -> list[GroupRequest]:
    """Ask for the episodes of one training step."""
    options = config.tasks.sources["clerk"].options
    environment_class = _black_box() if by_agent else ClerkEnvironment
    requests = []
    for i in range(config.rollout.tasks_per_step):
        index = repetition * config.rollout.tasks_per_step + i
        task = environment_class.generate(
            "train", 0, index, environment_class.Options.model_validate(options if by_agent else {})
        )
        seeds = tuple(range(config.rollout.samples_per_task))
        requests.append(GroupRequest(task, seeds, config.rollout.temperature))
    return requests


def _black_box() -> type[Environment]:
    from rl_loop.environments import environment_class

    return environment_class("black_box")


def check_equal(loop: list[TrajectoryGroup], agent: list[TrajectoryGroup]) -> None:
    """Raise SystemExit if an episode is not the same token for token, with the same log-probs and reward."""
    for ours, theirs in zip(loop, agent, strict=True):
        if ours.invalid or theirs.invalid:
            raise SystemExit(f"invalid: {[e.invalid for e in [*ours.invalid, *theirs.invalid]]}")
        for a, b in zip(ours.trajectories, theirs.trajectories, strict=True):
            same_tokens = a.token_ids.tolist() == b.token_ids.tolist()
            same_mask = a.loss_mask.tolist() == b.loss_mask.tolist()
            if not (same_tokens and same_mask and a.reward == b.reward and not b.branches):
                raise SystemExit(
                    f"task {a.task_id}: the episodes differ:\n{a.turns}\n{b.turns}\n{a.reward} {b.reward}"
                )


def main(
    run: Annotated[Path, Argument(help="A run of configs/sft/tiny_clerk.yaml, or a checkpoint.")],
    repetitions: Annotated[int, Option(min=2, help="Of both; the first is not counted.")] = 6,
    overrides: Annotated[
        list[str] | None, Option("--set", help="KEY=VALUE of the configuration.")
    ] = None,
) -> None:
    config = load_config(CONFIG, RlConfig, overrides or [])
    episodes = config.rollout.tasks_per_step * config.rollout.samples_per_task
    weights = load_weights(run / "export" if (run / "export").exists() else run, config.dtype)

    rollouts = LocalRollouts(config)
    milliseconds: dict[bool, list[float]] = {False: [], True: []}
    try:
        rollouts.sync_weights(weights, 0)
        for repetition in range(repetitions):
            groups = {}
            # Who is first alternates, too.
            for by_agent in (False, True) if repetition % 2 == 0 else (True, False):
                requests = requests_of(config, repetition, by_agent=by_agent)
                # The same prompts as before would be found in the engine's cache.
                rollouts.sync_weights(weights, 0)
                began = time.perf_counter()
                groups[by_agent] = rollouts.run(requests)
                seconds = time.perf_counter() - began
                if repetition > 0:
                    milliseconds[by_agent].append(1e3 * seconds / episodes)
            check_equal(groups[False], groups[True])
    finally:
        rollouts.close()

    loop_ms, agent_ms = milliseconds[False], milliseconds[True]
    ratios = [b / a for a, b in zip(loop_ms, agent_ms, strict=True)]
    report = {
        "episodes": episodes,
        "repetitions": len(ratios),
        "loop_ms": round(statistics.median(loop_ms), 2),
        "agent_ms": round(statistics.median(agent_ms), 2),
        "ratio": round(statistics.median(agent_ms) / statistics.median(loop_ms), 3),
        "ratio_least": round(min(ratios), 3),
        "ratio_largest": round(max(ratios), 3),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    typer.run(main)
