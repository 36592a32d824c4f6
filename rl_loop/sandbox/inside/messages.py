"""Messages between the host and the server, on a Unix stream socket (descriptor 0 of the server).

They have the framing of ``multiprocessing.connection``. The host sends ``SandboxServerSettings``
once. Then it sends a ``ProgramCall`` as JSON whenever the previous one is finished. The first byte
of a reply is its kind: READY, STARTED, RESULT (a line of JSON, then the raw output) or FAILED (the
reason).
"""

import json
import struct
from dataclasses import asdict, dataclass

CONTROL = 0
"""Descriptor of the socket in the server and its supervisors."""

READY = b"Y"
"""The server can run programs."""
STARTED = b"S"
"""The program has started. From here on it may be the cause of a failure."""
RESULT = b"R"
"""The program has ended. A line of JSON and the raw output follow (``CallResult``)."""
FAILED = b"F"
"""The call failed for a reason other than the program."""


@dataclass(frozen=True)
class SandboxServerSettings:
    """Limits of every call, and data that the server cannot read inside its namespaces.

    ``SandboxConfig`` explains the limits.
    """

    preload_modules: list[str]
    """Modules that the server imports once."""

    timeout_seconds: float
    """Wall-clock time of each program."""
    max_cpu_seconds: int
    """Processor time of each process, per program of a call."""
    max_address_space_bytes: int
    """Address space of each process."""
    max_memory_bytes: int
    """Memory of all processes of a call."""
    max_processes: int
    max_open_files: int
    max_file_bytes: int
    """Size of each written file."""
    max_tmp_bytes: int
    max_tmp_files: int
    max_output_bytes: int

    seccomp: str
    """System-call filter: an array of ``struct sock_filter``, in hexadecimal."""

    socket_buffer_bytes: int
    """Value of net.core.wmem_default, which is visible only in the host's network namespace."""

    memory_events: int | None
    """Descriptor of ``memory.events`` of the server's cgroup. None without a cgroup."""

    has_cpu_weight: bool
    """True if the cgroup limits the share of processors (cpu.weight).

    Otherwise the supervisor lowers the priority of busy tasks.
    """

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, message: bytes) -> "SandboxServerSettings":
        return cls(**json.loads(message))


@dataclass(frozen=True)
class ProgramCall:
    """Request of the host to run a program."""

    code: str

    history: list[str]
    """Earlier programs of the session, oldest first."""

    @property
    def program_count(self) -> int:
        """Number of programs that the call runs."""
        return len(self.history) + 1

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, message: bytes) -> "ProgramCall":
        return cls(**json.loads(message))


@dataclass(frozen=True)
class CallResult:
    """Result of a call's program. The output follows it in the message."""

    exit_code: int
    """0 to 255, or minus the number of the signal that killed it."""

    killed_for: str | None
    """Reason for killing: "time", "memory", "locks", "output" or "history". None if not killed."""

    interpreter_ended: bool
    """True if the program ended its interpreter, so the session cannot continue."""

    truncated: bool
    """True if it printed more than the limit."""

    seconds: float
    """Wall-clock time of the last program in seconds."""

    def to_message(self, output: bytes) -> bytes:
        return RESULT + json.dumps(asdict(self)).encode() + b"\n" + output

    @classmethod
    def from_payload(cls, payload: bytes) -> tuple["CallResult", bytes]:
        """Return the result and the output. Raises ValueError or KeyError if they are malformed."""
        line, _, output = payload.partition(b"\n")
        header = json.loads(line)
        result = cls(
            exit_code=int(header["exit_code"]),
            killed_for=header["killed_for"],
            interpreter_ended=bool(header["interpreter_ended"]),
            truncated=bool(header["truncated"]),
            seconds=float(header["seconds"]),
        )
        return result, output


def receive() -> bytes:
    """Read the host's next message.

    It reads ahead, so the host must wait for a reply before it sends another message.

    Raises:
        struct.error: if the host has closed the socket.
    """
    with open(CONTROL, "rb", closefd=False) as stream:
        (size,) = struct.unpack("!i", stream.read(4))
        return stream.read(size)


def send(message: bytes) -> None:
    """Write one message to the host."""
    with open(CONTROL, "wb", closefd=False) as stream:
        stream.write(struct.pack("!i", len(message)) + message)
