"""Result and output of a command."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class CommandOutcome:
    """Result of a command. The kept output is separate."""

    exit_code: int
    """0 to 255, or minus the number of the signal that killed the process."""
    killed_for: str | None
    """Limit that ended all processes: "time", "memory", "locks" or "output"."""
    seconds: float
    cut_bytes: int
    """Bytes of output that were left out between the head and the tail."""
    shell_ended: bool
    """True if the persistent bash ended."""
    new_shell: bool
    """True if a new persistent bash ran the command."""
    working_directory: str
    processes: int
    """Processes that still run, without process 1."""
    ended_before: str | None
    """Limit that ended the background processes since the previous command."""

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)


class OutputBuffer:
    """Keeps the first and the last half of a limit of bytes."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head, self._tail = bytearray(), bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room] if room > 0 else b""
        self._tail += data[max(0, room) :]
        if len(self._tail) > 4 * self._half:
            del self._tail[: -self._half]

    @property
    def cut_bytes(self) -> int:
        return max(0, self.total - len(self._head) - self._half)

    def contents(self) -> bytes:
        """Return the kept output, with a line about the bytes that were left out."""
        mark = f"\n[... {self.cut_bytes} bytes left out ...]\n".encode() if self.cut_bytes else b""
        return bytes(self._head) + mark + bytes(self._tail[-self._half :])
