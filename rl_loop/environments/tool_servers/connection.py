"""A connection to one MCP server."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_loop.chat.cut_text import cut_text
from rl_loop.environments.replayed import WorldLost
from rl_loop.environments.tool_servers.config import FACTORIES, ToolServerConfig
from rl_loop.environments.tool_servers.content import text_of
from rl_loop.infrastructure import InfrastructureFailure, describe

if TYPE_CHECKING:
    from mcp import Client

MOST_PAGES = 100
"""Of a server's list of tools: one that never ends is an error."""
CLOSE_SECONDS = 10.0
"""What a server has to end; the ``mcp`` package kills a process after two."""


@dataclass(frozen=True)
class ServerTool:
    """A tool as its server describes it."""

    name: str
    description: str
    schema: dict[str, Any]
    """JSON schema of the arguments."""


@dataclass(frozen=True)
class ToolAnswer:
    """What a tool answered."""

    text: str
    is_error: bool = False
    """Whether the tool says that the call failed, or it took too long."""


class ServerConnection:
    """Talks to one server.

    A task of its own holds the connection: those of ``mcp`` must be closed by the task that opened
    them, and every turn of an episode is another task. All failures of the connection are
    InfrastructureFailures."""

    def __init__(self, name: str, config: ToolServerConfig, task: Mapping[str, Any]) -> None:
        """``name``: for messages. ``task``: the row that a server in process is made for."""
        self.name = name
        self.config = config
        self.tools: Sequence[ServerTool] = ()
        """What the server offers, once it is open."""
        self._task = task
        self._client: Client | None = None
        self._holding: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._closing = asyncio.Event()

    @property
    def is_usable(self) -> bool:
        """Whether calls can be made."""
        return self._client is not None and self._holding is not None and not self._holding.done()

    async def open(self) -> None:
        """Connect, and list the tools. Raises InfrastructureFailure; nothing stays open then."""
        seconds = self.config.connect_seconds
        self._holding = asyncio.create_task(self._hold(), name=f"tool server {self.name}")
        opening = asyncio.create_task(self._opened.wait())
        try:
            await asyncio.wait(
                {self._holding, opening}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            opening.cancel()

        if self._holding.done():
            raise self._failure(f"cannot be reached: {self._reason()}")
        if not self._opened.is_set():
            await self.close()
            raise self._failure(f"was not ready within {seconds:g} s")

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolAnswer:
        """Call a tool by the name that the server has for it.

        Raises WorldLost if the connection is lost, and InfrastructureFailure if it was lost before or
        the server answers that it failed itself. A tool's error is an answer, and so is that it
        took too long."""
        if not self.is_usable:
            raise self._failure(f"is gone: {self._reason()}")
        assert self._client is not None and self._holding is not None

        seconds = self.config.call_seconds
        # Of a connection that breaks not every transport tells those who wait for an answer.
        asking = asyncio.ensure_future(self._client.call_tool(tool, arguments))
        waiting: set[asyncio.Future[Any]] = {asking, self._holding}
        try:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return self._answer_of(tool, asking)
            if self._holding.done():
                raise self._lost(f"broke down in a call of {tool}: {self._reason()}")
            return ToolAnswer(f"{tool} did not answer within {seconds:g} s", is_error=True)
        finally:
            await _end(asking)

    async def close(self) -> None:
        """Disconnect, and end the server if it is a process. Calling it again does nothing."""
        self._client = None
        self._closing.set()
        if self._holding is None:
            return
        # One that is not open yet listens to nobody.
        if self._opened.is_set():
            await asyncio.wait({self._holding}, timeout=CLOSE_SECONDS)
        await _end(self._holding)

    # ---- the task that holds the connection

    async def _hold(self) -> None:
        """Connect, and stay connected until ``close``."""
        from mcp import Client

        async with AsyncExitStack() as stack:
            target = await self._target(stack)
            client = await stack.enter_async_context(Client(target))
            self.tools = await _listed(client)
            self._client = client
            self._opened.set()
            await self._closing.wait()

    async def _target(self, stack: AsyncExitStack) -> Any:
        """Return what the client connects to."""
        from mcp import StdioServerParameters

        config = self.config
        if config.in_process is not None:
            return FACTORIES.resolve(config.in_process)(dict(self._task))
        if config.command is not None:
            program, *arguments = config.command
            return StdioServerParameters(
                command=program, args=arguments, env=config.env, cwd=config.cwd
            )

        assert config.url is not None
        if not config.headers:
            return config.url
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        http = await stack.enter_async_context(create_mcp_http_client(headers=config.headers))
        return streamable_http_client(config.url, http_client=http)

    # ---- answers and failures

    def _answer_of(self, tool: str, asking: "asyncio.Future[Any]") -> ToolAnswer:
        """Return what a call that has ended came to. Raises InfrastructureFailure."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, REQUEST_TIMEOUT

        if asking.cancelled():
            raise self._lost(f"broke down in a call of {tool}: {self._reason()}")
        error = asking.exception()
        if error is None:
            result = asking.result()
            said = text_of([block.model_dump() for block in result.content])
            text = cut_text(said, self.config.max_output_bytes)
            return ToolAnswer(text, is_error=bool(result.is_error))
        # The server is well, and says that the arguments are not: the policy wrote them.
        if isinstance(error, MCPError) and error.code in (INVALID_PARAMS, REQUEST_TIMEOUT):
            return ToolAnswer(f"{tool}: {error.message}", is_error=True)
        # An error that the server answered says that it is there; all else, that it is not.
        if not isinstance(error, MCPError) or error.code == CONNECTION_CLOSED:
            self._client = None
            self._closing.set()
            raise self._lost(f"broke down in a call of {tool}: {describe(error)}") from error
        raise self._failure(f"failed in a call of {tool}: {describe(error)}") from error

    def _reason(self) -> str:
        """Say how the connection ended."""
        if self._holding is None or not self._holding.done():
            return "it was closed"
        if self._holding.cancelled():
            return "it was cancelled"
        error = self._holding.exception()
        return "it ended" if error is None else describe(_innermost(error))

    def _failure(self, what: str) -> InfrastructureFailure:
        culprit = f"tool server {self.name}"
        return InfrastructureFailure("tool", f"{culprit} {what}", culprit)

    def _lost(self, what: str) -> WorldLost:
        culprit = f"tool server {self.name}"
        return WorldLost("tool", f"{culprit} {what}", culprit)


async def _end(task: "asyncio.Future[Any]") -> None:
    """Cancel a task, if it runs, and look at what it raised, or asyncio warns."""
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await asyncio.wait_for(asyncio.shield(task), CLOSE_SECONDS)


async def _listed(client: "Client") -> list[ServerTool]:
    """Return the tools of a server, page by page. Raises ValueError if they have no end."""
    tools: list[ServerTool] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += [
            ServerTool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools
        ]
        cursor = page.next_cursor
        if not cursor:
            return tools
    raise ValueError(f"its list of tools has more than {MOST_PAGES} pages")


def _innermost(error: BaseException) -> BaseException:
    """Return what task groups have wrapped."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
