"""Environment whose tools come from MCP servers.

It can be used by configuration alone, or as a base class. docs/tool_servers.md shows the
configuration, examples/mcp_environment.py a subclass.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from pydantic import Field, field_validator

from rl_loop.chat.tools import Tool
from rl_loop.environments.base import (
    EnvironmentOptions,
    PythonExecutor,
    RewardConfig,
    Split,
    StepResult,
    Task,
    text_in,
)
from rl_loop.environments.replayed import RecordedAction, ReplayedEnvironment, ReplayedOptions
from rl_loop.environments.reward_parts import check_parts, read_parts, with_parts
from rl_loop.environments.row_tasks import FUNCTIONS, check_function, generated_task, row_task
from rl_loop.environments.tool_calls import (
    ToolError,
    UnknownToolError,
    parse_arguments,
    parse_recipient,
)
from rl_loop.environments.tool_servers.config import ToolServerConfig
from rl_loop.environments.tool_servers.connection import McpResult
from rl_loop.environments.tool_servers.toolbox import ToolBox, offered_without_episode
from rl_loop.infrastructure import InfrastructureError
from rl_loop.threads import call_user_code


class McpOptions(ReplayedOptions):
    servers: dict[str, ToolServerConfig] = Field(min_length=1)
    """MCP servers, by names of your choice."""
    judge: str | None = None
    """Function ``judge(row, answer, tools)`` as MODULE:FUNCTION, plain or async. It returns the
    score (1 is perfect, 0 is the score of doing nothing), or a dictionary with "score" and ``parts``.
    It can inspect the servers with ``await tools.call(NAME, ARGUMENTS)``. null: an answer is correct
    if it equals the row's ``answer``."""
    parts: list[str] = Field(default_factory=list)
    """Reward parts that the judge returns in addition to "score". They are 0 in truncated and
    malformed episodes."""
    tasks: str | None = None
    """Function ``tasks(split, seed, index)`` as MODULE:FUNCTION. It returns task ``index`` of "train"
    or "held_out": a JSON object with the text ``prompt``. null: use rows of train_path and
    held_out_path."""
    setup_tool: str | None = None
    """Tool that is called before each episode with the row's ``setup``, a JSON object. It is not
    offered to the policy."""

    @field_validator("judge", "tasks")
    @classmethod
    def _check_function(cls, path: str | None) -> str | None:
        return check_function(path)

    @field_validator("parts")
    @classmethod
    def _check_parts(cls, parts: list[str]) -> list[str]:
        return check_parts(parts)


@dataclass(frozen=True)
class ToolCall:
    """Tool call of the policy."""

    tool: str
    """Name of the tool in the prompt."""
    arguments: dict[str, Any]


class McpEnvironment(ReplayedEnvironment[McpOptions]):
    """Episode with the tools of MCP servers.

    Subclasses may override ``judge`` and ``set_up``, and extend ``Options``.
    """

    Options: ClassVar[type[EnvironmentOptions]] = McpOptions

    def __init__(self, task: Task, execute: PythonExecutor, reward: RewardConfig) -> None:
        super().__init__(task, execute, reward)
        self.toolbox: ToolBox | None = None
        # Shared servers keep no state of an episode, so there is nothing to restore.
        if all(server.shared for server in self.options.servers.values()):
            self.can_be_restored = True

    # ---- tasks

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        return generated_task(cls.from_record, options.tasks, split, seed, index, options)

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task:
        # The default judge compares with the answer, so a row without one is useless.
        if options.judge is None and cls.judge is McpEnvironment.judge:
            text_in(record, "answer")
        return row_task("mcp", record, name, options, instructions=options.instructions)

    # ---- the servers

    async def connect(self) -> None:
        self.toolbox = ToolBox(self.options.servers, self.row)
        try:
            await self.toolbox.open()
        except ValueError as error:
            # Names were checked before the run, so the servers have changed since.
            raise InfrastructureError("tool", str(error)) from error
        await self.set_up(self.toolbox)

    async def disconnect(self) -> None:
        if self.toolbox is not None:
            await self.toolbox.close()
        self.toolbox = None

    @property
    def is_connected(self) -> bool:
        return self.toolbox is not None and self.toolbox.is_open

    async def repeat(self, recorded: RecordedAction) -> None:
        assert self.toolbox is not None
        # Calls of shared servers need no replay, because these keep no state of an episode.
        tool = recorded.action.tool
        if tool not in self.toolbox or self.toolbox.is_own(tool):
            await super().repeat(recorded)

    async def do(self, action: ToolCall) -> McpResult:
        assert self.toolbox is not None
        return await _call_named(self.toolbox, action.tool, action.arguments)

    async def set_up(self, tools: ToolBox) -> None:
        """Bring new servers into the initial state of the episode.

        Raises:
            InfrastructureError: if ``setup_tool`` fails.
        """
        name = self.options.setup_tool
        if name is None:
            return
        result = await _call_named(tools, name, self.row.get("setup", {}))
        if result.is_error:
            raise InfrastructureError("tool", f"setup_tool {name}: {result.text[:500]}")

    def tools(self) -> Sequence[Tool]:
        # Prompts are also rendered without an episode, to check their length.
        if self.toolbox is None:
            offered = offered_without_episode(self.options.servers, self.row)
        else:
            offered = self.toolbox.tools_for_prompt()
        # A policy that could call it could reset its own task.
        return [tool for tool in offered if tool.name != self.options.setup_tool]

    # ---- turns

    async def call(self, tool: str, arguments: str) -> str:
        await self.ready()
        assert self.toolbox is not None
        name = parse_recipient(tool)
        if not self.toolbox.offers(name) or name == self.options.setup_tool:
            raise UnknownToolError

        result: McpResult = await self.act(ToolCall(name, parse_arguments(arguments)))
        if result.is_error:
            raise ToolError(result.text)
        return result.text

    async def answer(self, text: str) -> StepResult:
        await self.ready()
        assert self.toolbox is not None
        judgment = await self.judge(text, self.toolbox)
        judge = self.options.judge or type(self).__name__
        numbers = read_parts(judgment, self.options.parts, judge)
        # maj@k compares answers as text, so drop spaces at the ends.
        ended = replace(self.end_with_score(numbers["score"]), answer=text.strip())
        return with_parts(ended, numbers)

    async def judge(self, answer: str, tools: ToolBox) -> object:
        """Return the score of a final answer, or a dictionary with "score" and ``parts``."""
        if self.options.judge is None:
            return float(answer.strip() == self.task.ground_truth.strip())
        function = FUNCTIONS.resolve(self.options.judge)
        arguments = (self.row, answer, tools)
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        # A plain function would block the event loop, so run it in a thread.
        return await call_user_code(partial(function, *arguments), self.options.judge)

    def end_truncated(self) -> StepResult:
        return with_parts(self.end_with_score(0.0), dict.fromkeys(self.options.parts, 0.0))


async def _call_named(tools: ToolBox, name: str, arguments: Any) -> McpResult:
    """Call a tool that the configuration or a recorded action names.

    Raises:
        InfrastructureError: if no server has the tool, or the call fails.
    """
    if name not in tools:
        raise InfrastructureError("tool", f"the tool servers have no tool {name!r}")
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        raise InfrastructureError(
            "environment", f"the arguments of {name} must be a JSON object, not {kind}"
        )
    return await tools.call(name, arguments)
