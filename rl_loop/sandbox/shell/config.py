"""Settings and limits of shell sandboxes."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from rl_loop.sandbox.config import MIB


class ShellSandboxConfig(BaseModel):
    """Settings of shell sandboxes. A task may lower the limits."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    store: Path = Path("~/.cache/gptoss/images")
    """Directory of unpacked images. It needs a file system with extended attributes on the node's
    own disk."""

    most: int = Field(default=64, ge=1)
    """Sandboxes of one rollout worker at the same time. More episodes wait for a place."""

    timeout_seconds: float = Field(default=60.0, gt=0)
    """Wall-clock time of one command in seconds. After it all processes of the sandbox are killed."""

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
    """Processors that a sandbox may use. null: all. Programs see only these processors."""

    @property
    def limits(self) -> "ShellLimits":
        """The limits of a sandbox."""
        return ShellLimits(
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
    """Processors of the sandbox. None for all."""

    def capped(self, **wanted: int) -> "ShellLimits":
        """Return limits that are lowered to the wanted values. Larger values have no effect."""
        lower = {name: min(value, getattr(self, name) or value) for name, value in wanted.items()}
        return self.model_copy(update=lower)
