"""Lines of standard input, read without blocking the event loop."""

import asyncio
import os

READ_BYTES = 65536


class StandardInput:
    """Lines of a terminal, a pipe or a file.

    No thread waits for input, because Ctrl-C could not end it.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._waiting = b""
        """Bytes that were read, but belong to later lines."""

    async def read_line(self) -> str | None:
        """Return the next line without its line break, or None at the end of input."""
        while b"\n" not in self._waiting:
            read = await self._read()
            if not read:
                # The last line of a file may have no line break.
                rest, self._waiting = self._waiting, b""
                return rest.decode(errors="replace") if rest else None
            self._waiting += read
        line, _, self._waiting = self._waiting.partition(b"\n")
        return line.decode(errors="replace").removesuffix("\r")

    async def _read(self) -> bytes:
        """Return bytes as soon as there are some. Empty at the end of input."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            loop.add_reader(self._descriptor, readable.set)
        except PermissionError:
            # epoll rejects files and /dev/null, whose reads never wait.
            return os.read(self._descriptor, READ_BYTES)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._descriptor)
        return os.read(self._descriptor, READ_BYTES)
