"""Tasks for external agents, which call the policy over HTTP and report the reward.

``rl_loop.agents`` runs the episodes. docs/agents.md shows how to connect an agent.
"""

import shutil
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rl_loop.environments.base import (
    Environment,
    EnvironmentOptions,
    ExternalAgent,
    PythonExecutor,
    RewardConfig,
    Split,
    StepResult,
    Task,
)
from rl_loop.environments.reward_parts import check_parts, read_parts, with_parts
from rl_loop.environments.row_tasks import check_function, generated_task, read_row, row_task
from rl_loop.infrastructure import InfrastructureError


class BlackBoxOptions(EnvironmentOptions):
    agent: str
    """Function ``run(task, base_url, api_key)`` as MODULE:FUNCTION, plain or async. It returns the
    score (1 is perfect, 0 is the score of doing nothing), a dictionary with "score" and ``parts``, or
    None if it sent the reward over HTTP. An exception is an infrastructure failure, unless the policy
    had reached a limit or written a malformed message."""
    tasks: str | None = None
    """Function ``tasks(split, seed, index)`` as MODULE:FUNCTION. It returns task ``index`` of "train"
    or "held_out": a JSON object with the text ``prompt``. null: use rows of train_path and
    held_out_path."""
    parts: list[str] = Field(default_factory=list)
    """Reward parts that the agent returns in addition to "score". Only advantages with
    reward_weights use them. They are 0 in truncated and malformed episodes."""
    history: Literal["append", "harmony"] = "append"
    """Rendering of the history after a final answer. "append" keeps all tokens. "harmony" drops the
    tokens that the format drops, which begins a new sequence (docs/gateway.md)."""
    max_concurrent_episodes: int = Field(64, gt=0)
    """Episodes of this agent that one rollout worker runs at a time."""
    memory_gb: float = Field(8.0, gt=0)
    """Memory limit of the agent's process in GB. Allocations beyond it raise MemoryError."""
    python: str | None = None
    """Interpreter for the agent, such as agents/.venv/bin/python, with packages of its own. Default:
    the trainer's interpreter. With another interpreter the import of the agent is not checked before
    the run."""

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, path: str | None) -> str | None:
        return check_function(path)

    @model_validator(mode="after")
    def _check_agent(self) -> Self:
        # The interpreter of another environment has its own packages, so the agent cannot be
        # imported here.
        if self.python is None:
            check_function(self.agent)
        elif shutil.which(self.python) is None:
            raise ValueError(f"python: {self.python} is not executable. Name a Python interpreter")
        return self

    @field_validator("parts")
    @classmethod
    def _check_parts(cls, parts: list[str]) -> list[str]:
        return check_parts(parts)


class BlackBoxEnvironment(Environment):
    """Rewards of an external agent's episodes.

    The agent runs the episode. Only the methods for its end are called.
    """

    Options: ClassVar[type[EnvironmentOptions]] = BlackBoxOptions
    uses_external_agent = True

    def __init__(self, task: Task, execute: PythonExecutor, reward: RewardConfig) -> None:
        """Raises ValueError if another class created the task."""
        super().__init__(task, execute, reward)
        self.row = read_row(task)
        # The options were validated when the task was made, so do not import the agent again.
        self.options = BlackBoxOptions.model_construct(**task.metadata["options"])

    def external_agent(self) -> ExternalAgent:
        return ExternalAgent(
            function=self.options.agent,
            task=self.row,
            history=self.options.history,
            max_concurrent_episodes=self.options.max_concurrent_episodes,
            # Limits of processes are in bytes.
            memory_bytes=int(self.options.memory_gb * 1e9),
            python=self.options.python,
        )

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        return generated_task(cls.from_record, options.tasks, split, seed, index, options)

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task:
        return row_task("black_box", record, name, options)

    async def answer(self, text: str) -> StepResult:
        # The agent loop does not run these episodes, so a call is a bug and not the policy's fault.
        raise InfrastructureError(
            "environment", "an external agent scores this episode, not the agent loop"
        )

    def to_reward(self, value: object) -> StepResult:
        numbers = read_parts(value, self.options.parts, self.options.agent)
        return with_parts(self.end_with_score(numbers["score"]), numbers)

    def end_truncated(self) -> StepResult:
        # Every end of an episode must have the same parts.
        return with_parts(self.end_with_score(0.0), dict.fromkeys(self.options.parts, 0.0))
