"""Cuts what tools answer and users say to a size before it is tokenised.

Nothing bounds what a tool prints. A token has at least one byte, so that a limit in bytes bounds
the tokens too, and costs nothing to check."""

from collections.abc import Sequence
from dataclasses import replace

from rl_loop.chat.cut_text import cut_text
from rl_loop.chat.messages import ToolOutput


def cut_observation(
    outputs: Sequence[ToolOutput], user: str | None, max_bytes: int
) -> tuple[list[ToolOutput], str | None]:
    """Cut the longest texts to one length, so that all have about ``max_bytes`` of UTF-8.

    Half of a surrogate pair, which is no text, becomes U+FFFD. Returns the outputs and what the
    user says."""
    texts = [output.text for output in outputs]
    if user is not None:
        texts.append(user)

    sizes = [_size(text, max_bytes) for text in texts]
    share = fair_share(sizes, max_bytes)
    texts = [cut_text(text, share) for text in texts]

    if user is not None:
        user = texts.pop()
    return [replace(output, text=text) for output, text in zip(outputs, texts, strict=True)], user


def fair_share(sizes: Sequence[int], total: int) -> int:
    """Return the largest limit under which ``sizes``, cut to it, add up to at most ``total``."""
    left = total
    for number, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - number)
        if size > share:
            return share
        left -= size
    return total


def _size(text: str, max_bytes: int) -> int:
    """Return the bytes of a text in UTF-8, or its characters if it is too long in any case."""
    # No text has fewer bytes than characters: one that must be cut is not encoded as a whole.
    if len(text) > max_bytes:
        return len(text)
    return len(text.encode("utf-8", "replace"))
