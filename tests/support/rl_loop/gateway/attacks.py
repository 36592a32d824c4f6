"""Attacks on a gateway: ``python -m tests.support.rl_loop.gateway.attacks PORT NAME SECONDS``.

An attack runs in a separate process, sends its requests for at most SECONDS, and prints the status
codes that it receives. All requests go to 127.0.0.1.
"""

from __future__ import annotations

import gzip
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

KEY = "Authorization: Bearer sk-attacker\r\n"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"

statuses: Counter[str] = Counter()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def send(port: int, data: bytes) -> None:
    """Send bytes and read the response."""
    status = "closed"
    with suppress(OSError), connect(port) as connection:
        with suppress(OSError):
            connection.sendall(data)
        status = connection.recv(4096).split(b" ", 2)[1].decode()
    statuses[status] += 1


def head(size: int, key: str = KEY, more: str = "", path: str = CHAT) -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nHost: x\r\n{key}{more}Connection: close\r\n"
    return f"{lines}Content-Length: {size}\r\n\r\n".encode()


def post(body: bytes | dict[str, Any], path: str = CHAT, **options: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    return head(len(data), path=path, **options) + data


def chat(**body: Any) -> bytes:
    return post({"max_tokens": 4, "messages": [{"role": "user", "content": "x"}]} | body)


def messages(count: int) -> bytes:
    entries = b",".join([b'{"role":"user","content":""}'] * count)
    return post(b'{"max_tokens":4,"messages":[' + entries + b"]}")


def tools(count: int, schema: dict[str, Any] | None = None, text: str = "") -> bytes:
    entries = [
        {
            "type": "function",
            "function": {"name": f"f{i}", "description": text, "parameters": schema},
        }
        for i in range(count)
    ]
    return chat(tools=entries)


def call(arguments: str) -> bytes:
    function = {"name": "f", "arguments": arguments}
    turn = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    answer = {"role": "tool", "tool_call_id": "c", "content": "x"}
    return chat(messages=[{"role": "user", "content": "x"}, turn, answer])


def calls(count: int, answered: int) -> bytes:
    """Return a conversation with many calls in one turn, some of them answered in reverse order."""
    entries = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for i in range(count)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"c{i}", "content": "x"} for i in reversed(range(answered))
    ]
    turn = {"role": "assistant", "tool_calls": entries}
    return chat(messages=[{"role": "user", "content": "x"}, turn, *results])


def chunked(key: str) -> bytes:
    start = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{key}Transfer-Encoding: chunked\r\n\r\n"
    return start.encode() + b"1\r\na\r\n" * 1_000_000 + b"0\r\n\r\n"


WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}
REFERENCES = {
    "$ref": "#/$defs/d0",
    "$defs": {
        f"d{n}": {"properties": {f"p{i}": {"$ref": f"#/$defs/d{n + 1}"} for i in range(30)}}
        for n in range(20)
    },
}
SHORT_REFERENCES = {
    "$ref": "#/$defs/d0",
    "$defs": {
        f"d{n}": {"properties": {f"p{i}": {"$ref": f"#/$defs/d{n + 1}"} for i in range(3)}}
        for n in range(20)
    },
}
MEGABYTE = 1024 * 1024

BODIES: dict[str, Callable[[], bytes]] = {
    "1,000 empty messages": lambda: messages(1000),
    "2,000 empty messages": lambda: messages(2000),
    "10,000 empty messages": lambda: messages(10_000),
    "250,000 empty messages": lambda: messages(250_000),
    "20,000 tools": lambda: tools(20_000),
    "200 tools with long texts": lambda: tools(200, text="word " * 1000),
    "30 tools with wide schemas": lambda: tools(30, WIDE),
    "200 tools with references": lambda: tools(200, REFERENCES),
    "a long word as instructions": lambda: chat(
        messages=[{"role": "developer", "content": "x" * MEGABYTE}, {"role": "user", "content": ""}]
    ),
    "a long word in a tool": lambda: tools(1, text="x" * 30_000),
    "a long word of the user": lambda: chat(
        messages=[{"role": "user", "content": "x" * 4 * MEGABYTE}]
    ),
    "much text": lambda: chat(messages=[{"role": "user", "content": "word " * MEGABYTE}]),
    "many spaces, streamed": lambda: post(
        {"input": "x", "instructions": " " * 7 * MEGABYTE, "stream": True}, RESPONSES
    ),
    "2,000 messages of text": lambda: chat(
        messages=[{"role": "user", "content": "word " * 500}] * 2000
    ),
    "many values": lambda: post(b"[" + b"[]," * (2 * MEGABYTE) + b"0]"),
    "many nulls": lambda: post(b"[" + b"null," * MEGABYTE + b"0]"),
    "many objects": lambda: post(b'{"messages":[' + b'{"a":{}},' * 800_000 + b"0]}"),
    "escapes": lambda: post(b'{"messages":"' + b"\\u0041" * 1_300_000 + b'"}'),
    "deep lists": lambda: post(b"[" * 4 * MEGABYTE),
    "deep schemas": lambda: tools(1, json.loads('{"items":' * 300 + "{}" + "}" * 300)),
    "long arguments": lambda: call("[" + "[]," * MEGABYTE + "0]"),
    "many calls": lambda: calls(1000, 500),
    "too many calls": lambda: calls(5000, 1000),
    "Chinese text": lambda: chat(
        messages=[{"role": "user", "content": "\u4e2d\u6587\u3000" * 800_000}]
    ),
    "many tools, streamed": lambda: post(
        {
            "input": "x",
            "stream": True,
            "tools": [
                {"type": "function", "name": f"f{i}", "description": "word " * 900}
                for i in range(100)
            ],
        },
        RESPONSES,
    ),
    "short requests with references": lambda: tools(1, SHORT_REFERENCES),
    "short requests of emojis": lambda: chat(
        messages=[{"role": "user", "content": "\U0001f600" * 3900}]
    ),
    "many parts": lambda: chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 90_000}]
    ),
    "a body that is too large": lambda: post(b" " * 12 * MEGABYTE),
    "a long number": lambda: post(b'{"seed":' + b"1" * 4 * MEGABYTE + b"}"),
    "a gzip bomb without key": lambda: post(
        gzip.compress(b"a" * 512 * MEGABYTE, 1), key="", more="Content-Encoding: gzip\r\n"
    ),
    "a gzip bomb": lambda: post(
        gzip.compress(b"a" * 512 * MEGABYTE, 1), more="Content-Encoding: gzip\r\n"
    ),
    "a body without key": lambda: post(b" " * 8 * MEGABYTE, key=""),
    "short chunks": lambda: chunked(KEY),
    "short chunks without key": lambda: chunked(""),
    "requests in a row without key": lambda: b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 20_000,
    "requests in a row": lambda: f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{KEY}\r\n".encode() * 5000,
    "long headers": lambda: b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * MEGABYTE,
}
CLIENTS = 8
"""Number of concurrent connections."""


def flood(port: int, data: bytes, end: float) -> None:
    while time.monotonic() < end:
        send(port, data)


def held(port: int, data: bytes, count: int, end: float) -> None:
    """Open connections, send the beginning of a request on each, and wait."""
    connections: list[socket.socket] = []
    for _ in range(count):
        with suppress(OSError):
            connection = connect(port)
            connection.sendall(data)
            connections.append(connection)
    while time.monotonic() < end and any(map(is_open, connections)):
        time.sleep(0.2)
    statuses["open"] = sum(map(is_open, connections))


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while data := connection.recv(65536):
            del data
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


HELD: dict[str, bytes] = {
    "half headers": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX",
    "nothing": b"",
    "slow bodies without key": head(1000, key="")[:-1] + b"\n{",
}


def attack(port: int, name: str, seconds: float) -> Iterator[str]:
    end = time.monotonic() + seconds
    if name in HELD:
        held(port, HELD[name], 400, end)
    else:
        data = BODIES[name]()
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=flood, args=(port, data, end)) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    yield json.dumps(statuses)


if __name__ == "__main__":
    for line in attack(int(sys.argv[1]), sys.argv[2], float(sys.argv[3])):
        print(line, flush=True)
