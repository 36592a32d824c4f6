"""Environments of OpenEnv: served anywhere, with ``reset`` and ``step``.

OpenEnv's servers speak JSON over a WebSocket, one session to a connection. That is spoken here, so
that neither the ``openenv`` package nor what an environment needs has to be installed beside the
trainer. docs/environments.md shows the configuration."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import aiohttp
from pydantic import Field, field_validator

from rl_loop.chat.cut_text import cut_text
from rl_loop.chat.tools import Tool
from rl_loop.environments.base import (
    EnvironmentOptions,
    Execute,
    RewardConfig,
    Split,
    StepResult,
    Task,
    ToolError,
    UnknownTool,
    arguments_of,
    function_of,
)
from rl_loop.environments.replayed import ReplayedEnvironment, ReplayedOptions, WorldLost
from rl_loop.environments.row_tasks import row_task
from rl_loop.environments.tool_servers.content import text_of
from rl_loop.infrastructure import InfrastructureFailure, describe

NUMBER = "{number}"
"""What stands for a task's number in the option ``prompt``."""
FRAME_BYTES = 64 << 20
"""Of one message of the server."""
TRANSPORT_ERROR = "transport_error"
"""What the environment says of a tool that it cannot reach."""
OF_THE_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Errors that a server answers to an action, and that the policy reads."""
BESIDE_OBSERVATION = ("done", "reward", "metadata")
"""Keys of an observation that are not the policy's to read."""


class OpenEnvOptions(ReplayedOptions):
    url: str = Field(pattern="^(http|ws)s?://")
    """Where the environment is served, such as http://127.0.0.1:8000."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent when a session begins."""
    interface: Literal["step", "tools", "text"] = "step"
    """How the policy acts. ``step``: one function, whose arguments are those of the environment's
    action. ``tools``: the environment's own MCP tools (its ``call_tool`` actions). ``text``: what
    the policy says to the user is the ``text_field`` of an action, and what comes back is the user's
    answer."""
    text_field: str = "message"
    """For ``interface: text``."""
    observation_field: str | None = None
    """The key of an observation that the policy reads; null for all of it, as JSON, or its only
    text."""
    prompt: str = "Task {number}."
    """What the user says in generated tasks, with the task's number; the observation of ``reset``
    follows. Rows of a file have a ``prompt`` of their own."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Arguments of ``reset`` for all tasks. Generated tasks also have a ``seed``, rows of a file
    what their own ``reset`` says."""
    score: Literal["sum", "last"] = "sum"
    """Which rewards of an episode's steps are its score."""
    perfect: float = Field(1.0, gt=0)
    """What of it is a perfect score, 1."""
    connect_seconds: float = Field(60.0, gt=0)
    """Limit of beginning a session, and of ``reset``."""
    step_seconds: float = Field(60.0, gt=0)
    """Limit of one step. What it exceeds ends the episode as it is, like its own limit of time: the
    policy may have asked for too much."""
    max_output_bytes: int = Field(65536, gt=0)
    """Limit of what the policy reads of one observation; the middle of a longer one is left out."""

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: str) -> str:
        if NUMBER not in prompt:
            raise ValueError(f"prompt needs {NUMBER}: by their prompts tasks are told apart")
        return prompt


@dataclass(frozen=True)
class Observed:
    """What the server answered to an action."""

    observation: dict[str, Any]
    reward: float | None
    done: bool
    error: str | None = None
    """What was wrong with the action."""
    is_late: bool = False
    """Whether no answer came in time. The session is over then."""


def failure_of(options: OpenEnvOptions, what: str) -> InfrastructureFailure:
    """Make the failure of an environment that is served at ``options.url``."""
    culprit = f"OpenEnv at {options.url}"
    return InfrastructureFailure("environment", f"{culprit} {what}", culprit)


def _lost(options: OpenEnvOptions, what: str) -> WorldLost:
    """Make the failure of a session that ended in an action."""
    culprit = f"OpenEnv at {options.url}"
    return WorldLost("environment", f"{culprit} {what}", culprit)


class OpenEnvSession:
    """One session of a server: a WebSocket."""

    def __init__(self, options: OpenEnvOptions) -> None:
        self._options = options
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    @property
    def is_open(self) -> bool:
        return self._socket is not None and not self._socket.closed

    async def open(self) -> None:
        """Begin a session. Raises InfrastructureFailure."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._options.connect_seconds)
        self._http = aiohttp.ClientSession(headers=self._options.headers, timeout=timeout)
        url = f"{_http_url(self._options)}/ws"
        try:
            async with asyncio.timeout(self._options.connect_seconds):
                self._socket = await self._http.ws_connect(url, max_msg_size=FRAME_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await self.close()
            raise failure_of(self._options, f"cannot be reached: {describe(error)}") from error

    async def close(self) -> None:
        """End the session. Calling it again does nothing."""
        socket, http = self._socket, self._http
        self._socket = self._http = None
        if socket is not None:
            with suppress(Exception):
                await asyncio.wait_for(socket.close(), timeout=5.0)
        if http is not None:
            await http.close()

    async def reset(self, arguments: dict[str, Any]) -> Observed:
        """Begin an episode. Raises InfrastructureFailure."""
        try:
            observed = await self._ask("reset", arguments, self._options.connect_seconds)
        except TimeoutError:
            seconds = self._options.connect_seconds
            raise failure_of(self._options, f"did not reset within {seconds:g} s") from None
        if observed.error is not None:
            raise failure_of(self._options, f"cannot reset: {observed.error}")
        return observed

    async def step(self, action: dict[str, Any]) -> Observed:
        """Act. Raises InfrastructureFailure."""
        try:
            return await self._ask("step", action, self._options.step_seconds)
        except TimeoutError:
            # An answer that comes later would be taken for that of the next action.
            await self.close()
            return Observed({}, None, False, is_late=True)

    async def _ask(self, kind: str, data: dict[str, Any], seconds: float) -> Observed:
        """Send a message and return the answer. Raises InfrastructureFailure and TimeoutError."""
        if self._socket is None:
            raise failure_of(self._options, "is not connected")
        try:
            async with asyncio.timeout(seconds):
                await self._socket.send_json({"type": kind, "data": data})
                answer = await self._socket.receive()
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(self._options, f"broke off: {describe(error)}") from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            reason = f"broke off ({answer.type.name.lower()}) in answer to a {kind}"
            raise _lost(self._options, reason)
        return self._read(answer.data)

    def _read(self, text: str) -> Observed:
        """Read an answer. Raises InfrastructureFailure for what is none."""
        try:
            message = json.loads(text)
            data = message["data"]
            if message["type"] == "error":
                if data["code"] not in OF_THE_ACTION:
                    raise failure_of(self._options, f"{data['code']}: {data['message']}")
                details = data.get("errors") or data["message"]
                return Observed({}, None, False, _as_text(details))
            reward = data["reward"]
            return Observed(
                observation=dict(data["observation"]),
                reward=None if reward is None else float(reward),
                done=bool(data["done"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise failure_of(
                self._options, f"answered {text[:200]!r}: {describe(error)}"
            ) from error


class OpenEnvEnvironment(ReplayedEnvironment[OpenEnvOptions]):
    """An episode of an OpenEnv environment."""

    Options: ClassVar[type[EnvironmentOptions]] = OpenEnvOptions

    def __init__(self, task: Task, execute: Execute, reward: RewardConfig) -> None:
        super().__init__(task, execute, reward)
        self._session: OpenEnvSession | None = None
        self._first: Observed | None = None
        """Of ``reset``."""
        self._tools: list[Tool] = []

    # ---- tasks

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        # Seeds of both splits are apart, and so are the numbers in their prompts.
        number = 2 * index + (split == "held_out")
        row = {
            "prompt": options.prompt.replace(NUMBER, str(number)),
            "reset": {"seed": seed * 1_000_003 + number},
        }
        return cls.from_record(row, f"{split}-{index}", options)

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task:
        if not isinstance(record.get("reset", {}), dict):
            raise ValueError("'reset' must be a JSON object")
        return row_task("openenv", record, name, options, instructions=options.instructions)

    # ---- the server

    async def connect(self) -> None:
        self._session = OpenEnvSession(self.options)
        await self._session.open()
        arguments = self.options.reset | self.row.get("reset", {})
        first = await self._session.reset(arguments)
        if self._first is not None and first != self._first:
            raise failure_of(self.options, "comes to something else than before by its reset")
        self._first = first
        if not self._tools:
            self._tools = await self._described_tools(self._session)

    async def disconnect(self) -> None:
        if self._session is not None:
            await self._session.close()
        self._session = None

    @property
    def is_connected(self) -> bool:
        return self._session is not None and self._session.is_open

    async def do(self, action: dict[str, Any]) -> Observed:
        if self._session is None:
            raise failure_of(self.options, "is gone")
        observed = await self._session.step(action)
        if self.options.interface != "tools":
            return observed
        try:
            return _with_tool_error(observed)
        except ConnectionError as error:
            raise failure_of(self.options, f"does not reach its tools: {error}") from error

    async def _described_tools(self, session: OpenEnvSession) -> list[Tool]:
        """Return what the policy may call. Raises InfrastructureFailure."""
        match self.options.interface:
            case "text":
                return []
            case "step":
                schema = await _action_schema(self.options)
                return [Tool("step", "Acts in the environment.", schema)]
        listed = await session.step({"type": "list_tools"})
        described = listed.observation.get("tools")
        if not described:
            metadata = listed.observation.get("metadata") or {}
            reason = listed.error or metadata.get("error") or "there is none"
            raise failure_of(self.options, f"lists no tools: {reason}")
        try:
            return [_tool_of(tool) for tool in described]
        except (ValueError, KeyError, TypeError) as error:
            raise failure_of(self.options, f"has a tool that is none: {describe(error)}") from error

    # ---- what the policy sees

    def prompt(self) -> list[dict[str, Any]]:
        messages = [dict(message) for message in self.task.messages]
        # Prompts are rendered before there are episodes, too: to see whether they fit.
        if self._first is not None:
            shown = self._text_of(self._first)
            if shown:
                messages[-1]["content"] += f"\n\n{shown}"
        return messages

    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def call(self, tool: str, arguments: str) -> str | StepResult:
        await self.ready()
        name = function_of(tool)
        if name not in {known.name for known in self._tools}:
            raise UnknownTool
        action = arguments_of(arguments)
        if self.options.interface == "tools":
            action = {"type": "call_tool", "tool_name": name, "arguments": action}

        observed: Observed = await self.act(action)
        if observed.done or observed.is_late:
            return self.ended()
        if observed.error is not None:
            raise ToolError(cut_text(observed.error, self.options.max_output_bytes))
        return self._text_of(observed)

    async def answer(self, text: str) -> StepResult:
        if self.options.interface != "text":
            return self.ended(text.strip())
        await self.ready()
        try:
            observed: Observed = await self.act({self.options.text_field: text})
        except ToolError:
            # There is no world in which it could be said.
            return self.ended(text.strip())
        if observed.done or observed.is_late:
            return self.ended(text.strip())
        return StepResult(user=observed.error or self._text_of(observed))

    def _text_of(self, observed: Observed) -> str:
        """Return what the policy reads of an observation."""
        shown: Any = {
            key: value
            for key, value in observed.observation.items()
            if key not in BESIDE_OBSERVATION and value is not None
        }
        field = self.options.observation_field
        if field is not None:
            shown = shown.get(field, "")
        elif self.options.interface == "tools" and "tool_name" in shown:
            shown = _result_text(shown.get("result"))
        elif len(shown) == 1:
            [shown] = shown.values()
        return cut_text(_as_text(shown), self.options.max_output_bytes)

    # ---- what it earns

    def unfinished(self) -> StepResult:
        return self.ended()

    def ended(self, answer: str | None = None) -> StepResult:
        """End the episode with the rewards of its steps."""
        observed = [deed.outcome for deed in self._deeds]
        rewards = [each.reward for each in observed if each.reward is not None]
        total = sum(rewards) if self.options.score == "sum" else (rewards or [0.0])[-1]
        return self.finished(total / self.options.perfect, answer=answer)


def _http_url(options: OpenEnvOptions) -> str:
    """Return the URL with http for ws, as the client wants it for both."""
    scheme, _, rest = options.url.partition("://")
    return f"{scheme.replace('ws', 'http')}://{rest.rstrip('/')}"


async def _action_schema(options: OpenEnvOptions) -> dict[str, Any]:
    """Ask the server what an action is. Raises InfrastructureFailure."""
    url = f"{_http_url(options)}/schema"
    timeout = aiohttp.ClientTimeout(total=options.connect_seconds)
    try:
        async with (
            aiohttp.ClientSession(headers=options.headers, timeout=timeout) as http,
            http.get(url) as answer,
        ):
            answer.raise_for_status()
            schema = dict((await answer.json())["action"])
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
        raise failure_of(options, f"does not say what an action is: {describe(error)}") from error

    # Every action has it, and no environment wants it of the policy.
    properties = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
    return schema | {"properties": properties}


def _tool_of(described: dict[str, Any]) -> Tool:
    """Return a tool of the environment. Raises ValueError for a name that no call can say."""
    schema = described.get("input_schema") or described.get("inputSchema") or {}
    return Tool(described["name"], described.get("description") or "", schema)


def _with_tool_error(observed: Observed) -> Observed:
    """Return what a call of a tool came to, with what was wrong with it as its ``error``.

    Raises ConnectionError if the environment did not reach the tool: all else the policy may have
    caused."""
    error = observed.observation.get("error")
    result = observed.observation.get("result")
    if isinstance(error, dict):
        message = str(error.get("message"))
        if error.get("error_type") == TRANSPORT_ERROR:
            raise ConnectionError(message)
        return replace(observed, error=message)
    if isinstance(result, dict) and result.get("is_error"):
        return replace(observed, error=_result_text(result))
    return observed


def _result_text(result: Any) -> str:
    """Return the text of what a tool of the environment returned: of an MCP result its content."""
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        return text_of(result["content"])
    return _as_text(result)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
