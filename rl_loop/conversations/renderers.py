"""Which renderer a chat format has for the conversations of files."""

from typing import Any, Protocol

from rl_loop.chat.codec import ChatCodec
from rl_loop.chatml.codec import ChatMl
from rl_loop.conversations.chatml import ChatMlRenderer
from rl_loop.conversations.config import Format
from rl_loop.conversations.rendering import ConversationRenderer, RenderedSample, RenderOptions
from rl_loop.harmony.codec import Harmony


class RecordRenderer(Protocol):
    """Makes samples of the records of files."""

    def render_record(self, record: Any, form: Format) -> tuple[list[RenderedSample], list[str]]:
        """Return the samples of a record, at least one token of each learned, and for each one that
        is left out the reason. Raises ConversationError if all of it is refused."""
        ...


def record_renderer(codec: ChatCodec, options: RenderOptions) -> RecordRenderer:
    """Build the renderer of a codec's chat format. Raises ValueError if there is none."""
    if isinstance(codec, Harmony):
        return ConversationRenderer(codec, options)
    if isinstance(codec, ChatMl):
        return ChatMlRenderer(codec, options)
    raise ValueError(f"conversations of files cannot be rendered by {type(codec).__name__}")
