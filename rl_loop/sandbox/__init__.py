"""Isolated Python interpreter for programs written by a model. Needs Linux and bubblewrap."""

from rl_loop.sandbox.config import SandboxConfig, SandboxFailure, SandboxLimits, SandboxUnavailable
from rl_loop.sandbox.connection import ExecutionResult
from rl_loop.sandbox.python_sandbox import PythonSandbox, check_isolation

__all__ = [
    "ExecutionResult",
    "PythonSandbox",
    "SandboxConfig",
    "SandboxFailure",
    "SandboxLimits",
    "SandboxUnavailable",
    "check_isolation",
]
