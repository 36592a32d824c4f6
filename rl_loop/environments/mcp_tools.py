"""Tasks whose tools are those of MCP servers.

docs/environments.md shows both ways to use it: by configuration alone, and as a base class."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field, field_validator

from rl_loop.environments.base import (
    Environment,
    EnvironmentOptions,
    Execute,
    RewardConfig,
    Split,
    StepResult,
    Task,
    ToolError,
    UnknownTool,
    arguments_of,
    text_in,
)
from rl_loop.environments.reward_parts import check_parts, read_parts, with_parts
from rl_loop.environments.tool_servers.config import ToolServerConfig
from rl_loop.environments.tool_servers.connection import ToolAnswer
from rl_loop.environments.tool_servers.toolbox import ToolBox, offered_without_episode
from rl_loop.harmony.codec import Tool
from rl_loop.infrastructure import InfrastructureFailure
from rl_loop.registry import Registry

FUNCTIONS: Registry[Callable[..., Any]] = Registry(
    kind="function of an MCP environment", expected="a function", accepts=callable
)
"""Has no entries: they are named as MODULE:FUNCTION."""

RECIPIENT = "functions."
"""How the recipient of a function's call begins."""


class McpOptions(EnvironmentOptions):
    servers: dict[str, ToolServerConfig] = Field(min_length=1)
    """The servers, by names of your choice."""
    judge: str | None = None
    """``judge(task, answer, tools)`` as MODULE:FUNCTION, plain or async: returns the score (1 is
    perfect, 0 is what doing nothing earns), or a dictionary of the score and further ``parts``.
    ``await tools.call(NAME, ARGUMENTS)`` asks the servers what the policy has done. null: an answer
    is right that equals the row's ``answer``."""
    parts: list[str] = Field(default_factory=list)
    """What the judge returns besides "score"; an episode that ends otherwise has 0 of them."""
    tasks: str | None = None
    """``tasks(split, seed, index)`` as MODULE:FUNCTION: generates task ``index`` of "train" or
    "held_out", a JSON object with the text ``prompt``. null: rows of train_path and held_out_path."""
    instructions: str | None = None
    """The developer message."""
    setup_tool: str | None = None
    """A tool that is called before each episode with the row's ``setup``, a JSON object. The policy
    is not offered it."""
    replay: bool = True
    """Whether an episode's servers can be set back: new ones are started and are given the same
    calls again. false for servers with effects beyond their session: a call that infrastructure
    spoiled is then not repeated, and the episode is invalid."""

    @field_validator("judge", "tasks")
    @classmethod
    def _check_function(cls, path: str | None) -> str | None:
        if path is not None:
            FUNCTIONS.resolve(path)
        return path

    @field_validator("parts")
    @classmethod
    def _check_parts(cls, parts: list[str]) -> list[str]:
        return check_parts(parts)


@dataclass(frozen=True)
class MadeCall:
    """A call that the policy made, and what it read."""

    tool: str
    arguments: dict[str, Any]
    answer: ToolAnswer


class McpEnvironment(Environment):
    """An episode with the tools of MCP servers.

    A subclass may override ``judge`` and ``set_up``, and give ``Options`` further fields or other
    servers."""

    Options: ClassVar[type[EnvironmentOptions]] = McpOptions
    FIXED = (*Environment.FIXED, "options", "toolbox")

    def __init__(self, task: Task, execute: Execute, reward: RewardConfig) -> None:
        """Raises ValueError for a task that was made otherwise than by this class."""
        super().__init__(task, execute, reward)
        missing = [key for key in ("record", "options") if key not in task.metadata]
        if missing:
            raise ValueError(
                f"task {task.task_id} names no tool servers (no {missing[0]} in its metadata): a row "
                'is a JSON object with the text "prompt", without task_id and messages'
            )
        self.options: Any = self.Options.model_validate(task.metadata["options"])
        self.toolbox: ToolBox | None = None
        self._calls: list[MadeCall] = []
        self._is_stale = False
        """Whether the servers have to be set back to what ``_calls`` says."""

    # ---- tasks

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        if options.tasks is None:
            raise NotImplementedError(
                "an MCP environment without `tasks` generates none: give train_path and held_out_path"
            )
        record = FUNCTIONS.resolve(options.tasks)(split, seed, index)
        if not isinstance(record, dict):
            raise ValueError(f"{options.tasks} returned {type(record).__name__}, expected a dict")
        return cls.from_record(record, f"{split}-{index}", options)

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task:
        if options.judge is None and cls.judge is McpEnvironment.judge:
            text_in(record, "answer")
        messages = [{"role": "user", "content": text_in(record, "prompt")}]
        if options.instructions is not None:
            messages.insert(0, {"role": "developer", "content": options.instructions})

        metadata = {"record": record, "options": options.model_dump(mode="json")}
        if "category" in record:
            metadata["category"] = record["category"]
        return Task(
            task_id=name,
            messages=messages,
            ground_truth=str(record.get("answer", "")),
            environment="mcp",
            metadata=metadata,
        )

    # ---- the servers

    async def open(self) -> None:
        """Connect to the servers, or set them back if they have gone further than the episode."""
        if self.toolbox is not None and self.toolbox.is_open and not self._is_stale:
            return
        await self._disconnect()
        self.toolbox = ToolBox(self.options.servers, self._record)
        try:
            await self.toolbox.open()
            await self.set_up(self.toolbox)
            await self._replay(self.toolbox)
        except BaseException as error:
            await self._disconnect()
            if isinstance(error, ValueError):
                # Names that were checked before the run: the servers have others now.
                raise InfrastructureFailure("tool", str(error)) from error
            raise
        self._is_stale = False

    async def close(self) -> None:
        await self._disconnect()

    async def set_up(self, tools: ToolBox) -> None:
        """Bring new servers into the state in which the episode begins.

        Raises InfrastructureFailure."""
        name = self.options.setup_tool
        if name is None:
            return
        answer = await _call_named(tools, name, self._record.get("setup", {}))
        if answer.is_error:
            raise InfrastructureFailure("tool", f"setup_tool {name}: {answer.text[:500]}")

    def tools(self) -> Sequence[Tool]:
        # Prompts are rendered before there are episodes, too: to see whether they fit.
        if self.toolbox is None:
            offered = offered_without_episode(self.options.servers, self._record)
        else:
            offered = self.toolbox.offered()
        return [tool for tool in offered if tool.name != self.options.setup_tool]

    # ---- turns

    async def call(self, tool: str, arguments: str) -> str:
        # What purification has set back is brought there when it is needed.
        if self.toolbox is None or self._is_stale:
            await self.open()
        assert self.toolbox is not None
        name = tool.removeprefix(RECIPIENT)
        is_offered = self.toolbox.offers(name) and name != self.options.setup_tool
        if not tool.startswith(RECIPIENT) or not is_offered:
            raise UnknownTool

        values = arguments_of(arguments)
        try:
            answer = await self.toolbox.call(name, values)
        except BaseException:
            # The server may have done what was asked, or a part of it.
            self._is_stale = True
            raise
        self._calls.append(MadeCall(name, values, answer))
        if answer.is_error:
            raise ToolError(answer.text)
        return answer.text

    async def answer(self, text: str) -> StepResult:
        if self.toolbox is None or self._is_stale:
            await self.open()
        assert self.toolbox is not None
        given = await self.judge(text, self.toolbox)
        judge = self.options.judge or type(self).__name__
        numbers = read_parts(given, self.options.parts, judge)
        ended = replace(self.finished(numbers["score"]), answer=text.strip())
        return with_parts(ended, numbers)

    async def judge(self, answer: str, tools: ToolBox) -> object:
        """Return what a final answer earns: the score, or a dictionary of it and ``parts``."""
        if self.options.judge is None:
            return float(answer.strip() == self.task.ground_truth.strip())
        function = FUNCTIONS.resolve(self.options.judge)
        arguments = (self._record, answer, tools)
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        return await asyncio.to_thread(function, *arguments)

    def unfinished(self) -> StepResult:
        return with_parts(self.finished(0.0), dict.fromkeys(self.options.parts, 0.0))

    # ---- state: the calls are the state, and servers are brought to it

    def save_state(self) -> Any:
        if not self.options.replay and self._has_own_servers:
            return None
        return list(self._calls)

    def restore_state(self, state: Any) -> None:
        # Even with no call in between: one that failed may have come through.
        if self._has_own_servers:
            self._is_stale = True
        self._calls = list(state)

    @property
    def _has_own_servers(self) -> bool:
        return any(not server.shared for server in self.options.servers.values())

    @property
    def _record(self) -> dict[str, Any]:
        record: dict[str, Any] = self.task.metadata["record"]
        return record

    async def _replay(self, tools: ToolBox) -> None:
        """Make the calls of the episode again.

        Raises InfrastructureFailure if a server answers otherwise than before: what the policy has
        read would not be true of it."""
        for made in self._calls:
            if made.tool in tools and not tools.is_own(made.tool):
                continue
            answer = await _call_named(tools, made.tool, made.arguments)
            if answer != made.answer:
                reason = (
                    f"the servers cannot be set back: {made.tool} answers otherwise than before"
                )
                raise InfrastructureFailure("tool", f"{reason} (replay: false says so)")

    async def _disconnect(self) -> None:
        if self.toolbox is not None:
            await self.toolbox.close()
        self.toolbox = None


async def _call_named(tools: ToolBox, name: str, arguments: Any) -> ToolAnswer:
    """Call a tool that a configuration or an earlier episode names. Raises InfrastructureFailure."""
    if name not in tools:
        raise InfrastructureFailure("tool", f"no server has the tool {name} any more")
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        raise InfrastructureFailure("environment", f"{name} wants a JSON object, not {kind}")
    return await tools.call(name, arguments)
