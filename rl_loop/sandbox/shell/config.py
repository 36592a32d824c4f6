"""Settings and limits of shell sandboxes."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from rl_loop.sandbox.config import MIB


class ShellSandboxConfig(BaseModel):
    """Settings of shell sandboxes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    store: Path = Path("~/.cache/gptoss/images")
    """Directory of unpacked images. It needs a file system with extended attributes on the node's
    own disk."""

    max_sandboxes: int = Field(default=64, ge=1)
    """Maximum number of open sandboxes. Further calls of ``open`` wait."""

    timeout_seconds: float = Field(default=60.0, gt=0)
    """Wall-clock time of one command in seconds, unless a call sets another. After it all processes
    of the sandbox are killed."""

    memory_gb: float = Field(default=2.0, ge=0.05, allow_inf_nan=False)
    """Maximum memory of all processes of a sandbox together, in GB. Files are not included."""

    address_space_gb: float = Field(default=8.0, ge=0.1, allow_inf_nan=False)
    """Maximum address space of each process, in GB (RLIMIT_AS)."""

    disk_gb: float = Field(default=1.0, ge=0.001, allow_inf_nan=False)
    """Maximum size of changed files, in GB. They are in the node's memory."""

    disk_files: int = Field(default=200_000, ge=100)
    """Maximum number of changed files and directories."""

    processes: int = Field(default=256, ge=4)
    """Maximum number of processes and threads of a sandbox."""

    output_kb: int = Field(default=16, ge=1)
    """Output of a command that is kept, in kB: the first and the last half."""

    cpus: int | None = Field(default=1, ge=1)
    """CPUs that a sandbox may use. null: all. Programs see only these CPUs."""

    @property
    def limits(self) -> "ShellLimits":
        """The limits of a sandbox."""
        return ShellLimits(
            command_seconds=self.timeout_seconds,
            memory_bytes=int(self.memory_gb * 1e9),
            address_space_bytes=int(self.address_space_gb * 1e9),
            disk_bytes=int(self.disk_gb * 1e9),
            disk_files=self.disk_files,
            processes=self.processes,
            output_bytes=self.output_kb * 1000,
            cpus=self.cpus,
        )


class ShellLimits(BaseModel):
    """Limits of one sandbox."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    command_seconds: float = Field(gt=0)
    """Wall-clock time of a command, unless a call sets another."""
    memory_bytes: int = Field(gt=0)
    """Memory of all processes together."""
    address_space_bytes: int = Field(gt=0)
    """Address space of each process."""
    disk_bytes: int = Field(gt=0)
    """Changed files, including /tmp and /dev/shm."""
    disk_files: int = Field(gt=0)
    """Changed files and directories, by number."""
    processes: int = Field(gt=0)
    output_bytes: int = Field(gt=1)
    """Output of a command that is kept."""
    printed_bytes: int = Field(default=256 * MIB, gt=0)
    """Output after which a command is killed."""
    cpus: int | None = None
    """CPUs of the sandbox. None for all."""
