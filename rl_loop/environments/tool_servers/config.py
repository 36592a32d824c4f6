"""Configuration of one tool server."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rl_loop.registry import Registry

FACTORIES: Registry[Callable[..., Any]] = Registry(
    kind="tool server", expected="a function that makes one", accepts=callable
)
"""Registry without entries, because factories are named as MODULE:FUNCTION."""

ELF = b"\x7fELF"
"""First bytes of a compiled program."""

TRANSPORTS = ("command", "url", "in_process")
"""Keys that select the transport. Each server has exactly one."""


class ToolServerConfig(BaseModel):
    """MCP server: a command, a URL, or a function that creates a server in the rollout worker."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    command: list[str] | None = Field(None, min_length=1)
    """Program and arguments of a server on standard streams. Every episode starts its own process,
    unless the server is ``shared``."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the command, in addition to PATH, HOME and a few others. No other variables of
    the worker are passed."""
    cwd: str | None = None
    """Working directory of the command. Default: the worker's."""
    url: str | None = None
    """URL of a server with streamable HTTP, such as http://127.0.0.1:8000/mcp."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers of every request to the URL."""
    in_process: str | None = None
    """Function ``make(row)`` as MODULE:FUNCTION, which returns a server object of the ``mcp``
    package. It is called for every episode with the task's row, or once with {} if the server is
    ``shared``."""

    prefix: str = ""
    """Prefix of the tools' names in the prompt, for servers whose tools have equal names."""
    tools: list[str] | None = None
    """Tools that are offered to the policy, by their names on the server. null offers all. A judge
    can also call tools that are not offered."""
    shared: bool = False
    """Use one connection for all episodes of a rollout worker. Set it only for servers that keep
    no state between calls."""

    connect_seconds: float = Field(60.0, gt=0)
    """Time limit for starting the server, connecting to it and listing its tools."""
    call_seconds: float = Field(60.0, gt=0)
    """Time limit of one call. A longer call is a tool error that the policy reads, because it may have
    requested too much work."""
    max_output_bytes: int = Field(65536, gt=0)
    """Size limit of a tool output in bytes of UTF-8. The middle of a longer text is cut out."""

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        transports = [transport for transport in TRANSPORTS if getattr(self, transport) is not None]
        if len(transports) != 1:
            listed = " and ".join(transports) or "none"
            raise ValueError(
                f"a tool server needs one of {', '.join(TRANSPORTS)}, but has {listed}"
            )

        # A key without effect is an error, because a user would rely on it.
        [transport] = transports
        if transport != "command" and (self.env or self.cwd is not None):
            raise ValueError(f"env and cwd need a command, but this server has {transport}")
        if transport != "url" and self.headers:
            raise ValueError(f"headers need a url, but this server has {transport}")
        # Import the function here, so that a wrong name fails before the run.
        if self.in_process is not None:
            FACTORIES.resolve(self.in_process)
        return self

    def scripts(self) -> list[Path]:
        """Return the files that the command names, and the module of ``in_process``.

        Compiled programs, such as an interpreter, are left out.
        """
        # Words that are not files, such as options, are left out below.
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
        return False  # computing its digest fails, too, and reports the error
