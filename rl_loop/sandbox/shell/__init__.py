"""Sandboxes with a real shell, for agents that work on files. They need Linux 6.6 and bash."""

from rl_loop.sandbox.shell.config import ShellLimits, ShellSandboxConfig
from rl_loop.sandbox.shell.images import HOST_IMAGE, HOST_PYTHON_IMAGE, Image, ImageStore
from rl_loop.sandbox.shell.layers import ImageError
from rl_loop.sandbox.shell.pool import ShellSandboxPool, check_shell_sandboxes
from rl_loop.sandbox.shell.sandbox import (
    ChangedFiles,
    CommandResult,
    SandboxFile,
    SandboxFilesError,
    SandboxUsage,
    ShellSandbox,
)

__all__ = [
    "HOST_IMAGE",
    "HOST_PYTHON_IMAGE",
    "ChangedFiles",
    "CommandResult",
    "Image",
    "ImageError",
    "ImageStore",
    "SandboxFile",
    "SandboxFilesError",
    "SandboxUsage",
    "ShellLimits",
    "ShellSandbox",
    "ShellSandboxConfig",
    "ShellSandboxPool",
    "check_shell_sandboxes",
]
