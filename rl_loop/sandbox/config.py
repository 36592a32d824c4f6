"""Settings and limits of sandboxed Python calls, and of the pool that runs the calls."""

import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from megatron_gptoss.user_error import UserError

MIB = 1 << 20
MIN_CPU_SECONDS = 10


class SandboxFailure(RuntimeError):
    """A call failed for a reason that is not the program's: its server died or hung, the machine
    has no memory or no process left, the sandbox was closed. It says nothing about the program and
    must not become a reward."""

    def __init__(self, reason: str, culprit: str = "no server") -> None:
        """``reason``: for people. ``culprit``: the kind of failure, under which it is counted."""
        super().__init__(reason)
        self.culprit = culprit


class SandboxUnavailable(UserError, SandboxFailure):
    """Untrusted code can not be isolated on this machine; the message says why and what to do."""


class SandboxConfig(BaseModel):
    """Settings of the sandbox. The defaults suit short numeric programs written by a model."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    workers: int = Field(default=2, ge=1)
    """Number of servers: calls that run at the same time. One per core that the rollout can spare."""

    timeout_seconds: float = Field(default=10.0, gt=0)
    """Wall-clock seconds of one call; then all its processes are killed. Each process also has this
    much processor time, and at least 10 s."""

    memory_bytes: int = Field(default=1024 * MIB, ge=128 * MIB)
    """Address space of each process of a call, in bytes (RLIMIT_AS). Raise it for large arrays."""

    total_memory_bytes: int = Field(default=2048 * MIB, ge=128 * MIB)
    """Memory of all processes of a call together, with what the kernel holds for them, in bytes.
    The kernel enforces it where a cgroup is delegated (``gptoss doctor`` reports it). Elsewhere it
    is measured ten times a second, and a program may exceed it between two measurements."""

    preload_modules: tuple[str, ...] = (
        "cmath", "collections", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json", "math",
        "random", "re", "statistics", "string", "sys",
    )  # fmt: skip
    """Modules that a server imports once, so that a call's import is free. Add what the model uses
    most (sympy, numpy); each must be installed in the interpreter below."""

    interpreter: Path | None = None
    """Python executable to run inside; by default the base installation of the running Python,
    which is seen read-only. Its own site-packages are importable, those of a virtual environment
    never are."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one call that no run needs to change."""

    cpu_seconds: int | None = None
    """Processor seconds of each process of a call (RLIMIT_CPU). None: the timeout, and at least
    ``MIN_CPU_SECONDS``."""
    use_cgroup: bool = True
    """Whether to limit memory and share processors by cgroup v2 where one is delegated."""
    processes: int = 64
    """Processes and threads of one call (RLIMIT_NPROC, counted inside the call's own user
    namespace)."""
    open_files: int = 64
    """Open file descriptors of each process of a call (RLIMIT_NOFILE)."""
    file_bytes: int = 16 * MIB
    """Largest file that a call may write, in bytes (RLIMIT_FSIZE)."""
    tmp_bytes: int = 64 * MIB
    """Size of the call's own /tmp (a tmpfs, also seen as /dev/shm), in bytes. It is memory, and is
    deleted after the call."""
    tmp_files: int = 4096
    """Files and directories in the call's own /tmp. Empty files cost kernel memory too."""
    output_bytes: int = 64 * 1024
    """Standard output and standard error together, in bytes. A program that prints more is
    killed."""
    code_bytes: int = MIB
    """Largest program, in bytes of UTF-8. A larger one is answered with an error and not run."""
    calls_per_server: int = 1000
    """Calls after which a server is replaced. It is replaced at once after a call that was killed."""

    def cpu_seconds_of(self, config: SandboxConfig) -> int:
        """Return the processor seconds of each process of a call."""
        if self.cpu_seconds is not None:
            return self.cpu_seconds
        return max(MIN_CPU_SECONDS, math.ceil(config.timeout_seconds))
