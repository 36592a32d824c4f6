"""Reads the JSON of requests so that no request holds up the others."""

import asyncio
import json
import time
from collections.abc import Callable
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from aiohttp import web

from rl_loop.gateway.errors import ApiError

MAX_BODY_BYTES = 8 * 1024 * 1024
"""Bytes of a request; the longest context is a few megabytes of text."""
SHORT_BODY_BYTES = 16 * 1024
"""Bytes that are parsed on the event loop: it takes a millisecond or less."""
BODY_SECONDS = 30.0
"""Time for the body of a request."""
MAX_VALUES = 40_000
"""Values of the JSON of a request: texts, numbers, lists and objects."""
VALUES_AT_A_TIME = 256
"""Values after which a thread lets the event loop run."""


async def read_body(request: web.Request) -> bytes:
    """Return the body of a request. Raises ApiError."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = f"Content-Encoding {encoding[:40]!r} is not supported. Send the body as it is"
        raise ApiError(415, "invalid_request", message)
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise _too_large()

    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        message = f"the body did not arrive within {BODY_SECONDS:g} s"
        raise ApiError(408, "invalid_request", message) from None
    return bytes(body)


def parse_json(body: bytes) -> Any:
    """Return the JSON of a body. Raises ApiError.

    A long body is parsed in Python: json's own parser would hold the interpreter, and with it the
    event loop of another thread, until it has finished.
    """
    try:
        if len(body) <= SHORT_BODY_BYTES:
            return json.loads(body)
        return _BoundedDecoder().decode(body.decode(json.detect_encoding(body)))
    except _TooManyValues:
        message = f"the body has more than {MAX_VALUES} values"
        raise ApiError(413, "invalid_request", message) from None
    except RecursionError:
        raise ApiError(400, "invalid_request", "the body is nested too deeply") from None
    except ValueError as error:
        message = f"the body is not valid JSON: {error}"
        raise ApiError(400, "invalid_request", message) from None


class _TooManyValues(Exception):
    """A body has more than MAX_VALUES values."""


class _BoundedDecoder(json.JSONDecoder):
    """Python's own decoder without its C parts for lists and objects; it counts values."""

    def __init__(self) -> None:
        super().__init__()
        self._values = 0
        self._counted: Callable[[str, int], Any] | None = None
        self.parse_array = self._parse_array
        self.parse_object = self._parse_object
        self.scan_once = py_make_scanner(self)

    def _parse_array(self, start: tuple[str, int], scan: Callable[[str, int], Any]) -> Any:
        return JSONArray(start, self._counting(scan))

    def _parse_object(
        self, start: tuple[str, int], strict: bool, scan: Callable[[str, int], Any], *options: Any
    ) -> Any:
        return JSONObject(start, strict, self._counting(scan), *options)

    def _counting(self, scan: Callable[[str, int], Any]) -> Callable[[str, int], Any]:
        """Return ``scan`` with a counter; it is the same function for all values of a body."""
        if self._counted is None:

            def counted(text: str, index: int) -> Any:
                self._values += 1
                if self._values > MAX_VALUES:
                    raise _TooManyValues
                if self._values % VALUES_AT_A_TIME == 0:
                    time.sleep(0)
                return scan(text, index)

            self._counted = counted
        return self._counted


def _too_large() -> ApiError:
    megabytes = MAX_BODY_BYTES // 1024**2
    return ApiError(413, "invalid_request", f"the body has more than {megabytes} MiB")
