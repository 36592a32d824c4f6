"""An MCP tool server with a balance as its state. It can fail in every possible way.

python ledger_server.py           # on its standard streams
python ledger_server.py 8000      # by streamable HTTP
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from pydantic import BaseModel

REFUSED: list[int] = []
"""Calls that the servers of this process rejected."""


class Transfer(BaseModel):
    """Order to transfer an amount."""

    to: str
    amount: int = 1


def make(row: dict[str, Any]) -> MCPServer:
    """Return a server with a new balance, which ``row`` may set."""
    server = MCPServer("ledger", log_level="ERROR")
    entries: list[int] = [row.get("opening", 0)]

    @server.tool()
    def deposit(amount: int) -> str:
        """Put something in."""
        if amount <= 0:
            raise ValueError("too little")
        entries.append(amount)
        return f"{sum(entries)} in it"

    @server.tool()
    def balance() -> int:
        """What is in it."""
        return sum(entries)

    @server.tool()
    def open_with(amount: int) -> str:
        """Set the balance."""
        entries[:] = [amount]
        return "set"

    @server.tool()
    def transfer(order: Transfer, memo: str | None = None) -> str:
        """Move something."""
        return f"{order.amount} to {order.to}"

    @server.tool()
    def die_once(trace: str) -> str:
        """End the server the first time, in the middle of the call and after the deposit."""
        entries.append(100)
        if not Path(trace).exists():
            Path(trace).write_text("died")
            os._exit(3)
        return f"alive with {sum(entries)}"

    @server.tool()
    def die() -> str:
        """End the server."""
        os._exit(3)

    @server.tool()
    def refuse(code: int) -> str:
        """Answer an error of the protocol instead of a result."""
        REFUSED.append(code)
        raise MCPError(code, "no such account")

    @server.tool()
    def wait(seconds: float) -> str:
        """Take a while."""
        time.sleep(seconds)
        return "done"

    @server.tool()
    def repeat(text: str, times: int) -> str:
        """Say it again."""
        return text * times

    @server.tool()
    def picture() -> Image:
        """Show something."""
        return Image(data=b"\x89PNG", format="png")

    @server.tool()
    def clock() -> str:
        """Tell the time to the nanosecond: no two answers are the same."""
        return str(time.time_ns())

    return server


def other(row: dict[str, Any]) -> MCPServer:
    """Return another server that also has a tool ``balance``."""
    server = MCPServer("other", log_level="ERROR")

    @server.tool()
    def balance() -> str:
        """Of another one."""
        return "other"

    return server


def badly_named(row: dict[str, Any]) -> MCPServer:
    """Return a server with a tool whose name is invalid in a Harmony header."""
    server = MCPServer("bad", log_level="ERROR")

    @server.tool(name="to/do")
    def to_do() -> str:
        """A path."""
        return ""

    return server


if __name__ == "__main__":
    if len(sys.argv) > 1:
        make({}).run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        make({}).run("stdio")
