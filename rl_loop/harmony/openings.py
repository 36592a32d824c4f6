"""What conversations begin with: the system message, the developer's, and the description of tools.

All sessions of one agent have the same, and it may be pages of tools."""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from rl_loop.chat.codec import Effort
from rl_loop.chat.tools import Tool

REMEMBERED_OPENINGS = 64
REMEMBERED_TOKENS = 65_536
"""Of one opening; a longer one is rendered for each conversation."""


class Renderer(Protocol):
    """What renders openings: ``Harmony``."""

    assistant_header: list[int]

    def render_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool],
        *,
        reasoning_effort: Effort | None,
    ) -> list[int]: ...


class Openings:
    """Renders openings for one vocabulary, each once while it is in use."""

    def __init__(self, harmony: Renderer) -> None:
        self._harmony = harmony
        self._tokens: dict[bytes, tuple[int, ...]] = {}
        """By the key of the conversation so far, the one that was used last at the end."""
        # Long conversations are rendered on threads.
        self._lock = threading.Lock()

    # A codec travels to the processes that render conversations: neither the lock nor what is
    # remembered goes along.
    def __getstate__(self) -> dict[str, Any]:
        return {"harmony": self._harmony}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Openings.__init__(self, state["harmony"])

    def render(
        self,
        key: bytes | None,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool],
        effort: Effort | None,
    ) -> tuple[int, ...]:
        """Return the tokens, up to where the first message behind the developer's begins.

        ``key``: of ``messages``, ``tools`` and ``effort`` (``TurnRequest.conversation_keys``); None to
        remember nothing. Raises ValueError for what cannot be rendered.
        """
        if key is None:
            return self._rendered(messages, tools, effort)
        with self._lock:
            tokens = self._tokens.pop(key, None)
        if tokens is None:
            tokens = self._rendered(messages, tools, effort)
        if len(tokens) > REMEMBERED_TOKENS:
            return tokens

        with self._lock:
            self._tokens[key] = tokens
            if len(self._tokens) > REMEMBERED_OPENINGS:
                del self._tokens[next(iter(self._tokens))]
        return tokens

    def _rendered(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool], effort: Effort | None
    ) -> tuple[int, ...]:
        rendered = self._harmony.render_prompt(messages, tools, reasoning_effort=effort)
        # It ends where the assistant would begin.
        return tuple(rendered[: len(rendered) - len(self._harmony.assistant_header)])
