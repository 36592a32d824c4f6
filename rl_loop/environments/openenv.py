"""Client for environments on OpenEnv servers, with ``reset`` and ``step``.

OpenEnv's servers exchange JSON over a WebSocket, with one session per connection. This module
implements the protocol, so the trainer needs neither the ``openenv`` package nor the packages of an
environment. docs/tool_servers.md shows the configuration.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import aiohttp
from pydantic import Field, field_validator

from rl_loop.chat.tools import Tool
from rl_loop.chat.truncate_text import truncate_text
from rl_loop.environments.base import (
    EnvironmentOptions,
    PythonExecutor,
    RewardConfig,
    Split,
    StepResult,
    Task,
)
from rl_loop.environments.replayed import ReplayedEnvironment, ReplayedOptions, ToolServerLostError
from rl_loop.environments.row_tasks import row_task
from rl_loop.environments.tool_calls import (
    ToolError,
    UnknownToolError,
    parse_arguments,
    parse_recipient,
)
from rl_loop.environments.tool_servers.content import render_blocks
from rl_loop.infrastructure import InfrastructureError, describe

NUMBER = "{number}"
"""Placeholder for a task's number in the option ``prompt``."""
FRAME_BYTES = 64 << 20
"""Size limit of one server message."""
TRANSPORT_ERROR = "transport_error"
"""Error type that the environment reports for an unreachable tool."""
ACTION_ERRORS = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Codes of errors that an action caused. The policy reads these errors."""
HIDDEN_KEYS = ("done", "reward", "metadata")
"""Keys of an observation that the policy does not read."""


class OpenEnvOptions(ReplayedOptions):
    url: str = Field(pattern="^(http|ws)s?://")
    """Address of the environment's server, such as http://127.0.0.1:8000."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers of the request that opens a session."""
    interface: Literal["step", "tools", "text"] = "step"
    """Form of actions. ``step``: one function with the arguments of the environment's action.
    ``tools``: the environment's MCP tools (``call_tool`` actions). ``text``: the policy's final
    answer is the ``text_field`` of an action, and the observation is the user's next message."""
    text_field: str = "message"
    """Field of an action with the policy's text, for ``interface: text``."""
    observation_field: str | None = None
    """Key of an observation that the policy reads. null: the whole observation as JSON, or its only
    text."""
    prompt: str = "Task {number}."
    """User message of generated tasks, with the task's number. The observation of ``reset`` is
    appended. Rows of a file have the column ``prompt``."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Arguments of ``reset`` for all tasks. Generated tasks add a ``seed``. Rows of a file add their
    column ``reset``."""
    score: Literal["sum", "last"] = "sum"
    """Score of an episode: the sum of its steps' rewards, or the last reward."""
    perfect_score: float = Field(1.0, gt=0)
    """Environment score that maps to a normalized score of 1."""
    connect_seconds: float = Field(60.0, gt=0)
    """Time limit for opening a session, and for ``reset``."""
    step_seconds: float = Field(60.0, gt=0)
    """Time limit of one step. A longer step truncates the episode, because the policy may have
    requested too much work."""
    max_output_bytes: int = Field(65536, gt=0)
    """Size limit of the text that the policy reads of one observation. The middle of a longer text is
    cut out."""

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: str) -> str:
        if NUMBER not in prompt:
            raise ValueError(f"prompt needs {NUMBER}, because tasks must have different prompts")
        return prompt


@dataclass(frozen=True)
class ServerObservation:
    """Response of the server to an action."""

    observation: dict[str, Any]
    reward: float | None
    done: bool
    error: str | None = None
    """Error that the action caused."""
    is_late: bool = False
    """True if the response did not arrive in time. The session is closed then."""


def build_failure(options: OpenEnvOptions, what: str) -> InfrastructureError:
    """Return a failure of the environment at ``options.url``. ``what`` is the end of a sentence."""
    failure_source = f"OpenEnv at {options.url}"
    return InfrastructureError("environment", f"{failure_source} {what}", failure_source)


def _lost_error(options: OpenEnvOptions, what: str) -> ToolServerLostError:
    """Return a failure of a session that ended during an action."""
    failure_source = f"OpenEnv at {options.url}"
    return ToolServerLostError("environment", f"{failure_source} {what}", failure_source)


class OpenEnvSession:
    """Session of a server: one WebSocket."""

    def __init__(self, options: OpenEnvOptions) -> None:
        self._options = options
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    @property
    def is_open(self) -> bool:
        return self._socket is not None and not self._socket.closed

    async def open(self) -> None:
        """Open the session. Raises InfrastructureError."""
        # No limit on the total, because the session lasts as long as the episode.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._options.connect_seconds)
        self._http = aiohttp.ClientSession(headers=self._options.headers, timeout=timeout)
        url = f"{_http_url(self._options)}/ws"
        try:
            async with asyncio.timeout(self._options.connect_seconds):
                self._socket = await self._http.ws_connect(url, max_msg_size=FRAME_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            # Close aiohttp's session, too. Otherwise it is reported as unclosed later.
            await self.close()
            raise build_failure(self._options, f"cannot be reached: {describe(error)}") from error

    async def close(self) -> None:
        """Close the session. Later calls do nothing."""
        # Clear the attributes first, so that a second call has nothing to close.
        socket, http = self._socket, self._http
        self._socket = self._http = None
        if socket is not None:
            with suppress(Exception):
                # A server that does not respond must not delay the end of an episode.
                await asyncio.wait_for(socket.close(), timeout=5.0)
        if http is not None:
            await http.close()

    async def reset(self, arguments: dict[str, Any]) -> ServerObservation:
        """Start an episode. Raises InfrastructureError."""
        try:
            observed = await self._ask("reset", arguments, self._options.connect_seconds)
        except TimeoutError:
            seconds = self._options.connect_seconds
            raise build_failure(self._options, f"did not reset within {seconds:g} s") from None
        # No action of the policy came before, so a failed reset is an infrastructure failure.
        if observed.error is not None:
            raise build_failure(self._options, f"cannot reset: {observed.error}")
        return observed

    async def step(self, action: dict[str, Any]) -> ServerObservation:
        """Execute an action. Raises InfrastructureError."""
        try:
            return await self._ask("step", action, self._options.step_seconds)
        except TimeoutError:
            # A late response would be taken for the response to the next action.
            await self.close()
            return ServerObservation({}, None, False, is_late=True)

    async def _ask(self, kind: str, data: dict[str, Any], seconds: float) -> ServerObservation:
        """Send a message and return the response. Raises InfrastructureError and TimeoutError."""
        if self._socket is None:
            raise build_failure(self._options, "is not connected")
        try:
            async with asyncio.timeout(seconds):
                await self._socket.send_json({"type": kind, "data": data})
                answer = await self._socket.receive()
        # TimeoutError is a subclass of OSError, but callers handle it differently.
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise _lost_error(self._options, f"lost the connection: {describe(error)}") from error
        # Other types mean that the connection is closed or broken.
        if answer.type is not aiohttp.WSMsgType.TEXT:
            reason = f"answered the message {kind!r} with a {answer.type.name.lower()} frame, expected text"
            raise _lost_error(self._options, reason)
        return self._read(answer.data)

    def _read(self, text: str) -> ServerObservation:
        """Parse a response. Raises InfrastructureError if it does not follow the protocol."""
        try:
            message = json.loads(text)
            data = message["data"]
            if message["type"] == "error":
                # Other codes do not come from an action, so the policy must not read them as its
                # mistake.
                if data["code"] not in ACTION_ERRORS:
                    raise build_failure(self._options, f"{data['code']}: {data['message']}")
                details = data.get("errors") or data["message"]
                return ServerObservation({}, None, False, _as_text(details))

            reward = data["reward"]
            return ServerObservation(
                observation=dict(data["observation"]),
                reward=None if reward is None else float(reward),
                done=bool(data["done"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise build_failure(
                self._options, f"answered {text[:200]!r}: {describe(error)}"
            ) from error


class OpenEnvEnvironment(ReplayedEnvironment[OpenEnvOptions]):
    """Episode of an OpenEnv environment."""

    Options: ClassVar[type[EnvironmentOptions]] = OpenEnvOptions

    def __init__(self, task: Task, execute: PythonExecutor, reward: RewardConfig) -> None:
        super().__init__(task, execute, reward)
        self._session: OpenEnvSession | None = None
        self._first: ServerObservation | None = None
        """Response to ``reset``."""
        self._tools: list[Tool] = []

    # ---- tasks

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        # The splits have different seeds, and different numbers in their prompts.
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
        # After another observation, the recorded actions would have another meaning.
        if self._first is not None and first != self._first:
            raise build_failure(
                self.options,
                "returned another observation at a second reset, so recorded actions cannot be "
                "repeated. Set replay: false",
            )
        self._first = first
        # The policy has read the tools in its prompt, so keep them for the whole episode.
        if not self._tools:
            self._tools = await self._described_tools(self._session)

    async def disconnect(self) -> None:
        if self._session is not None:
            await self._session.close()
        self._session = None

    @property
    def is_connected(self) -> bool:
        return self._session is not None and self._session.is_open

    async def do(self, action: dict[str, Any]) -> ServerObservation:
        if self._session is None:
            raise build_failure(self.options, "is not connected")
        observed = await self._session.step(action)
        if self.options.interface != "tools":
            return observed
        try:
            return _with_tool_error(observed)
        except ConnectionError as error:
            raise build_failure(self.options, f"cannot reach its tools: {error}") from error

    async def _described_tools(self, session: OpenEnvSession) -> list[Tool]:
        """Return the tools of the policy. Raises InfrastructureError."""
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
            raise build_failure(self.options, f"lists no tools: {reason}")
        try:
            return [_parse_tool(tool) for tool in described]
        except (ValueError, KeyError, TypeError) as error:
            raise build_failure(
                self.options, f"lists a malformed tool: {describe(error)}"
            ) from error

    # ---- the policy's view

    def prompt(self) -> list[dict[str, Any]]:
        messages = [dict(message) for message in self.task.messages]
        # Prompts are also rendered without an episode, to check their length.
        if self._first is not None:
            shown = self._render_observation(self._first)
            if shown:
                # The observation belongs to the task, so it is part of the user's message.
                messages[-1]["content"] += f"\n\n{shown}"
        return messages

    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def call(self, tool: str, arguments: str) -> str | StepResult:
        await self.ready()
        name = parse_recipient(tool)
        if name not in {known.name for known in self._tools}:
            raise UnknownToolError
        action = parse_arguments(arguments)
        if self.options.interface == "tools":
            action = {"type": "call_tool", "tool_name": name, "arguments": action}

        observed: ServerObservation = await self.act(action)
        if observed.done or observed.is_late:
            return self.ended()
        if observed.error is not None:
            raise ToolError(truncate_text(observed.error, self.options.max_output_bytes))
        return self._render_observation(observed)

    async def answer(self, text: str) -> StepResult:
        if self.options.interface != "text":
            return self.ended(text.strip())
        await self.ready()
        try:
            observed: ServerObservation = await self.act({self.options.text_field: text})
        # ``act`` has tried the text on several new servers.
        except ToolError:
            # The text ended every server, so the episode cannot continue.
            return self.ended(text.strip())
        if observed.done or observed.is_late:
            return self.ended(text.strip())
        return StepResult(user=observed.error or self._render_observation(observed))

    def _render_observation(self, observed: ServerObservation) -> str:
        """Return the text of an observation that the policy reads."""
        shown: Any = {
            key: value
            for key, value in observed.observation.items()
            if key not in HIDDEN_KEYS and value is not None
        }
        field = self.options.observation_field
        if field is not None:
            shown = shown.get(field, "")
        elif self.options.interface == "tools" and "tool_name" in shown:
            shown = _result_text(shown.get("result"))
        # A single value needs no JSON around it.
        elif len(shown) == 1:
            [shown] = shown.values()
        return truncate_text(_as_text(shown), self.options.max_output_bytes)

    # ---- rewards

    def end_truncated(self) -> StepResult:
        return self.ended()

    def ended(self, answer: str | None = None) -> StepResult:
        """Return the end of the episode, scored by the rewards of its steps."""
        observed = [recorded.result for recorded in self._actions]
        # Steps without a reward are left out: they are not a reward of 0 for ``score: last``.
        rewards = [each.reward for each in observed if each.reward is not None]
        total = sum(rewards) if self.options.score == "sum" else (rewards or [0.0])[-1]
        return self.end_with_score(total / self.options.perfect_score, answer=answer)


def _http_url(options: OpenEnvOptions) -> str:
    """Return the server's URL with the scheme http or https, which the client uses for WebSockets."""
    scheme, _, rest = options.url.partition("://")
    return f"{scheme.replace('ws', 'http')}://{rest.rstrip('/')}"


async def _action_schema(options: OpenEnvOptions) -> dict[str, Any]:
    """Return the JSON schema of the server's actions. Raises InfrastructureError."""
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
        raise build_failure(options, f"has no schema of actions: {describe(error)}") from error

    # All actions have metadata, but no environment expects it from the policy.
    properties = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
    return schema | {"properties": properties}


def _parse_tool(described: dict[str, Any]) -> Tool:
    """Return a tool of the environment. Raises ValueError for a name that calls cannot contain."""
    # OpenEnv writes the key in snake case, MCP's JSON in camel case.
    schema = described.get("input_schema") or described.get("inputSchema") or {}
    return Tool(described["name"], described.get("description") or "", schema)


def _with_tool_error(observed: ServerObservation) -> ServerObservation:
    """Return the response to a tool call, with the tool's error as ``error``.

    Raises:
        ConnectionError: if the environment did not reach the tool. The policy may have caused all
            other errors.
    """
    error = observed.observation.get("error")
    result = observed.observation.get("result")
    if isinstance(error, dict):
        message = str(error.get("message"))
        # The policy cannot cause a tool that is not reachable.
        if error.get("error_type") == TRANSPORT_ERROR:
            raise ConnectionError(message)
        return replace(observed, error=message)
    if isinstance(result, dict) and result.get("is_error"):
        return replace(observed, error=_result_text(result))
    return observed


def _result_text(result: Any) -> str:
    """Return a tool output as text. For an MCP result this is its content."""
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        return render_blocks(result["content"])
    return _as_text(result)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
