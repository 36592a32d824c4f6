"""Messages between the host and process 1 of a shell sandbox, on a Unix stream socket.

A message is a header, a JSON object and raw bytes. The host sends one request at a time. Process 1
answers each request with any number of parts (``{"part": true}`` with bytes), and then with the
result. A result with the key "failed" is a failure of the sandbox, which the commands in it did not
cause.
"""

import json
import socket
import struct
from dataclasses import asdict, dataclass
from typing import Any

HEADER = struct.Struct("!IQ")
"""Length of the JSON object and of the raw bytes."""
MAX_OBJECT_BYTES = 1 << 24
MAX_PAYLOAD_BYTES = 1 << 28
PART_BYTES = 1 << 16
"""Size of a part in bytes."""


@dataclass(frozen=True)
class SandboxSpec:
    """Everything that process 1 needs to build a sandbox."""

    uid: int
    """User id on the host, which is 0 inside."""
    gid: int
    layers: list[str]
    """Directories, uppermost first. Absolute, or relative to the image store."""
    disk_bytes: int
    disk_files: int
    memory_bytes: int
    address_space_bytes: int
    processes: int
    output_bytes: int
    """Output of a command that is kept, in bytes."""
    printed_bytes: int
    """Output after which a command is killed, in bytes."""
    cpus: list[int] | None
    """Processors of the sandbox. None for all."""
    environment: dict[str, str]
    working_directory: str
    seccomp: str
    """System-call filter: an array of ``struct sock_filter``, in hexadecimal."""
    socket_buffer_bytes: int
    """Value of net.core.wmem_default of the host."""

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)


def encode(fields: dict[str, Any], payload: bytes = b"") -> bytes:
    """Return a message."""
    text = json.dumps(fields).encode()
    return HEADER.pack(len(text), len(payload)) + text + payload


class Connection:
    """Blocking side of the socket, in process 1."""

    def __init__(self, control: socket.socket) -> None:
        self.socket = control

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the next request. Raises EOFError if the host has closed the socket."""
        size, payload_size = HEADER.unpack(self._read(HEADER.size))
        if size > MAX_OBJECT_BYTES or payload_size > MAX_PAYLOAD_BYTES:
            raise EOFError("a message is too large")
        return json.loads(self._read(size)), bytes(self._read(payload_size))

    def send(self, fields: dict[str, Any], payload: bytes = b"") -> None:
        self.socket.sendall(encode(fields, payload))

    def _read(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            part = self.socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError("the host closed the connection")
            data += part
        return data


class PartWriter:
    """File object that sends everything written to it as parts."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> int:
        for start in range(0, len(data), PART_BYTES):
            self._connection.send({"part": True}, bytes(data[start : start + PART_BYTES]))
        return len(data)
