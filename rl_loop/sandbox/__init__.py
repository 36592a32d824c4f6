"""Isolated Python interpreter for programs written by a model. Needs Linux and bubblewrap."""

from rl_loop.sandbox.config import (
    SandboxConfig,
    SandboxError,
    SandboxLimits,
    SandboxUnavailableError,
)
from rl_loop.sandbox.connection import ExecutionResult
from rl_loop.sandbox.python_sandbox import PythonSandbox, check_isolation

__all__ = [
    "ExecutionResult",
    "PythonSandbox",
    "SandboxConfig",
    "SandboxError",
    "SandboxLimits",
    "SandboxUnavailableError",
    "check_isolation",
]
