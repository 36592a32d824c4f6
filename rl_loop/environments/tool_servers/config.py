"""How a configuration says where a tool server is."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rl_loop.registry import Registry

FACTORIES: Registry[Callable[..., Any]] = Registry(
    kind="tool server", expected="a function that makes one", accepts=callable
)
"""Has no entries: what makes a server in process is named as MODULE:FUNCTION."""

ELF = b"\x7fELF"
"""First bytes of a compiled program."""

WAYS = ("command", "url", "in_process")
"""How a server is reached; each server has one of them."""


class ToolServerConfig(BaseModel):
    """One MCP server: a command, a URL, or a function that makes one in the rollout worker."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    command: list[str] | None = Field(None, min_length=1)
    """Program and arguments of a server that talks over its standard streams. Every episode starts
    one of its own, unless the server is ``shared``."""
    env: dict[str, str] = Field(default_factory=dict)
    """Of the command, besides PATH, HOME and the like: nothing else of the worker's environment is
    handed on."""
    cwd: str | None = None
    """Folder that the command runs in; null for the worker's."""
    url: str | None = None
    """Of a server that talks streamable HTTP, such as http://127.0.0.1:8000/mcp."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with every request to the URL."""
    in_process: str | None = None
    """``make(task)`` as MODULE:FUNCTION, which returns a server object of the ``mcp`` package. It is
    called for every episode with the task's row, or once with {} if the server is ``shared``."""

    prefix: str = ""
    """Put before the names of its tools, where two servers have tools of one name."""
    tools: list[str] | None = None
    """Names, as the server has them, of the tools that the policy is offered; null for all. The
    others can still be called by whoever judges the episode."""
    shared: bool = False
    """Whether all episodes of a rollout worker use one connection: for servers that keep nothing
    between two calls. Otherwise each episode has its own."""

    connect_seconds: float = Field(60.0, gt=0)
    """Limit of starting the server, connecting to it and listing its tools."""
    call_seconds: float = Field(60.0, gt=0)
    """Limit of one call. What it exceeds, the policy reads as an error of the tool: it may have
    asked for too much."""
    max_output_bytes: int = Field(65536, gt=0)
    """Limit of what one call answers, in bytes of UTF-8; the middle of a longer text is left out."""

    @model_validator(mode="after")
    def _check_way(self) -> Self:
        ways = [way for way in WAYS if getattr(self, way) is not None]
        if len(ways) != 1:
            given = " and ".join(ways) or "none"
            raise ValueError(f"a tool server needs one of {', '.join(WAYS)}; given: {given}")

        [way] = ways
        if way != "command" and (self.env or self.cwd is not None):
            raise ValueError(f"env and cwd are of a command, and this server has {way}")
        if way != "url" and self.headers:
            raise ValueError(f"headers are of a url, and this server has {way}")
        if self.in_process is not None:
            FACTORIES.resolve(self.in_process)
        return self

    def scripts(self) -> list[Path]:
        """Return the files that the command names, and the module of ``in_process``.

        Compiled programs, such as an interpreter, are left out.
        """
        folder = Path(self.cwd or ".")
        files = [folder / word for word in self.command or []]
        if self.in_process is not None:
            spec = importlib.util.find_spec(self.in_process.partition(":")[0])
            files = [Path(spec.origin)] if spec is not None and spec.origin else []
        return [file for file in files if file.is_file() and not _is_compiled(file)]


def _is_compiled(file: Path) -> bool:
    try:
        with file.open("rb") as content:
            return content.read(len(ELF)) == ELF
    except OSError:
        return False  # its digest cannot be read either, which is reported
