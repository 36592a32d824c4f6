"""Reads the bodies of requests, and converts JSON of requests and answers."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from rl_loop.gateway.errors import ApiError

MAX_BODY_BYTES = 8 * 1024 * 1024
"""Maximum bytes of a request. The longest context is a few megabytes of text."""
SHORT_BODY_BYTES = 16 * 1024
"""Maximum bytes that are parsed on the event loop, which takes up to 1 ms. Longer bodies are parsed
in another process (``rl_loop.gateway.jobs``)."""
BODY_SECONDS = 30.0
"""Time limit in seconds for the body of a request."""
# The time of pickling and of garbage collections grows with the number of objects, not of bytes.
MAX_VALUES = 40_000
"""Maximum number of values in the JSON of a request: texts, numbers, lists and objects."""


async def read_body(
    request: web.Request,
    on_received: Callable[[int], None] = lambda size: None,
    max_bytes: int = MAX_BODY_BYTES,
) -> bytes:
    """Return the body of a request.

    Args:
        request: the request.
        on_received: called with the number of bytes received since its last call.
        max_bytes: maximum bytes of the body.

    Raises:
        ApiError: the body is too long, too slow or encoded, or ``on_received`` raises it.
    """
    # The server does not decompress, because a few kilobytes can expand to gigabytes.
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = f"Content-Encoding {encoding[:40]!r} is not supported. Send an unencoded body"
        raise ApiError(415, "invalid_request", message)
    # Check the announced length first, so that a body that is too long is not received at all.
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)

    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while chunk := await request.content.readany():
                # The announced length may be missing or wrong, so count the received bytes, too.
                body += chunk
                on_received(len(chunk))
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_SECONDS:g} s"
        raise ApiError(408, "invalid_request", message) from None
    return bytes(body)


def parse_json(body: bytes, max_values: int = MAX_VALUES) -> Any:
    """Return the JSON of a body. Raises ApiError."""
    try:
        value = json.loads(body)
    except RecursionError:
        raise ApiError(400, "invalid_request", "the body has too many nested levels") from None
    except ValueError as error:
        message = f"the body is not valid JSON: {error}"
        raise ApiError(400, "invalid_request", message) from None
    # A value takes at least 2 bytes, including its comma.
    if len(body) > 2 * max_values and _has_more_values(value, max_values):
        message = f"the body has more than {max_values} values"
        raise ApiError(413, "invalid_request", message)
    return value


def json_text(value: Any, *, in_pieces: bool = False) -> str:
    """Return a value as JSON.

    Args:
        value: the value.
        in_pieces: whether to encode in pieces, so that other threads can run. Several times slower.
    """
    if in_pieces:
        return "".join(json.JSONEncoder().iterencode(value))
    return json.dumps(value)


def _has_more_values(value: Any, limit: int) -> bool:
    """Return True if JSON has more than ``limit`` values."""
    # Use a list instead of recursion, and look no further than ``limit``, so that the time is
    # bounded for any JSON.
    values = [value]
    for index in range(limit):
        if index == len(values):
            return False
        parent = values[index]
        if isinstance(parent, dict):
            values += parent.values()
        elif isinstance(parent, list):
            values += parent
        if len(values) > limit:
            return True
    return True


def _too_large(max_bytes: int) -> ApiError:
    """Return the error for a body that is too long."""
    megabytes = max_bytes // 1024**2
    return ApiError(413, "invalid_request", f"the body has more than {megabytes} MiB")
