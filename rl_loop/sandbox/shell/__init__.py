"""Sandboxes with a real shell, for agents that work on files. They need Linux 6.6 and bash."""

from rl_loop.sandbox.shell.config import ShellLimits, ShellSandboxConfig
from rl_loop.sandbox.shell.images import HOST_IMAGE, HOST_PYTHON_IMAGE, Image, ImageStore
from rl_loop.sandbox.shell.layers import ImageError
from rl_loop.sandbox.shell.sandbox import (
    CommandResult,
    SandboxFile,
    SandboxRefusalError,
    SandboxUsage,
    ShellSandbox,
    TakenFiles,
)
from rl_loop.sandbox.shell.sandboxes import ShellSandboxes, check_shell_sandboxes

__all__ = [
    "HOST_IMAGE",
    "HOST_PYTHON_IMAGE",
    "CommandResult",
    "Image",
    "ImageError",
    "ImageStore",
    "SandboxFile",
    "SandboxRefusalError",
    "SandboxUsage",
    "ShellLimits",
    "ShellSandbox",
    "ShellSandboxConfig",
    "ShellSandboxes",
    "TakenFiles",
    "check_shell_sandboxes",
]
