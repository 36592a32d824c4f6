"""A client's request in both dialects of the API, and keys to recognize a repeated request.

Messages are dictionaries as ``rl_loop.harmony.conversation`` describes them.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from rl_loop.chat.codec import Effort
from rl_loop.chat.json_values import canonical_json, canonical_value
from rl_loop.chat.tools import Tool
from rl_loop.gateway.raw_prompt import RawPrompt

REFERENCE_CHARACTERS = 512
"""Characters whose rendering takes as long as a reference in a schema."""
DIGEST_BYTES = 16
"""Bytes of a digest."""
MAX_CHARACTER_BYTES = 4
"""Maximum bytes of a character in UTF-8."""


type MessageDigest = bytes
"""Digest of a message, followed by the digest of its calls without their ids.

Messages with the same meaning to the policy have equal digests. Bytes, because a server remembers
thousands of messages, and Python's garbage collector would search objects of a class and block the
event loop.
"""


@dataclass(frozen=True)
class TurnConstraint:
    """Turns that a request allows: a JSON answer, or one call."""

    parameter: str
    """Parameter of the request, for errors."""
    schema: dict[str, Any] | None
    """JSON schema of the answer. None if the turn must be a call."""
    tools: tuple[Tool, ...]
    """Functions that the turn may call."""

    @property
    def digest(self) -> bytes:
        """Digest that is equal for equal constraints."""
        return _digest([canonical_value(self.schema), [tool.name for tool in self.tools]])


@dataclass(frozen=True)
class TurnRequest:
    """A request for one turn of the policy."""

    messages: tuple[dict[str, Any], ...] = ()
    """Conversation, or with ``previous_id`` the messages after that response."""
    prompt: RawPrompt | None = None
    """Prompt of a completion, which has no messages. None for a conversation."""
    tools: tuple[Tool, ...] = ()
    """Functions that the policy may call."""
    instructions: str | None = None
    """Developer message before all others. Later requests do not inherit it."""
    previous_id: str | None = None
    """Id of the response whose conversation continues. None for a full conversation."""
    reasoning_effort: Effort | None = None
    """Reasoning effort. None for the configuration's."""
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    """Seed of sampling, in addition to session and turn."""
    stop: tuple[str, ...] = ()
    """Texts that end the turn, see ``rl_loop.gateway.stop_text``."""
    log_probs: bool = False
    """True to return the log-probs of the answer's tokens."""
    top_log_probs: int = 0
    """Number of most likely tokens to return for each of these tokens."""
    constraint: TurnConstraint | None = None
    """Constraint on the turn. None to sample freely."""
    is_stored: bool = True
    """True if later requests may refer to the response."""

    def choice(self, number: int) -> Self:
        """Return the request for one of several choices. Their fingerprints differ."""
        if number == 0:
            return self
        # A copy keeps the cached values, which take long for long requests.
        other = copy(self)
        fingerprint = hashlib.blake2b(self.fingerprint, digest_size=DIGEST_BYTES)
        fingerprint.update(number.to_bytes(4))
        other.__dict__["fingerprint"] = fingerprint.digest()
        return other

    def prepare(self) -> None:
        """Compute all values that take long for long requests. They are pickled, too.

        Raises:
            RecursionError: a schema is nested too deeply.
        """
        _ = self.fingerprint, self.head_digests, self.tools_characters, self.tools_render_cost

    @cached_property
    def tools_characters(self) -> int:
        """Characters of the tools."""
        return sum(len(repr(tool)) for tool in self.tools)

    @cached_property
    def tools_render_cost(self) -> int:
        """Number of characters that take as long to render. References are written out."""
        return self.tools_characters + REFERENCE_CHARACTERS * repr(self.tools).count("$ref")

    @cached_property
    def fingerprint(self) -> bytes:
        """Digest that is equal for equal requests."""
        # All values that can change the sampled turn, and no others, so that a repeated request is
        # recognized.
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
            self.stop,
            self.log_probs,
            self.top_log_probs,
            None if self.prompt is None else raw_key(self.prompt).hex(),
            None if self.constraint is None else self.constraint.digest.hex(),
        ]
        return _digest(content)

    @cached_property
    def digests(self) -> tuple[MessageDigest, ...]:
        """Digest of each item of ``messages``."""
        return tuple(map(message_digest, self.messages))

    @cached_property
    def head_digests(self) -> tuple[MessageDigest, ...]:
        """Digest of each message of ``head``."""
        return tuple(map(message_digest, self.head))

    @cached_property
    def _tools_digest(self) -> bytes:
        return _digest([[t.name, t.description, canonical_value(t.parameters)] for t in self.tools])

    @property
    def head(self) -> tuple[dict[str, Any], ...]:
        """Instructions as messages: one or none."""
        if self.instructions is None:
            return ()
        return ({"role": "developer", "content": self.instructions},)

    def conversation_keys(self, digests: Sequence[MessageDigest]) -> list[bytes]:
        """Return a key for each prefix of a conversation, from no message to all of them.

        Prefixes with the same meaning to the policy have the same key: equal texts, calls, tools
        and reasoning effort. JSON is compared by value. Reasoning that a client repeats or leaves
        out does not count.

        Args:
            digests: digest of each conversation message.
        """
        # Tools and effort are rendered before all messages, so every prefix depends on them.
        key = _digest([self._tools_digest.hex(), self.reasoning_effort])
        keys = [key]
        # Each key contains the previous one, so all prefixes together take one hash per message.
        for digest in digests:
            key = extended_key(key, digest)
            keys.append(key)
        return keys


def raw_key(prompt: RawPrompt) -> bytes:
    """Return the key of a completion's prompt, or of a prompt with its completion."""
    return next(raw_prefix_keys(prompt, [len(prompt.content)]))


def raw_prefix_keys(prompt: RawPrompt, lengths: Iterable[int]) -> Iterator[bytes]:
    """Yield the keys of the first bytes of a prompt.

    Args:
        prompt: prompt of a completion.
        lengths: number of bytes of each prefix, in ascending order.
    """
    # No key of a conversation is the digest of such a text.
    digest = hashlib.blake2b(f"{prompt.kind}:".encode(), digest_size=DIGEST_BYTES)
    begin = 0
    for length in lengths:
        digest.update(prompt.content[begin:length])
        begin = length
        yield digest.digest()


def text_size(messages: Sequence[dict[str, Any]]) -> int:
    """Return the number of characters in messages, including calls and thinking."""
    size = 0
    for message in messages:
        size += len(message.get("content") or "") + len(message.get("thinking") or "")
        for call in message.get("tool_calls") or ():
            size += len(call["function"]["arguments"])
    return size


def text_bytes(messages: Sequence[dict[str, Any]]) -> int:
    """Return an upper bound on the bytes of messages, in time independent of their length."""
    size = 0
    for message in messages:
        texts = [message.get("content") or "", message.get("thinking") or ""]
        texts += [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        # isascii needs no pass over the text, in contrast to encoding it.
        size += sum(
            len(text) if text.isascii() else MAX_CHARACTER_BYTES * len(text) for text in texts
        )
    return size


def extended_key(key: bytes, digest: MessageDigest) -> bytes:
    """Return the key of a conversation that continues with the message of a digest."""
    return hashlib.blake2b(key + whole_digest(digest), digest_size=DIGEST_BYTES).digest()


def message_digest(message: dict[str, Any]) -> MessageDigest:
    """Return the digests of a message."""
    calls = [
        # Agents parse arguments and write them again, with other spaces or another order of keys.
        [call["function"]["name"], canonical_json(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    ids = [call.get("id") for call in message.get("tool_calls") or ()]
    # Without the reasoning, which clients may repeat or leave out.
    parts = [
        message["role"],
        message.get("name"),
        message.get("tool_call_id"),
        message.get("content") or "",
        ids,
        calls,
    ]
    # The second digest tells whether calls were edited, independent of the text around them.
    return _digest(parts) + _digest(calls)


def whole_digest(digest: MessageDigest) -> bytes:
    """Return the digest of a whole message."""
    return digest[:DIGEST_BYTES]


def digest_of_calls(digest: MessageDigest) -> bytes:
    """Return the digest of a message's calls."""
    return digest[DIGEST_BYTES:]


def _digest(content: Any) -> bytes:
    # Escaped, because halves of surrogate pairs cannot be encoded.
    text = json.dumps(content, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
