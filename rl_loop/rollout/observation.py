"""Limits the size of tool outputs and user messages before they are tokenized.

Tools may print any amount. A token has at least one byte, so a limit in bytes also bounds the
tokens, and it is cheap to check.
"""

from collections.abc import Sequence
from dataclasses import replace

from rl_loop.chat.messages import ToolOutput
from rl_loop.chat.truncate_text import truncate_text


def truncate_observation(
    outputs: Sequence[ToolOutput], user: str | None, max_bytes: int
) -> tuple[list[ToolOutput], str | None]:
    """Cut the longest texts to one length, so that all together have about ``max_bytes`` of UTF-8.

    Halves of surrogate pairs, which are not valid text, become U+FFFD.

    Args:
        outputs: outputs of the tools.
        user: message of the user, if any.
        max_bytes: limit for all texts together.

    Returns:
        The outputs and the user's message.
    """
    texts = [output.text for output in outputs]
    if user is not None:
        texts.append(user)

    sizes = [_size(text, max_bytes) for text in texts]
    share = fair_share(sizes, max_bytes)
    texts = [truncate_text(text, share) for text in texts]

    if user is not None:
        user = texts.pop()
    return [replace(output, text=text) for output, text in zip(outputs, texts, strict=True)], user


def fair_share(sizes: Sequence[int], total: int) -> int:
    """Return the largest limit so that ``sizes``, cut to it, have a sum of at most ``total``."""
    left = total
    for number, size in enumerate(sorted(sizes)):
        # Shorter texts come first. The bytes that they leave are shared by the longer ones.
        share = left // (len(sizes) - number)
        if size > share:
            return share
        left -= size
    return total


def _size(text: str, max_bytes: int) -> int:
    """Return the bytes of a text in UTF-8, or its characters if they exceed ``max_bytes``."""
    # A text has at least 1 byte per character, so a longer text need not be encoded.
    if len(text) > max_bytes:
        return len(text)
    return len(text.encode("utf-8", "replace"))
