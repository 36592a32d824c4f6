"""Cost of an external agent: the same episodes in the agent loop and through the gateway.

    # after configs/sft/tiny_clerk.yaml
    PYTHONPATH=. python -m benchmarks.learning agents runs/tiny_clerk_sft

Needs no GPU. Runs the clerk of examples/clerk_agent.py, a process that uses OpenAI's API, and the
same task as an environment of the agent loop. Both use one engine in this process with the weights
of the run. They alternate, so that other load on the machine affects both. Tasks and seeds are
equal, and the name of a request is its seed. The episodes must agree token for token.

Prints JSON. The first repetition is not counted.

    loop_ms, agent_ms     per episode, median of the repetitions
    ratio                 agent_ms over loop_ms, also the least and largest of a repetition
    loop_processor_ms, agent_processor_ms
                          processor time per episode, mean of the repetitions, by part: the engine's
                          thread, the event loop (agent loop or gateway), other threads of this
                          process, the agent's process, all
    processor_ratio       ratio of the total processor times

Use processor time on a machine with other load, and wall time on an idle machine.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from examples import clerk_agent
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.conversations.tool_descriptions import read_tools
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.environments import Environment, StepResult, Task
from rl_loop.evaluation.evaluate import load_weights
from rl_loop.harmony.codec import Tool
from rl_loop.rollout.group_stream import GroupRequest
from tests.support.in_process import LocalRollouts

CONFIG = Path(__file__).parents[2] / "configs/rl/tiny_clerk.yaml"
PARTS = {"rollout-engine": "engine", "rollouts": "event_loop"}
"""Part of the processor time by prefix of a thread's name. The rest is "other_threads"."""


@dataclass
class Times:
    """Times of all repetitions with one kind of agent."""

    milliseconds: list[float] = field(default_factory=list)
    """Wall time per episode in milliseconds, one entry per repetition."""
    processor: Counter[str] = field(default_factory=Counter)
    """Processor time per episode in milliseconds, summed over repetitions, by part."""

    def add(self, seconds: float, processor: dict[str, float], episodes: int) -> None:
        """Add a repetition.

        Args:
            seconds: wall time of all episodes.
            processor: processor seconds of all episodes, by part.
            episodes: number of episodes.
        """
        self.milliseconds.append(1e3 * seconds / episodes)
        self.processor.update({part: 1e3 * s / episodes for part, s in processor.items()})

    def processor_ms(self) -> dict[str, float]:
        """Return the mean milliseconds per episode by part, and their sum ("all")."""
        parts = {part: ms / len(self.milliseconds) for part, ms in sorted(self.processor.items())}
        return {part: round(ms, 2) for part, ms in {**parts, "all": sum(parts.values())}.items()}


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
        environment = "benchmarks.learning.agents:ClerkEnvironment"
        return Task(name, messages, str(record["price"]), environment, record)

    def tools(self) -> Sequence[Tool]:
        return read_tools([clerk_agent.PRICE_LIST])

    async def call(self, tool: str, arguments: str) -> str:
        return clerk_agent.look_up(arguments, self.task.metadata)

    async def answer(self, text: str) -> StepResult:
        right = clerk_agent.right_answer(self.task.metadata["item"], self.task.metadata["price"])
        return self.end_with_score(float(text == right))


def build_requests(config: RlConfig, repetition: int, *, by_agent: bool) -> list[GroupRequest]:
    """Return the requests for the episodes of one training step.

    Args:
        config: configuration of the run.
        repetition: number of the repetition, which selects the tasks.
        by_agent: whether the external agent runs the episodes.
    """
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


def processor_seconds() -> dict[str, float]:
    """Return the processor seconds until now by part, including the agents' processes."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    parts: Counter[str] = Counter()
    for thread_id in os.listdir("/proc/self/task"):
        name = names.get(int(thread_id), "")
        part = next((p for begin, p in PARTS.items() if name.startswith(begin)), "other_threads")
        parts[part] += _seconds_run(f"/proc/self/task/{thread_id}")

    for child in psutil.Process().children():
        # Processes of the sandbox are not counted.
        if any("rl_loop.agents.host" in argument for argument in child.cmdline()):
            for thread_id in os.listdir(f"/proc/{child.pid}/task"):
                parts["agent_process"] += _seconds_run(f"/proc/{child.pid}/task/{thread_id}")
    return parts


def _seconds_run(task: str) -> float:
    """Return the processor seconds of a thread by its directory in /proc; 0 if it has ended."""
    try:
        return int(Path(task, "schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def check_equal(loop: list[TrajectoryGroup], agent: list[TrajectoryGroup]) -> None:
    """Check that all episodes have the same tokens, loss masks and rewards.

    Raises:
        SystemExit: with the first difference.
    """
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


def compare(run: Path, repetitions: int, overrides: list[str]) -> dict[str, Any]:
    """Run the same tasks in the agent loop and by the agent, alternating.

    Args:
        run: run directory or checkpoint with the weights.
        repetitions: repetitions of both. The first one is not counted.
        overrides: KEY=VALUE of the configuration.
    """
    config = load_config(CONFIG, RlConfig, overrides)
    episodes = config.rollout.tasks_per_step * config.rollout.samples_per_task
    weights = load_weights(run / "export" if (run / "export").exists() else run, config.dtype)

    rollouts = LocalRollouts(config)
    times = {False: Times(), True: Times()}
    try:
        rollouts.sync_weights(weights, 0)
        for repetition in range(repetitions):
            groups = {}
            # The order alternates, too.
            for by_agent in (False, True) if repetition % 2 == 0 else (True, False):
                requests = build_requests(config, repetition, by_agent=by_agent)
                # A sync clears the engine's cache, which has the same prompts from the other run.
                rollouts.sync_weights(weights, 0)
                before, began = processor_seconds(), time.perf_counter()
                groups[by_agent] = rollouts.run(requests)
                seconds, after = time.perf_counter() - began, processor_seconds()
                if repetition > 0:
                    processor = {part: after[part] - before[part] for part in after}
                    times[by_agent].add(seconds, processor, episodes)
            check_equal(groups[False], groups[True])
    finally:
        rollouts.close()
    return build_report(times[False], times[True], episodes)


def build_report(loop: Times, agent: Times, episodes: int) -> dict[str, Any]:
    """Return the comparison of both kinds of agents."""
    ratios = [b / a for a, b in zip(loop.milliseconds, agent.milliseconds, strict=True)]
    loop_ms, agent_ms = map(statistics.median, (loop.milliseconds, agent.milliseconds))
    loop_processor, agent_processor = loop.processor_ms(), agent.processor_ms()
    return {
        "episodes": episodes,
        "repetitions": len(ratios),
        "loop_ms": round(loop_ms, 2),
        "agent_ms": round(agent_ms, 2),
        "ratio": round(agent_ms / loop_ms, 3),
        "ratio_least": round(min(ratios), 3),
        "ratio_largest": round(max(ratios), 3),
        "loop_processor_ms": loop_processor,
        "agent_processor_ms": agent_processor,
        "processor_ratio": round(agent_processor["all"] / loop_processor["all"], 3),
    }


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "run", type=Path, help="run of configs/sft/tiny_clerk.yaml, or a checkpoint"
    )
    parser.add_argument(
        "--repetitions", type=int, default=6, help="of both; the first is not counted"
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.repetitions < 2:
        parser.error("--repetitions: at least 2, because the first is not counted")
    print(json.dumps(compare(**vars(options))))
