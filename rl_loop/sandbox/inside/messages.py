"""Messages between the host and the server, on a Unix stream socket that is descriptor 0 of the
server.

They are framed as by ``multiprocessing.connection``. The host sends ``ServerSettings`` once, then
a ``Call`` whenever the last one is answered, as JSON. The first byte of an answer says what it is:
READY, STARTED, RESULT (a line of JSON, then the raw output) or FAILED (the reason)."""

import json
import struct
from dataclasses import asdict, dataclass

CONTROL = 0
"""The descriptor of the socket in the server and its supervisors."""

READY = b"Y"
STARTED = b"S"
"""The program has begun, and may be the cause of what goes wrong from now on."""
RESULT = b"R"
FAILED = b"F"
"""The call failed for a reason that is not the program's."""


@dataclass(frozen=True)
class ServerSettings:
    """Limits of every call (``SandboxConfig`` explains them), and what else a server must be
    told."""

    preload_modules: list[str]
    timeout_seconds: float
    cpu_seconds: int
    memory_bytes: int
    total_memory_bytes: int
    processes: int
    open_files: int
    file_bytes: int
    tmp_bytes: int
    tmp_files: int
    output_bytes: int

    seccomp: str
    """The system-call filter: an array of ``struct sock_filter``, in hexadecimal."""

    socket_buffer_bytes: int
    """net.core.wmem_default, which only the host's network namespace tells."""

    memory_events: int | None
    """Descriptor of ``memory.events`` of the server's cgroup; None without a cgroup."""

    has_cpu_weight: bool
    """The cgroup shares processors."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, message: bytes) -> "ServerSettings":
        return cls(**json.loads(message))


@dataclass(frozen=True)
class Call:
    """What the host asks for."""

    code: str

    history: list[str]
    """Programs of the session that ran before, oldest first."""

    @property
    def programs(self) -> int:
        return len(self.history) + 1

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, message: bytes) -> "Call":
        return cls(**json.loads(message))


@dataclass(frozen=True)
class CallResult:
    """What the program of a call did; its output follows the result in the message."""

    exit_code: int
    """0 to 255, or minus the number of the signal that killed it."""

    killed_for: str | None
    """"time", "memory", "locks", "output" or "history"; None if the program ended by itself."""

    ended: bool
    """It ended its interpreter: no session goes on from here."""

    truncated: bool
    """It printed more than the limit."""

    seconds: float
    """Wall-clock time of the last program."""

    def to_message(self, output: bytes) -> bytes:
        return RESULT + json.dumps(asdict(self)).encode() + b"\n" + output

    @classmethod
    def from_payload(cls, payload: bytes) -> tuple["CallResult", bytes]:
        """The result and the output. Raises ValueError or KeyError if it is neither."""
        line, _, output = payload.partition(b"\n")
        header = json.loads(line)
        result = cls(
            exit_code=int(header["exit_code"]),
            killed_for=header["killed_for"],
            ended=bool(header["ended"]),
            truncated=bool(header["truncated"]),
            seconds=float(header["seconds"]),
        )
        return result, output


def receive() -> bytes:
    """Read the host's next message. Reads ahead: the host must not send another one before it has
    an answer."""
    with open(CONTROL, "rb", closefd=False) as stream:
        (size,) = struct.unpack("!i", stream.read(4))
        return stream.read(size)


def send(message: bytes) -> None:
    """Write one message to the host."""
    with open(CONTROL, "wb", closefd=False) as stream:
        stream.write(struct.pack("!i", len(message)) + message)
