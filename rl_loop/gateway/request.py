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

REFERENCE_CHARACTERS = 512
"""Characters that take as long to render as a reference within a schema."""
DIGEST_BYTES = 16
"""Bytes of a digest."""
MOST_BYTES = 4
"""Bytes of a character in UTF-8."""


type MessageDigest = bytes
"""Digest of a message and digest of its calls without their ids, one after the other. Equal for
messages that say the same to the policy.

Bytes, because a server remembers thousands of messages: Python's garbage collector would search
objects of a class, and hold the event loop.
"""


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
        """Compute everything that takes long with long requests. The results are pickled, too.

        Raises RecursionError for a schema that is nested too deeply.
        """
        _ = self.fingerprint, self.head_digests, self.tools_size, self.tools_work

    @cached_property
    def tools_size(self) -> int:
        """Characters of the tools."""
        return sum(len(repr(tool)) for tool in self.tools)

    @cached_property
    def tools_work(self) -> int:
        """Characters of text that take as long to render as the tools: a reference is written out."""
        return self.tools_size + REFERENCE_CHARACTERS * repr(self.tools).count("$ref")

    @cached_property
    def fingerprint(self) -> bytes:
        """Digest that equal requests share."""
        content = [
            [whole_digest(digest).hex() for digest in self.digests],
            self._tools_digest.hex(),
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
    def digests(self) -> tuple[MessageDigest, ...]:
        """One for each of ``messages``."""
        return tuple(map(message_digest, self.messages))

    @cached_property
    def head_digests(self) -> tuple[MessageDigest, ...]:
        """One for each message of ``head``."""
        return tuple(map(message_digest, self.head))

    @cached_property
    def _tools_digest(self) -> bytes:
        return _digest([[t.name, t.description, canonical_value(t.parameters)] for t in self.tools])

    @property
    def head(self) -> tuple[dict[str, Any], ...]:
        """The instructions as messages: one or none."""
        if self.instructions is None:
            return ()
        return ({"role": "developer", "content": self.instructions},)

    def conversation_keys(self, digests: Sequence[MessageDigest]) -> list[bytes]:
        """Return a key of each beginning of a conversation, from no message to all of them.

        Two beginnings have one key if they say the same to the policy: equal texts, calls, tools
        and reasoning effort. JSON is compared by its value, whatever its spelling. Reasoning that a
        client repeats, or leaves out, does not count.

        Args:
            digests: one for each message of the conversation.
        """
        key = _digest([self._tools_digest.hex(), self.reasoning_effort])
        keys = [key]
        for digest in digests:
            key = extended_key(key, digest)
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


def text_bytes(messages: Sequence[dict[str, Any]]) -> int:
    """Return an upper bound of the bytes of messages, in time that does not depend on it."""
    size = 0
    for message in messages:
        texts = [message.get("content") or "", message.get("thinking") or ""]
        texts += [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        size += sum(len(text) if text.isascii() else MOST_BYTES * len(text) for text in texts)
    return size


def extended_key(key: bytes, digest: MessageDigest) -> bytes:
    """Return the key of a conversation that continues with the message of a digest."""
    return hashlib.blake2b(key + whole_digest(digest), digest_size=DIGEST_BYTES).digest()


def message_digest(message: dict[str, Any]) -> MessageDigest:
    """Return the digests of a message."""
    calls = [
        [call["function"]["name"], canonical_json(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    ids = [call.get("id") for call in message.get("tool_calls") or ()]
    whole = [
        message["role"],
        message.get("name"),
        message.get("tool_call_id"),
        message.get("content") or "",
        ids,
        calls,
    ]
    return _digest(whole) + _digest(calls)


def whole_digest(digest: MessageDigest) -> bytes:
    """Return the digest of a whole message."""
    return digest[:DIGEST_BYTES]


def digest_of_calls(digest: MessageDigest) -> bytes:
    """Return the digest of a message's calls."""
    return digest[DIGEST_BYTES:]


def _digest(content: Any) -> bytes:
    # Escaped, so that halves of surrogate pairs do no harm.
    text = json.dumps(content, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
