"""HTTP to one SGLang server (0.5.17), as far as rollouts need it. Its faults and a request's are told apart."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp


class ServerFailed(RuntimeError):
    """The server is gone, silent or talks nonsense; the message names it. Another one can do the same request."""


class RequestRejected(ValueError):
    """The server understood the request and refuses it; so would every other one."""


class SglangClient:
    """``url`` is ``http://host:port``. After ``idle_seconds`` of silence on a connection the server counts as dead."""

    def __init__(self, url: str, idle_seconds: float = 300.0) -> None:
        self.url = url
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=idle_seconds)
        self._session: aiohttp.ClientSession | None = None

    def _connection(self) -> aiohttp.ClientSession:
        if self._session is None:  # belongs to the event loop that is running now
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout)
        return self._session

    async def call(self, path: str, body: dict[str, Any] | None = None, *, seconds: float | None = None) -> Any:
        """POST ``body`` as JSON, or GET without one; the decoded answer, None if it is empty or no JSON.

        Raises RequestRejected for 4xx and ``success: false``, ServerFailed for everything else that is not 2xx or takes
        more than ``seconds``."""
        request = self._connection().request("GET" if body is None else "POST", self.url + path, json=body)
        try:
            async with asyncio.timeout(seconds), request as answer:
                text = await answer.text()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise ServerFailed(f"{self.url}{path}: {_reason(error)}") from error
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        refused = isinstance(content, dict) and content.get("success") is False
        if answer.status >= 400 or refused:
            raise _fault(answer.status)(f"{self.url}{path}: HTTP {answer.status}: {text[:300]}")
        return content

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a streamed ``/generate``: ``output_ids``, ``meta_info``. Raises as ``call`` does."""
        where = f"{self.url}/generate"
        unread = bytearray()
        try:
            async with self._connection().post(where, json=body) as answer:
                if answer.status != 200:
                    raise _fault(answer.status)(f"{where}: HTTP {answer.status}: {(await answer.text())[:300]}")
                async for data in answer.content.iter_any():  # a line may be megabytes long: routes of a whole episode
                    unread += data
                    if b"\n" not in data:
                        continue
                    *events, unread = unread.split(b"\n\n")
                    for event in events:
                        payload = bytes(event.removeprefix(b"data: "))
                        if payload == b"[DONE]":
                            return
                        yield _chunk(where, payload)
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailed(f"{where}: {_reason(error)}") from error
        raise ServerFailed(f"{where}: the answer ended in the middle")

    async def healthy(self, seconds: float) -> bool:
        """Whether the server generates a token within ``seconds`` (SGLang itself takes at least one)."""
        try:
            await self.call("/health_generate", seconds=seconds)
        except (ServerFailed, RequestRejected):
            return False
        return True

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _fault(status: int) -> type[ServerFailed | RequestRejected]:
    return ServerFailed if status >= 500 else RequestRejected


def _chunk(where: str, payload: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(payload)
    except ValueError:
        raise ServerFailed(f"{where}: a chunk is no JSON: {payload[:100]!r}") from None
    if error := chunk.get("error"):
        raise _fault(error.get("code", 400))(f"{where}: {error.get('message')}")
    return chunk


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
