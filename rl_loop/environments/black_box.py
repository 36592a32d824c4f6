"""Tasks of agents that are programs of their own: they talk to the policy over HTTP, as to any model
of OpenAI's, and say what an episode earned.

``rl_loop.agents`` plays the episodes; docs/agents.md shows how to bring an agent."""

import shutil
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rl_loop.environments.base import (
    AgentProgram,
    Environment,
    EnvironmentOptions,
    Execute,
    RewardConfig,
    Split,
    StepResult,
    Task,
)
from rl_loop.environments.reward_parts import check_parts, read_parts, with_parts
from rl_loop.environments.row_tasks import check_function, generated_row, row_of, row_task
from rl_loop.infrastructure import InfrastructureFailure


class BlackBoxOptions(EnvironmentOptions):
    agent: str
    """``run(task, base_url, api_key)`` as MODULE:FUNCTION, plain or async. It returns the score (1
    is perfect, 0 is what doing nothing earns), a dictionary of the score and further ``parts``, or
    None if it was rewarded over HTTP. Whatever it raises is an infrastructure failure, unless the
    policy had used up a limit or written an illegal message."""
    tasks: str | None = None
    """``tasks(split, seed, index)`` as MODULE:FUNCTION: generates task ``index`` of "train" or
    "held_out", a JSON object with the text ``prompt``. null: rows of train_path and held_out_path."""
    parts: list[str] = Field(default_factory=list)
    """What the agent returns besides "score"; an episode that ends otherwise has 0 of them."""
    history: Literal["append", "harmony"] = "append"
    """What stands before a turn that follows a final answer: every token so far, or what the format
    keeps of them, which begins another sequence (docs/gateway.md)."""
    concurrency: int = Field(64, gt=0)
    """Episodes of this agent that one rollout worker runs at a time; more wait."""
    memory_gb: float = Field(8.0, gt=0)
    """Of the process that runs these episodes: what it allocates beyond that is a MemoryError."""
    python: str | None = None
    """Another interpreter to run the agent with, such as agents/.venv/bin/python, whose packages need
    not fit to those of this project; null for the trainer's. Then nobody knows before the run whether
    the agent can be imported."""

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, path: str | None) -> str | None:
        return check_function(path)

    @model_validator(mode="after")
    def _check_agent(self) -> Self:
        if self.python is None:
            check_function(self.agent)
        elif shutil.which(self.python) is None:
            raise ValueError(f"python: there is no program {self.python}")
        return self

    @field_validator("parts")
    @classmethod
    def _check_parts(cls, parts: list[str]) -> list[str]:
        return check_parts(parts)


class BlackBoxEnvironment(Environment):
    """What an episode of such an agent earns. The agent plays it; nothing is called but the ends."""

    Options: ClassVar[type[EnvironmentOptions]] = BlackBoxOptions
    IS_PLAYED_BY_PROGRAM = True

    def __init__(self, task: Task, execute: Execute, reward: RewardConfig) -> None:
        """Raises ValueError for a task that was made otherwise than by this class."""
        super().__init__(task, execute, reward)
        self.row = row_of(task)
        self.options = BlackBoxOptions.model_construct(**task.metadata["options"])

    def program(self) -> AgentProgram:
        return AgentProgram(
            function=self.options.agent,
            task=self.row,
            history=self.options.history,
            concurrency=self.options.concurrency,
            memory_bytes=int(self.options.memory_gb * 1e9),
            python=self.options.python,
        )

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        row = generated_row(options.tasks, split, seed, index)
        return cls.from_record(row, f"{split}-{index}", options)

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task:
        return row_task("black_box", record, name, options)

    async def answer(self, text: str) -> StepResult:
        raise InfrastructureFailure("environment", "an agent of its own judges its episodes itself")

    def earned(self, given: object) -> StepResult:
        numbers = read_parts(given, self.options.parts, self.options.agent)
        return with_parts(self.finished(numbers["score"]), numbers)

    def unfinished(self) -> StepResult:
        return with_parts(self.finished(0.0), dict.fromkeys(self.options.parts, 0.0))
