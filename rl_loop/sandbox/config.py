"""Limits of one sandboxed Python call, and of the pool that runs the calls."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from megatron_gptoss.user_error import UserError

MIB = 1 << 20


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
    """Every limit of the sandbox. The defaults suit short numeric programs written by a model."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    workers: int = Field(default=2, ge=1)
    """Servers, that is calls that run at the same time. One per core that the rollout can
    spare."""

    timeout_seconds: float = Field(default=10.0, gt=0)
    """Wall-clock seconds of one call; then all its processes are killed."""

    cpu_seconds: int = Field(default=10, ge=1)
    """Processor seconds of each process of a call (RLIMIT_CPU)."""

    memory_bytes: int = Field(default=1024 * MIB, ge=128 * MIB)
    """Address space of each process of a call, in bytes (RLIMIT_AS). Raise it for large arrays."""

    total_memory_bytes: int = Field(default=2048 * MIB, ge=128 * MIB)
    """Memory of all processes of a call together, with what the kernel holds for them, in bytes.
    The kernel enforces it where a cgroup is delegated; else it is looked at ten times a second,
    and a program may pass it for as long."""

    use_cgroup: bool = True
    """Limit memory and share processors by cgroup v2 where one is delegated to the user (``gptoss
    doctor`` tells).
    False: never, so that every machine of a cluster treats programs alike."""

    processes: int = Field(default=64, ge=1)
    """Processes and threads of one call (RLIMIT_NPROC, counted inside the call's own user
    namespace)."""

    open_files: int = Field(default=64, ge=8)
    """Open file descriptors of each process of a call (RLIMIT_NOFILE)."""

    file_bytes: int = Field(default=16 * MIB, ge=0)
    """Largest file that a call may write, in bytes (RLIMIT_FSIZE)."""

    tmp_bytes: int = Field(default=64 * MIB, ge=MIB)
    """Size of the call's own /tmp (a tmpfs, also seen as /dev/shm), in bytes. It is memory, gone
    after the call."""

    tmp_files: int = Field(default=4096, ge=16)
    """Files and directories in the call's own /tmp. Empty files cost kernel memory too."""

    output_bytes: int = Field(default=64 * 1024, ge=1)
    """Standard output and standard error together, in bytes. A program that prints more is
    killed."""

    code_bytes: int = Field(default=MIB, ge=1)
    """Largest program, in bytes of UTF-8. A larger one is answered with an error and not run."""

    calls_per_server: int = Field(default=1000, ge=1)
    """Calls after which a server is replaced by a fresh one. It is replaced at once after any call
    that was killed."""

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
