"""Settings and limits of sandboxed Python calls, and of the pool that runs the calls."""

import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from megatron_gptoss.user_error import UserError

MIB = 1 << 20
MIN_CPU_SECONDS = 10


class SandboxError(RuntimeError):
    """Call that failed for a reason other than its program.

    Examples: the server died or hung, the machine has no memory or no process left, or the sandbox
    was closed. The failure says nothing about the program and must not become a reward.
    """

    def __init__(self, reason: str, failure_source: str = "no server") -> None:
        """Create a failure.

        Args:
            reason: message for users.
            failure_source: kind of failure, for counting.
        """
        super().__init__(reason)
        self.failure_source = failure_source


class SandboxUnavailableError(UserError, SandboxError):
    """Untrusted code cannot be isolated on this machine. The message has a remedy."""


class SandboxConfig(BaseModel):
    """Settings of the sandbox. The defaults suit short numeric programs written by a model."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    servers: int = Field(default=2, ge=1)
    """Number of servers, which is the number of concurrent calls. Use the cores that the rollout
    can spare."""

    timeout_seconds: float = Field(default=10.0, gt=0)
    """Wall-clock time of one call in seconds. After it all processes of the call are killed. Each
    process has the same limit for CPU time, but at least 10 s."""

    address_space_gb: float = Field(default=1.0, ge=0.14, allow_inf_nan=False)
    """Maximum address space of each process in a call, in GB (RLIMIT_AS). Increase it for large
    arrays."""

    total_memory_gb: float = Field(default=2.0, ge=0.14, allow_inf_nan=False)
    """Maximum memory of all processes in a call together, in GB, including kernel memory. The
    kernel enforces it if a cgroup is delegated (``gptoss doctor`` reports this). Otherwise it is
    measured 10 times per second, and a program may exceed it between two measurements."""

    preload_modules: tuple[str, ...] = (
        "cmath", "collections", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json", "math",
        "random", "re", "statistics", "string", "sys",
    )  # fmt: skip
    """Modules that a server imports once, so that imports in calls take no time. Add modules that
    the model often uses (sympy, numpy). They must be installed for ``interpreter``."""

    interpreter: Path | None = None
    """Python executable inside the sandbox. Default: the base installation of the running Python,
    mounted read-only. Its site-packages can be imported, but no virtual environment's."""

    @property
    def address_space_bytes(self) -> int:
        """``address_space_gb`` in bytes."""
        return int(self.address_space_gb * 1e9)

    @property
    def total_memory_bytes(self) -> int:
        """``total_memory_gb`` in bytes."""
        return int(self.total_memory_gb * 1e9)


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one call that are not in the configuration."""

    cpu_seconds: int | None = None
    """Processor time of each process in a call, in seconds (RLIMIT_CPU). None: the timeout, but at
    least ``MIN_CPU_SECONDS``."""
    use_cgroup: bool = True
    """Limit memory and share processors by cgroup v2 if a cgroup is delegated."""
    processes: int = 64
    """Maximum number of processes and threads of one call (RLIMIT_NPROC in the call's user
    namespace)."""
    open_files: int = 64
    """Maximum number of open file descriptors for each process in a call (RLIMIT_NOFILE)."""
    file_bytes: int = 16 * MIB
    """Maximum size of a file that a call writes, in bytes (RLIMIT_FSIZE)."""
    tmp_bytes: int = 64 * MIB
    """Size in bytes of the call's private /tmp (a tmpfs, also mounted as /dev/shm). It uses memory
    and is deleted after the call."""
    tmp_files: int = 4096
    """Maximum number of files and directories in the call's /tmp. Empty files use kernel memory."""
    output_bytes: int = 64 * 1024
    """Maximum output in bytes (standard output plus standard error). A program that prints more is
    killed."""
    code_bytes: int = MIB
    """Maximum size of a program in UTF-8 bytes. A larger program is not run and gives an error."""
    calls_per_server: int = 1000
    """Calls after which a server is replaced. After a killed call it is replaced at once."""

    def effective_cpu_seconds(self, config: SandboxConfig) -> int:
        """Return the processor time limit for each process in a call, in seconds."""
        if self.cpu_seconds is not None:
            return self.cpu_seconds
        return max(MIN_CPU_SECONDS, math.ceil(config.timeout_seconds))
