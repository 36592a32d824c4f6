"""Renderers for conversations from files, by chat format."""

from typing import Any, Protocol

from rl_loop.chat.codec import ChatCodec
from rl_loop.chatml.codec import ChatMl
from rl_loop.conversations.chatml import ChatMlRenderer
from rl_loop.conversations.config import Format
from rl_loop.conversations.harmony import HarmonyRenderer, RenderedSample, RenderOptions
from rl_loop.harmony.codec import Harmony


class ConversationRenderer(Protocol):
    """Converter of records to samples."""

    def render_record(
        self, record: Any, record_format: Format
    ) -> tuple[list[RenderedSample], list[str]]:
        """Render a record.

        Args:
            record: JSON value.
            record_format: format of the record.

        Returns:
            Samples with at least one token in the loss each, and a reason for each sample left out.

        Raises:
            ConversationError: if the whole record is rejected.
        """
        ...


def conversation_renderer(codec: ChatCodec, options: RenderOptions) -> ConversationRenderer:
    """Return the renderer of a codec's chat format. Raises ValueError if there is none."""
    if isinstance(codec, Harmony):
        return HarmonyRenderer(codec, options)
    if isinstance(codec, ChatMl):
        return ChatMlRenderer(codec, options)
    raise ValueError(f"conversations from files cannot be rendered by {type(codec).__name__}")
