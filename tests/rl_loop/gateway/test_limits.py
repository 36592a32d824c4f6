"""Limits on the size, number and duration of requests and connections."""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import suppress
from typing import Any

import aiohttp
import openai
import pytest

from rl_loop.gateway import body as body_module
from rl_loop.gateway import connections as connections_module
from rl_loop.gateway.body import MAX_BODY_BYTES, MAX_VALUES, SHORT_BODY_BYTES, parse_json
from rl_loop.gateway.connections import OpenConnections
from rl_loop.gateway.errors import ApiError
from rl_loop.harmony.codec import Harmony
from tests.support.rl_loop.gateway.scripted import Talk, talking
from tests.support.rl_loop.gateway.serving import eventually

FINAL = "<|channel|>final<|message|>done<|return|>"


def address(talk: Talk) -> tuple[str, int]:
    host, _, port = talk.gateway.base_url.removeprefix("http://").partition(":")
    return host, int(port.removesuffix("/v1"))


async def raw(talk: Talk, data: bytes) -> bytes:
    """Send bytes. Return the complete reply once the connection is closed."""
    reader, writer = await asyncio.open_connection(*address(talk))
    writer.write(data)
    answer = b""
    with suppress(ConnectionResetError):
        answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


def head(talk: Talk, size: int, *more: str, key: str | None = None) -> bytes:
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: x",
        f"Content-Length: {size}",
        f"Authorization: Bearer {key or talk.session.api_key}",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def test_body_is_not_read_without_a_valid_key(full: Harmony) -> None:
    async def run() -> None:
        async with talking(full, []) as talk:
            # The answer comes although the client sends no body.
            answer = await raw(talk, head(talk, MAX_BODY_BYTES, key="sk-wrong"))
            assert answer.startswith(b"HTTP/1.1 401")
            assert b"connection: close" in answer.lower()

    asyncio.run(run())


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, gzip"])
def test_compressed_body_is_rejected(full: Harmony, encoding: str) -> None:
    async def run() -> None:
        async with talking(full, []) as talk:
            packed = gzip.compress(b"{}")
            data = head(talk, len(packed), f"Content-Encoding: {encoding}") + packed
            answer = await raw(talk, data)
            assert answer.startswith(b"HTTP/1.1 415")
            assert b"is not supported" in answer

    asyncio.run(run())


def test_slow_body_is_rejected(full: Harmony, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODY_SECONDS", 0.2)

    async def run() -> None:
        async with talking(full, []) as talk:
            answer = await raw(talk, head(talk, 100) + b'{"mess')
            assert answer.startswith(b"HTTP/1.1 408")

    asyncio.run(run())


def test_connection_with_slow_headers_is_closed(
    full: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "HEADER_SECONDS", 0.2)

    async def run() -> None:
        async with talking(full, []) as talk:
            for data in (b"", b"POST /v1/chat", head(talk, 10)[:-4]):
                assert await raw(talk, data) == b""
            # The limit also holds after a complete request.
            request = f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {talk.session.api_key}\r\n"
            answer = await raw(talk, f"{request}Host: x\r\n\r\nGET /v1".encode())
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.count(b"HTTP/1.1") == 1

    asyncio.run(run())


TOO_MUCH: list[tuple[str, Any, int, str]] = [
    ("chat/completions", {"messages": [{"role": "user", "content": ""}] * 2049}, 400, "messages"),
    (
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{}] * 513}] * 2},
        400,
        "1026 calls",
    ),
    ("responses", {"input": [{"role": "user", "content": ""}] * 2049}, 400, "input"),
    (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": ""}],
            "tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(257)],
        },
        400,
        "tools",
    ),
    (
        "responses",
        {"input": "x", "tools": [{"type": "function", "name": "f", "description": "x" * 40_000}]},
        400,
        "tools[0]",
    ),
    ("chat/completions", {"messages": [[]] * MAX_VALUES}, 413, "values"),
    ("chat/completions", {"messages": "x" * MAX_BODY_BYTES}, 413, "MiB"),
    ("rewards", {"reward": {f"part{i}": 0.0 for i in range(2000)}}, 413, "bytes"),
    ("chat/completions", {"messages": [{"role": "x" * 100_000}]}, 400, "role"),
]


def test_request_beyond_a_limit_is_rejected_and_names_the_field(full: Harmony) -> None:
    async def run() -> None:
        turns = [FINAL] * len(TOO_MUCH)
        async with talking(full, turns) as talk, aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {talk.session.api_key}"}
            for count, (path, body, status, named) in enumerate(TOO_MUCH):
                url = f"{talk.gateway.base_url}/{path}"
                async with http.post(url, data=json.dumps(body), headers=headers) as answer:
                    assert answer.status == status, (named, await answer.text())
                    error = (await answer.json())["error"]
                    assert named in error["message"] or named == error["param"]
                    assert len(error["message"]) <= 1000
                assert len(talk.policy.requests) == count
                # The gateway still serves this client and others.
                create: Any = talk.client.chat.completions.create
                completion = await create(model="m", messages=[{"role": "user", "content": "q"}])
                assert completion.choices[0].message.content == "done"

    asyncio.run(run())


def test_long_body_is_parsed_like_a_short_one() -> None:
    values: list[Any] = [
        {"a": [1, -2.5e3, "é\u6f22\U0001f600\\n", None, True, {"b": {}}, []]},
        [[["x" * SHORT_BODY_BYTES]]],
        {"a": "y" * SHORT_BODY_BYTES, "b": [{"c": float(i)} for i in range(5000)]},
    ]
    for value in values:
        for data in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
            padded = data + " " * SHORT_BODY_BYTES
            assert parse_json(data.encode()) == parse_json(padded.encode()) == value
            assert parse_json(padded.encode("utf-16")) == value
    for broken in ("{", '{"a" 1}', "[1,]", '"', "[" * 100_000, '{"a":' * 50_000, "\ud800"):
        text = (broken + " " * SHORT_BODY_BYTES).encode("utf-8", "surrogatepass")
        with pytest.raises(ApiError) as refusal:
            parse_json(text)
        assert refusal.value.status == 400


def test_concurrent_requests_of_a_key_are_limited(
    full: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_loop.gateway.server.MAX_IN_FLIGHT", 4)

    async def run() -> None:
        async with talking(full, [FINAL] * 8, seconds=0.5) as talk:
            create: Any = talk.client.chat.completions.create
            asking = [
                create(model="m", messages=[{"role": "user", "content": f"q{n}"}]) for n in range(8)
            ]
            answers = await asyncio.gather(*asking, return_exceptions=True)
            refused = [a for a in answers if isinstance(a, openai.RateLimitError)]
            assert len(refused) == 4
            assert talk.session.in_flight == 0

    asyncio.run(run())


def test_new_connections_replace_those_without_a_key(full: Harmony) -> None:
    async def run() -> None:
        async with talking(full, [FINAL] * 4) as talk:
            limited = OpenConnections(most=8, most_unknown=4)
            assert talk.gateway._runner is not None and talk.gateway._runner.server is not None
            limited.watch(talk.gateway._runner.server)
            talk.gateway._connections = limited
            # A client that has sent a key keeps its connection.
            create: Any = talk.client.chat.completions.create
            await create(model="m", messages=[{"role": "user", "content": "q0"}])
            opened = [await asyncio.open_connection(*address(talk)) for _ in range(20)]
            await eventually(lambda: len(limited) <= 5)
            await create(model="m", messages=[{"role": "user", "content": "q1"}])

            reads = [asyncio.create_task(reader.read()) for reader, _ in opened]
            await eventually(lambda: sum(read.done() for read in reads) >= 16)
            assert sum(read.done() for read in reads) == 16
            for read, (_, writer) in zip(reads, opened, strict=True):
                read.cancel()
                writer.close()

    asyncio.run(run())
