"""HTTP client of one SGLang server (0.5.17), as far as rollouts need it.

A fault of the server (ServerFailed: another one can do the same request) is told apart from a
fault of the request (RequestRejected: every server would refuse it).
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import aiohttp

CONNECT_SECONDS = 10.0
SHOWN_CHARACTERS = 300
"""Of an answer that an error quotes."""


class ServerFailed(RuntimeError):
    """The server is gone, silent or talks nonsense; the message names it."""


class RequestRejected(ValueError):
    """The server understood the request and refuses it; so would every other one."""


class SglangClient:
    """Talks to the server at ``url`` (``http://host:port``).

    After ``idle_seconds`` of silence on a connection the server counts as dead. ``api_key`` is the
    key that the server was started with, if it has one.
    """

    def __init__(
        self, url: str, idle_seconds: float = 300.0, *, api_key: str | None = None
    ) -> None:
        self.url = url
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # No limit of the whole answer: a stream lasts as long as a turn does.
        self._timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=CONNECT_SECONDS,
            sock_read=idle_seconds,
        )
        self._session: aiohttp.ClientSession | None = None

    def _connection(self) -> aiohttp.ClientSession:
        # Made with the first call, because a session belongs to the event loop that runs then.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # no limit of connections
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
        """POST ``body`` as JSON, or GET without one.

        Returns the decoded answer, None if it is empty or no JSON.

        Raises:
            RequestRejected: for HTTP 4xx and ``success: false``.
            ServerFailed: for every other answer that is not 2xx, and after ``seconds``.
        """
        where = f"{self.url}{path}"
        method = "GET" if body is None else "POST"
        request = self._connection().request(method, where, json=body)
        try:
            async with asyncio.timeout(seconds), request as answer:
                text = await answer.text()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise ServerFailed(f"{where}: {_reason(error)}") from error

        try:
            content = json.loads(text)
        except ValueError:
            content = None

        # Some endpoints answer 200 and say in the body that they refused.
        refused = isinstance(content, dict) and content.get("success") is False
        if answer.status >= 400 or refused:
            quoted = text[:SHOWN_CHARACTERS]
            raise _error_class(answer.status)(f"{where}: HTTP {answer.status}: {quoted}")
        return content

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of a streamed ``/generate``: ``output_ids`` and ``meta_info``.

        Raises as ``call`` does.
        """
        where = f"{self.url}/generate"
        try:
            async with self._connection().post(where, json=body) as answer:
                if answer.status != 200:
                    quoted = (await answer.text())[:SHOWN_CHARACTERS]
                    raise _error_class(answer.status)(f"{where}: HTTP {answer.status}: {quoted}")
                async with aclosing(_event_payloads(answer.content)) as payloads:
                    async for payload in payloads:
                        if payload == b"[DONE]":
                            return
                        yield _read_chunk(where, payload)
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailed(f"{where}: {_reason(error)}") from error
        raise ServerFailed(f"{where}: the answer ended in the middle")

    async def healthy(self, seconds: float) -> bool:
        """Whether the server generates a token within ``seconds`` (it takes at least one)."""
        try:
            await self.call("/health_generate", seconds=seconds)
        except (ServerFailed, RequestRejected):
            return False
        return True

    async def close(self) -> None:
        """Close all connections; a later call makes new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _event_payloads(stream: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Split server-sent events (``data: ...`` and an empty line) into their payloads."""
    # aiohttp's reading by lines has a limit, and the routes of a whole episode are one line of
    # megabytes.
    unread = bytearray()
    async for data in stream.iter_any():
        unread += data
        if b"\n" not in data:
            continue
        *events, unread = unread.split(b"\n\n")
        for event in events:
            yield bytes(event.removeprefix(b"data: "))


def _error_class(status: int) -> type[ServerFailed | RequestRejected]:
    return ServerFailed if status >= 500 else RequestRejected


def _read_chunk(where: str, payload: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(payload)
    except ValueError:
        raise ServerFailed(f"{where}: a chunk is no JSON: {payload[:100]!r}") from None

    # Errors in the middle of a stream come as a chunk, with the status that they would have had.
    if error := chunk.get("error"):
        raise _error_class(error.get("code", 400))(f"{where}: {error.get('message')}")
    return chunk


def _reason(error: BaseException) -> str:
    name = type(error).__name__
    if not str(error):
        return name
    return f"{name}: {error}"
