"""A client's request in both dialects of the API, and the keys by which a repeated one is recognized.

Messages are dictionaries as ``rl_loop.harmony.conversation`` describes them.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rl_loop.chat.codec import Effort
from rl_loop.chat.json_values import canonical_json, canonical_value
from rl_loop.chat.tools import Tool


@dataclass(frozen=True)
class TurnRequest:
    """A request for one turn of the policy."""

    messages: tuple[dict[str, Any], ...]
    """The conversation, or with ``previous_id`` what follows that response."""
    tools: tuple[Tool, ...] = ()
    """Functions that the policy may call."""
    instructions: str | None = None
    """A developer message before all others, which later requests do not inherit."""
    previous_id: str | None = None
    """The response whose conversation goes on."""
    reasoning_effort: Effort | None = None
    """None for what the configuration says."""
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    """Changes what is sampled, together with session and turn."""
    is_stored: bool = True
    """Whether later requests may name the response."""

    def prepare(self) -> None:
        """Compute what takes long with long requests, so that it is known later.

        Raises RecursionError for a schema that is nested too deeply.
        """
        _ = self.fingerprint, self.size, self.tools_size

    @cached_property
    def size(self) -> int:
        """Characters of the messages."""
        return text_size(self.messages)

    @cached_property
    def tools_size(self) -> int:
        """Characters of the tools."""
        return sum(len(repr(tool)) for tool in self.tools)

    @cached_property
    def fingerprint(self) -> bytes:
        """Equal for equal requests."""
        content = [
            [digest.hex() for digest in self._message_digests],
            self._tools,
            self.instructions,
            self.previous_id,
            self.reasoning_effort,
            self.max_new_tokens,
            self.temperature,
            self.top_p,
            self.seed,
        ]
        return _digest(content)

    @cached_property
    def _message_digests(self) -> list[bytes]:
        """One for each of ``messages``: a long conversation is read once."""
        return [_message_digest(message) for message in self.messages]

    @cached_property
    def _tools(self) -> list[Any]:
        return [[t.name, t.description, canonical_value(t.parameters)] for t in self.tools]

    @property
    def head(self) -> tuple[dict[str, Any], ...]:
        """The instructions as messages: one or none."""
        if self.instructions is None:
            return ()
        return ({"role": "developer", "content": self.instructions},)

    def conversation_keys(self, earlier: Sequence[dict[str, Any]]) -> list[bytes]:
        """Return a key of each beginning of ``earlier`` and the request's own messages, from none to
        all of them.

        Two beginnings have one key if they say the same to the policy: equal texts, calls, tools
        and reasoning effort. JSON is compared by its value, whatever its spelling. Reasoning that a
        client repeats, or leaves out, does not count.
        """
        key = _digest([self._tools, self.reasoning_effort])
        keys = [key]
        for digest in [*map(_message_digest, earlier), *self._message_digests]:
            key = _chained(key, digest)
            keys.append(key)
        return keys


def text_size(messages: Sequence[dict[str, Any]]) -> int:
    """Count the characters of messages, those of calls and of thinking included."""
    size = 0
    for message in messages:
        size += len(message.get("content") or "") + len(message.get("thinking") or "")
        for call in message.get("tool_calls") or ():
            size += len(call["function"]["arguments"])
    return size


def extended_key(key: bytes, message: dict[str, Any]) -> bytes:
    """Return the key of a conversation that goes on with ``message``."""
    return _chained(key, _message_digest(message))


def _message_digest(message: dict[str, Any]) -> bytes:
    return _digest(_canonical_message(message))


def _chained(key: bytes, digest: bytes) -> bytes:
    return hashlib.blake2b(key + digest, digest_size=16).digest()


def _canonical_message(message: dict[str, Any]) -> list[Any]:
    """Return what makes two messages the same message."""
    calls = [[call.get("id"), *called(call)] for call in message.get("tool_calls") or ()]
    return [
        message["role"],
        message.get("name"),
        message.get("tool_call_id"),
        message.get("content") or "",
        calls,
    ]


def called(call: dict[str, Any]) -> list[Any]:
    """Return what makes two calls the same call: the name and the value of the arguments."""
    function = call["function"]
    return [function["name"], canonical_json(function["arguments"])]


def _digest(content: Any) -> bytes:
    # Escaped, so that halves of surrogate pairs do no harm.
    text = json.dumps(content, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
