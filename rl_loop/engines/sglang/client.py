"""HTTP client of one SGLang server (0.5.17).

``ServerError`` is a fault of the server: another server may serve the same request.
``RequestRejectedError`` is a fault of the request: every server would reject it.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import aiohttp

CONNECT_SECONDS = 10.0
SHOWN_CHARACTERS = 300
"""Length limit of a server's response in an error message."""


class ServerError(RuntimeError):
    """The server is gone, silent, or sent an invalid response. The message names the server."""


class RequestRejectedError(ValueError):
    """The server understood the request and rejected it. Every other server would, too."""


class SglangClient:
    """Client of the server at ``url``.

    Args:
        url: ``http://host:port``.
        idle_seconds: the server counts as dead after this many seconds of silence on a connection.
        api_key: key that the server was started with, if any.
    """

    def __init__(
        self, url: str, idle_seconds: float = 300.0, *, api_key: str | None = None
    ) -> None:
        self.url = url
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # The response as a whole has no time limit: a stream lasts as long as a turn does.
        self._timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=CONNECT_SECONDS,
            sock_read=idle_seconds,
        )
        self._session: aiohttp.ClientSession | None = None

    def _connection(self) -> aiohttp.ClientSession:
        # Created by the first call, because a session belongs to the running event loop.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # any number of connections
                timeout=self._timeout,
                headers=self._headers,
            )
        return self._session

    async def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        seconds: float | None = None,
    ) -> Any:
        """Send ``body`` as JSON with POST, or send a GET request if it is None.

        Args:
            path: path of the endpoint, such as ``/generate``.
            body: JSON object.
            seconds: time limit of the call. None: no limit.

        Returns:
            The decoded response. None if it is empty or not JSON.

        Raises:
            RequestRejectedError: for HTTP 4xx and for ``success: false``.
            ServerError: for HTTP 5xx, without a connection, and after ``seconds``.
        """
        where = f"{self.url}{path}"
        method = "GET" if body is None else "POST"
        request = self._connection().request(method, where, json=body)
        try:
            async with asyncio.timeout(seconds), request as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise ServerError(f"{where}: {_reason(error)}") from error

        try:
            content = json.loads(text)
        # Some endpoints, such as /flush_cache, respond with text.
        except ValueError:
            content = None

        # Some endpoints reject a request with HTTP 200 and ``success: false`` in the body.
        refused = isinstance(content, dict) and content.get("success") is False
        if response.status >= 400 or refused:
            quoted = text[:SHOWN_CHARACTERS]
            raise _error_class(response.status)(f"{where}: HTTP {response.status}: {quoted}")
        return content

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of a streamed ``/generate``: ``output_ids`` and ``meta_info``.

        Raises:
            RequestRejectedError: for HTTP 4xx, also as an error within the stream.
            ServerError: for every other failure, and if the stream ends early.
        """
        where = f"{self.url}/generate"
        try:
            async with self._connection().post(where, json=body) as response:
                if response.status != 200:
                    quoted = (await response.text())[:SHOWN_CHARACTERS]
                    raise _error_class(response.status)(
                        f"{where}: HTTP {response.status}: {quoted}"
                    )
                async with aclosing(_event_payloads(response.content)) as payloads:
                    async for payload in payloads:
                        if payload == b"[DONE]":
                            return
                        yield _read_chunk(where, payload)
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{where}: {_reason(error)}") from error
        # A server that dies in the middle of a stream may close the connection without an error.
        raise ServerError(f"{where}: the response ended before its last chunk")

    async def healthy(self, seconds: float) -> bool:
        """Return True if the server generates a token within ``seconds``.

        The check takes at least 1 s, because ``health_generate`` of SGLang 0.5.17 sleeps first.
        """
        try:
            await self.call("/health_generate", seconds=seconds)
        except (ServerError, RequestRejectedError):
            return False
        return True

    async def close(self) -> None:
        """Close all connections. A later call opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _event_payloads(stream: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Split server-sent events (``data: ...`` and an empty line) into their payloads."""
    # aiohttp limits the length of a line when it reads by lines. The expert indices of an episode
    # are one line of several MB.
    pending = bytearray()
    async for data in stream.iter_any():
        pending += data
        # Without an end of line there is no whole event. Searching the long line again takes long.
        if b"\n" not in data:
            continue
        *events, pending = pending.split(b"\n\n")
        for event in events:
            yield bytes(event.removeprefix(b"data: "))


def _error_class(status: int) -> type[ServerError | RequestRejectedError]:
    return ServerError if status >= 500 else RequestRejectedError


def _read_chunk(where: str, payload: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(payload)
    except ValueError:
        raise ServerError(f"{where}: a chunk is not JSON: {payload[:100]!r}") from None

    # An error within a stream is a chunk that contains the HTTP status of the error.
    if error := chunk.get("error"):
        raise _error_class(error.get("code", 400))(f"{where}: {error.get('message')}")
    return chunk


def _reason(error: BaseException) -> str:
    name = type(error).__name__
    if not str(error):
        return name
    return f"{name}: {error}"
