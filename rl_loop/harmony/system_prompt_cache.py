"""Cache of rendered system messages, developer messages and descriptions of tools.

All conversations of an agent begin with the same messages and tools. Many tools are slow to render.
"""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from rl_loop.chat.codec import Effort
from rl_loop.chat.tools import Tool

CACHED_PROMPTS = 64
"""Maximum number of entries."""
MAX_CACHED_TOKENS = 65_536
"""Maximum number of tokens per entry. Longer system prompts are rendered for each conversation."""


class Renderer(Protocol):
    """Renderer for cache misses: ``Harmony``."""

    assistant_header: list[int]

    def render_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool],
        *,
        reasoning_effort: Effort | None,
    ) -> list[int]: ...


class SystemPromptCache:
    """Least-recently-used cache of system prompts for one vocabulary."""

    def __init__(self, harmony: Renderer) -> None:
        self._harmony = harmony
        self._tokens: dict[bytes, tuple[int, ...]] = {}
        """Tokens by conversation key, in order of use. The most recent entry is the last."""
        # Threads render long conversations.
        self._lock = threading.Lock()

    # A codec is sent to the processes that render conversations, without the lock and the cache.
    def __getstate__(self) -> dict[str, Any]:
        return {"harmony": self._harmony}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SystemPromptCache.__init__(self, state["harmony"])

    def render(
        self,
        key: bytes | None,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool],
        effort: Effort | None,
    ) -> tuple[int, ...]:
        """Return the tokens before the first message that is not from system or developer.

        Args:
            key: key of the other arguments (``TurnRequest.conversation_keys``). None bypasses the
                cache.
            messages: developer messages.
            tools: functions that the first developer message describes.
            effort: reasoning effort.

        Raises:
            ValueError: if a message cannot be rendered.
        """
        if key is None:
            return self._render(messages, tools, effort)
        with self._lock:
            # Removed and inserted again below, which makes it the most recent entry.
            tokens = self._tokens.pop(key, None)
        # Without the lock, so that a long rendering does not block other threads. Two threads may
        # render the same entry, which costs only time.
        if tokens is None:
            tokens = self._render(messages, tools, effort)
        if len(tokens) > MAX_CACHED_TOKENS:
            return tokens

        with self._lock:
            self._tokens[key] = tokens
            if len(self._tokens) > CACHED_PROMPTS:
                del self._tokens[next(iter(self._tokens))]
        return tokens

    def _render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool], effort: Effort | None
    ) -> tuple[int, ...]:
        rendered = self._harmony.render_prompt(messages, tools, reasoning_effort=effort)
        # Cut off the assistant's header.
        return tuple(rendered[: len(rendered) - len(self._harmony.assistant_header)])
