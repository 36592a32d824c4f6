"""Connection to one MCP server."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_loop.chat.truncate_text import truncate_text
from rl_loop.environments.replayed import ToolServerLostError
from rl_loop.environments.tool_servers.config import FACTORIES, ToolServerConfig
from rl_loop.environments.tool_servers.content import render_blocks
from rl_loop.infrastructure import InfrastructureError, describe

if TYPE_CHECKING:
    from mcp import Client

MAX_PAGES = 100
"""Limit of pages in a server's list of tools, in case the list never ends."""
CLOSE_SECONDS = 10.0
"""Time for a server to exit. The ``mcp`` package kills its process after 2 s."""


@dataclass(frozen=True)
class ServerTool:
    """Description of a tool by its server."""

    name: str
    description: str
    schema: dict[str, Any]
    """JSON schema of the arguments."""


@dataclass(frozen=True)
class McpResult:
    """Text and status of a ``CallToolResult`` of MCP."""

    text: str
    is_error: bool = False
    """True if the tool reports an error, or did not answer in time."""


class ServerConnection:
    """Connection to one server.

    A separate asyncio task holds the connection, because ``mcp`` requires that the task that opened a
    connection closes it, and every turn of an episode is another task. All failures of the connection
    are InfrastructureFailures.
    """

    def __init__(self, name: str, config: ToolServerConfig, row: Mapping[str, Any]) -> None:
        """Prepare a connection, without opening it.

        Args:
            name: name of the server, for messages.
            config: transport and limits.
            row: row of the task, for servers with ``in_process``.
        """
        self.name = name
        self.config = config
        self.tools: Sequence[ServerTool] = ()
        """Tools of the server, after ``open``."""
        self._row = row
        self._client: Client | None = None
        self._holding: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._closing = asyncio.Event()

    @property
    def is_usable(self) -> bool:
        """True if calls are possible."""
        return self._client is not None and self._holding is not None and not self._holding.done()

    async def open(self) -> None:
        """Connect, and list the tools.

        Raises:
            InfrastructureError: if that fails. The connection is closed then.
        """
        seconds = self.config.connect_seconds
        self._holding = asyncio.create_task(self._keep_connected(), name=f"tool server {self.name}")
        opening = asyncio.create_task(self._opened.wait())
        # If the connection fails, the task that holds it ends first. Wait for either event.
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

    async def call(self, tool: str, arguments: dict[str, Any]) -> McpResult:
        """Call a tool.

        Args:
            tool: name of the tool on the server.
            arguments: JSON object.

        Returns:
            Output of the tool. Errors of the tool and timeouts are returned, too.

        Raises:
            ToolServerLostError: if the connection is lost during the call.
            InfrastructureError: if the connection was lost before, or the server reports an
                internal error.
        """
        if not self.is_usable:
            raise self._failure(f"is not connected: {self._reason()}")
        assert self._client is not None and self._holding is not None

        seconds = self.config.call_seconds
        # Some transports do not report a broken connection to pending calls.
        asking = asyncio.ensure_future(self._client.call_tool(tool, arguments))
        waiting: set[asyncio.Future[Any]] = {asking, self._holding}
        try:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return self._read_result(tool, asking)
            if self._holding.done():
                raise self._lost_error(f"broke down in a call of {tool}: {self._reason()}")
            return McpResult(f"{tool} did not answer within {seconds:g} s", is_error=True)
        finally:
            await _end(asking)

    async def close(self) -> None:
        """Disconnect, and end the server if it is a process. Later calls do nothing."""
        self._client = None
        self._closing.set()
        if self._holding is None:
            return
        # A task that has not connected yet does not wait for the event.
        # Give the server time to exit before the task is cancelled.
        if self._opened.is_set():
            await asyncio.wait({self._holding}, timeout=CLOSE_SECONDS)
        await _end(self._holding)

    # ---- the task that holds the connection

    async def _keep_connected(self) -> None:
        """Connect, and keep the connection until ``close``."""
        from mcp import Client

        # The stack closes in reverse order: the client before the HTTP client that it uses.
        async with AsyncExitStack() as stack:
            target = await self._target(stack)
            client = await stack.enter_async_context(Client(target))
            self.tools = await _list_tools(client)
            self._client = client
            self._opened.set()
            await self._closing.wait()

    async def _target(self, stack: AsyncExitStack) -> Any:
        """Return the target of the client: a server object, a command, a URL or a transport."""
        from mcp import StdioServerParameters

        config = self.config
        if config.in_process is not None:
            # Pass a copy, because the function is the user's code.
            return FACTORIES.resolve(config.in_process)(dict(self._row))
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

    # ---- results and failures

    def _read_result(self, tool: str, asking: "asyncio.Future[Any]") -> McpResult:
        """Return the result of a finished call. Raises InfrastructureError."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, REQUEST_TIMEOUT

        if asking.cancelled():
            raise self._lost_error(f"broke down in a call of {tool}: {self._reason()}")
        error = asking.exception()
        if error is None:
            # OpenEnv sends the same blocks as JSON, so ``render_blocks`` takes plain data.
            result = asking.result()
            rendered = render_blocks([block.model_dump() for block in result.content])
            text = truncate_text(rendered, self.config.max_output_bytes)
            return McpResult(text, is_error=bool(result.is_error))
        # The server works and rejects the arguments, which the policy wrote.
        if isinstance(error, MCPError) and error.code in (INVALID_PARAMS, REQUEST_TIMEOUT):
            return McpResult(f"{tool}: {error.message}", is_error=True)
        # With an error response the connection still exists. All other errors mean that it is lost.
        if not isinstance(error, MCPError) or error.code == CONNECTION_CLOSED:
            self._client = None
            self._closing.set()
            raise self._lost_error(f"broke down in a call of {tool}: {describe(error)}") from error
        raise self._failure(f"failed in a call of {tool}: {describe(error)}") from error

    def _reason(self) -> str:
        """Return the reason for the end of the connection."""
        if self._holding is None or not self._holding.done():
            return "it was closed"
        if self._holding.cancelled():
            return "it was cancelled"
        # anyio wraps errors of its tasks in groups, which hide the cause.
        error = self._holding.exception()
        return "it ended" if error is None else describe(_innermost(error))

    def _failure(self, what: str) -> InfrastructureError:
        failure_source = f"tool server {self.name}"
        return InfrastructureError("tool", f"{failure_source} {what}", failure_source)

    def _lost_error(self, what: str) -> ToolServerLostError:
        failure_source = f"tool server {self.name}"
        return ToolServerLostError("tool", f"{failure_source} {what}", failure_source)


async def _end(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and retrieve its exception, because asyncio warns about unretrieved ones."""
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await asyncio.wait_for(asyncio.shield(task), CLOSE_SECONDS)


async def _list_tools(client: "Client") -> list[ServerTool]:
    """Return the tools of a server. Raises ValueError if the list has too many pages."""
    tools: list[ServerTool] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += [
            ServerTool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools
        ]
        cursor = page.next_cursor
        if not cursor:
            return tools
    raise ValueError(f"its list of tools has more than {MAX_PAGES} pages")


def _innermost(error: BaseException) -> BaseException:
    """Return the first exception within nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
