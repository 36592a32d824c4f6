"""Rendered text of conversations, from which tiny vocabularies are built."""

from collections.abc import Iterator
from itertools import islice

from rl_loop.chat.codec import ChatCodec
from rl_loop.conversations.config import CorpusConfig
from rl_loop.conversations.errors import ConversationError
from rl_loop.conversations.harmony import RenderOptions
from rl_loop.conversations.renderers import conversation_renderer
from rl_loop.conversations.rows import UnparsedRecord, open_rows

CORPUS_CONVERSATIONS = 2000
"""Maximum number of conversations per source."""
ANY_LENGTH = 1 << 40


def conversation_texts(config: CorpusConfig, codec: ChatCodec) -> Iterator[str]:
    """Yield the first conversations of every source as rendered text.

    Args:
        config: sources to read.
        codec: codec whose vocabulary covers any text.

    Raises:
        DataError: if a file cannot be read.
    """
    # With ``append`` a conversation is one sample that contains all its text once.
    renderer = conversation_renderer(codec, RenderOptions("append", ANY_LENGTH, "reject"))
    for source in config.sources.values():
        for row in islice(_rows(source.path), CORPUS_CONVERSATIONS):
            try:
                samples, _ = renderer.render_record(row.parse(source.columns), source.format)
            except ConversationError:
                # Training reports rejected conversations.
                continue
            yield from (codec.decode(sample.token_ids) for sample in samples)


def _rows(location: str) -> Iterator[UnparsedRecord]:
    rows = open_rows(location)
    for block in rows.blocks:
        yield from rows.read(block)
