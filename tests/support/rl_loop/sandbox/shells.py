"""Shell sandboxes that are called without await."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from rl_loop.sandbox.shell import (
    HOST_PYTHON_IMAGE,
    CommandResult,
    Image,
    ShellLimits,
    ShellSandbox,
    ShellSandboxConfig,
    ShellSandboxPool,
)

SECONDS = 60.0
"""Time for commands that should end by themselves, on a busy machine."""


class Shells:
    """Running fork server whose sandboxes are called without await."""

    def __init__(self, store: Path, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        config = ShellSandboxConfig(store=store, **settings)
        self.pool = self.wait_for(self._make(config))
        self.image: Image = self.wait_for(self.pool.load(HOST_PYTHON_IMAGE))

    async def _make(self, config: ShellSandboxConfig) -> ShellSandboxPool:
        pool = ShellSandboxPool(config)
        await pool.start()
        return pool

    def wait_for(self, awaitable: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await awaitable

        return self._runner.run(run())

    def open(self, image: Image | None = None, **wanted: int) -> Shell:
        """Open a sandbox with limits that are lowered to the wanted values."""
        limits: ShellLimits = self.pool.config.limits.model_copy(update=wanted)
        sandbox = self.wait_for(self.pool.open(image or self.image, limits=limits))
        return Shell(self, sandbox)

    def close(self) -> None:
        self.wait_for(self.pool.close())
        self._runner.close()


class Shell:
    """One sandbox that is called without await."""

    def __init__(self, shells: Shells, sandbox: ShellSandbox) -> None:
        self._shells, self.sandbox = shells, sandbox

    def run(self, command: str, seconds: float = SECONDS, **options: Any) -> CommandResult:
        return self._shells.wait_for(self.sandbox.run(command, seconds=seconds, **options))

    def output(self, command: str, **options: Any) -> str:
        """Return the output of a command that must succeed."""
        result = self.run(command, **options)
        assert result.exit_code == 0, result
        return result.output

    def wait_for(self, awaitable: Awaitable[Any]) -> Any:
        return self._shells.wait_for(awaitable)

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *exception: object) -> None:
        self._shells.wait_for(self.sandbox.close())
