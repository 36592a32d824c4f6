"""Limits the number, time and memory of a server's connections.

A client without a key must not be able to block other clients, and a client with a key must not be
able to delay others noticeably.
"""

import asyncio
import logging
import resource
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

HEADER_SECONDS = 10.0
"""Time limit in seconds for the headers of a request, and between two requests of a connection."""
LINGER_SECONDS = 1.0
"""Time in seconds for the rest of an unread body, so that the client can read the response."""
READ_BYTES = 32 * 1024
"""Number of bytes that are read from a connection and parsed at a time."""
MAX_CONNECTIONS = 4096
"""Maximum connections of all clients. Lower if the process may open fewer files."""
MAX_UNKNOWN_CONNECTIONS = 256
"""Maximum connections that have not sent a valid key yet."""


http_logger = logging.getLogger("rl_loop.gateway.http")
# aiohttp logs a traceback for every request that is not HTTP, so clients without a key could fill
# the disk.
http_logger.setLevel(logging.CRITICAL)


def server_options() -> dict[str, Any]:
    """Return the limits that aiohttp's server implements."""
    return {
        # Also counts from the start of a connection, so the headers must be complete by then.
        "keepalive_timeout": HEADER_SECONDS,
        "lingering_time": LINGER_SECONDS,
        "read_bufsize": READ_BYTES,
        # A few compressed kilobytes can expand to gigabytes.
        "auto_decompress": False,
        "logger": http_logger,
    }


class OpenConnections:
    """The open connections of a server.

    New connections replace the oldest ones without a key, which have sent nothing useful.
    Connections with a key are replaced only when they are idle.
    """

    def __init__(
        self, most: int | None = None, most_unknown: int = MAX_UNKNOWN_CONNECTIONS
    ) -> None:
        """Set the limits.

        Args:
            most: maximum connections of all clients. Default: as the process's limit of files
                allows.
            most_unknown: maximum connections that have not sent a valid key yet.
        """
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The process also opens files and connections to engines and environments.
        possible = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else files // 2
        self._most = most or max(16, min(MAX_CONNECTIONS, possible))
        # At least half is left for clients with a key.
        self._most_unknown = min(most_unknown, max(1, self._most // 2))
        self._unknown: dict[RequestHandler, None] = {}
        """Connections without a valid key, oldest first."""
        self._known: dict[RequestHandler, int] = {}
        """Requests in flight of each connection that has sent a key, longest idle first."""

    def __len__(self) -> int:
        return len(self._unknown) + len(self._known)

    def watch(self, server: web.Server) -> None:
        """Count the connections of a server."""
        # aiohttp has no hook for connections, so its methods are replaced.
        made, lost = server.connection_made, server.connection_lost

        def connection_made(handler: RequestHandler, transport: asyncio.Transport) -> None:
            made(handler, transport)
            # asyncio reads 256 KiB at a time, for which aiohttp's parser takes up to 0.1 s.
            if hasattr(transport, "max_size"):
                transport.max_size = READ_BYTES
            self._add(handler)

        def connection_lost(handler: RequestHandler, exc: BaseException | None = None) -> None:
            lost(handler, exc)
            self._remove(handler)

        server.connection_made = connection_made  # type: ignore[method-assign]
        server.connection_lost = connection_lost  # type: ignore[method-assign]

    def begin_request(self, handler: RequestHandler) -> None:
        """Record that a connection has sent a request with a valid key."""
        # A dictionary keeps the order of insertion. Inserting again moves the connection to the
        # end.
        self._unknown.pop(handler, None)
        self._known[handler] = self._known.pop(handler, 0) + 1

    def end_request(self, handler: RequestHandler) -> None:
        """Record that a request of a connection is answered."""
        # The connection may have been closed during the request.
        if handler in self._known:
            self._known[handler] = self._known.pop(handler) - 1

    def _add(self, handler: RequestHandler) -> None:
        """Add a connection, and close one if there are too many."""
        self._unknown[handler] = None
        if len(self._unknown) > self._most_unknown:
            self._close(next(iter(self._unknown)))
        if len(self) > self._most:
            idle = (known for known, requests in self._known.items() if requests == 0)
            # If every other connection is busy, the new one is closed.
            self._close(next(idle, handler))

    def _close(self, handler: RequestHandler) -> None:
        # At once: the event loop calls ``connection_lost`` later, and until then the count would
        # be wrong.
        self._remove(handler)
        handler.force_close()

    def _remove(self, handler: RequestHandler) -> None:
        self._unknown.pop(handler, None)
        self._known.pop(handler, None)
