"""Tools of several servers, under the names that the policy uses."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import TypeAdapter

from rl_loop.chat.tools import Tool
from rl_loop.environments.tool_servers.config import ToolServerConfig
from rl_loop.environments.tool_servers.connection import (
    McpResult,
    ServerConnection,
    ServerTool,
)

Servers = Mapping[str, ToolServerConfig]
"""Servers by the names in the configuration."""


@dataclass(frozen=True)
class BoxedTool:
    """Tool of one of the servers."""

    connection: ServerConnection
    description: ServerTool
    is_offered: bool
    """True if the tool is offered to the policy."""


class ToolBox:
    """Tools of one episode."""

    def __init__(self, servers: Servers, row: Mapping[str, Any]) -> None:
        """Prepare connections, without opening them.

        Args:
            servers: servers by name.
            row: row of the task, for servers with ``in_process``.
        """
        self._servers = servers
        self._row = row
        self._connections: list[ServerConnection] = []
        self._tools: dict[str, BoxedTool] = {}

    @property
    def is_open(self) -> bool:
        """True if all servers can be called."""
        return bool(self._connections) and all(c.is_usable for c in self._connections)

    def __contains__(self, name: str) -> bool:
        """Return True if one of the servers has a tool, offered or not."""
        return name in self._tools

    async def open(self) -> None:
        """Connect to all servers. After an error all connections are closed.

        Raises:
            InfrastructureError: if a server cannot be reached.
            ValueError: if two tools have the same name.
        """
        opening = [self._connect(name, config) for name, config in self._servers.items()]
        # Wait for all of them, so that none is still opening when an error is raised.
        results = await asyncio.gather(*opening, return_exceptions=True)
        self._connections = [c for c in results if isinstance(c, ServerConnection)]
        try:
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            self._tools = named_tools(self._connections)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnect from the servers of the episode. Later calls do nothing."""
        # Connections of shared servers serve other episodes, too.
        unshared = [c for c in self._connections if not c.config.shared]
        self._connections = []
        self._tools = {}
        await asyncio.gather(*(connection.close() for connection in unshared))

    def tools_for_prompt(self) -> list[Tool]:
        """Return the tools for the prompt."""
        return [
            Tool(name, tool.description.description, tool.description.schema)
            for name, tool in self._tools.items()
            if tool.is_offered
        ]

    def offers(self, name: str) -> bool:
        """Return True if the policy may call a tool of this name."""
        return name in self._tools and self._tools[name].is_offered

    def is_own(self, name: str) -> bool:
        """Return True if a tool's server belongs to this episode only."""
        return not self._tools[name].connection.config.shared

    async def call(self, name: str, arguments: dict[str, Any]) -> McpResult:
        """Call a tool, offered or not, by its name in the prompt.

        Raises:
            KeyError: if there is no such tool.
            InfrastructureError: if the server fails.
        """
        tool = self._tools[name]
        return await tool.connection.call(tool.description.name, arguments)

    async def _connect(self, name: str, config: ToolServerConfig) -> ServerConnection:
        """Return an open connection. Raises InfrastructureError."""
        if config.shared:
            return await _shared_connection(name, config)
        # A separate server for each episode, because it may keep state.
        connection = ServerConnection(name, config, self._row)
        await connection.open()
        return connection


def named_tools(connections: list[ServerConnection]) -> dict[str, BoxedTool]:
    """Return the tools of all servers by their names in the prompt.

    Raises:
        ValueError: if two tools have the same name, or a server lacks a tool of its option ``tools``.
    """
    named: dict[str, BoxedTool] = {}
    for connection in connections:
        chosen = connection.config.tools
        known = [tool.name for tool in connection.tools]
        missing = [name for name in chosen or () if name not in known]
        if missing:
            available = ", ".join(known) or "none"
            raise ValueError(
                f"tool server {connection.name} has no tool {missing[0]!r}. Its tools: {available}"
            )

        for tool in connection.tools:
            name = connection.config.prefix + tool.name
            if name in named:
                other = named[name].connection.name
                raise ValueError(
                    f"tool servers {other} and {connection.name} both have a tool {name!r}. Set "
                    "`prefix` of one of them"
                )
            named[name] = BoxedTool(connection, tool, chosen is None or tool.name in chosen)
    return named


# ---- connections of shared servers

_shared: WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[str, "asyncio.Task[ServerConnection]"]
] = WeakKeyDictionary()
"""Connections by event loop, and by name and configuration. They end with their loop."""


async def _shared_connection(name: str, config: ToolServerConfig) -> ServerConnection:
    """Return the connection that all episodes of this event loop share.

    Raises:
        InfrastructureError: if the server cannot be reached.
    """
    # A connection works only in the event loop that opened it.
    connections = _shared.setdefault(asyncio.get_running_loop(), {})
    key = f"{name} {config.model_dump_json()}"
    opening = connections.get(key)
    # Connect again after a failure, so that a restarted server is found.
    if opening is None or (opening.done() and not _is_usable(opening)):
        opening = asyncio.create_task(_open_connection(name, config))
        connections[key] = opening
    # An episode that is cancelled while it waits must not cancel the connection of others.
    return await asyncio.shield(opening)


def _is_usable(opening: "asyncio.Task[ServerConnection]") -> bool:
    if opening.cancelled() or opening.exception() is not None:
        return False
    return opening.result().is_usable


async def _open_connection(name: str, config: ToolServerConfig) -> ServerConnection:
    connection = ServerConnection(name, config, {})
    await connection.open()
    return connection


# ---- without an episode

_discovered: dict[bytes, list[Tool]] = {}
"""Tools by the servers' configurations."""
_discovering = Lock()


def offered_without_episode(servers: Servers, row: Mapping[str, Any]) -> list[Tool]:
    """Return the tools that episodes offer, for rendering prompts without an episode.

    Each process connects to the servers once.

    Args:
        servers: servers by name.
        row: row of a task, for servers with ``in_process``. Their tools must not depend on it.

    Raises:
        InfrastructureError: if a server cannot be reached.
        ValueError: if two tools have the same name.
    """
    key = _SERVERS.dump_json(dict(servers))
    # One thread connects. The others wait for its result.
    with _discovering:
        if key not in _discovered:
            # Another thread, because the caller may be running an event loop.
            with ThreadPoolExecutor(1) as thread:
                asking = thread.submit(asyncio.run, _list_offered(ToolBox(servers, row)))
                _discovered[key] = asking.result()
    return _discovered[key]


_SERVERS = TypeAdapter(dict[str, ToolServerConfig])


async def _list_offered(box: ToolBox) -> list[Tool]:
    await box.open()
    try:
        return box.tools_for_prompt()
    finally:
        await box.close()
