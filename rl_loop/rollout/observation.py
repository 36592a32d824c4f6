"""Cuts what tools answer and users say to a size before it is tokenised.

Nothing bounds what a tool prints. A token has at least one byte, so that a limit in bytes bounds
the tokens too, and costs nothing to check."""

from collections.abc import Sequence
from dataclasses import replace

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


def cut_text(text: str, max_bytes: int) -> str:
    """Return ``text`` if its UTF-8 has at most ``max_bytes``, else its beginning and its end.

    These have ``max_bytes`` together, and between them stands how much is left out. Lone
    surrogates become U+FFFD."""
    if len(text) <= max_bytes:
        data = _well_formed(text).encode()
        if len(data) <= max_bytes:
            return data.decode()

    # Only as many characters are encoded as can be kept. Errors are those of a character that is
    # cut in two.
    half = max_bytes // 2
    begin = _well_formed(text[:half]).encode()[:half].decode(errors="ignore")
    end = ""
    if half > 0:
        end = _well_formed(text[-half:]).encode()[-half:].decode(errors="ignore")

    left_out = len(text) - len(begin) - len(end)
    return f"{begin}\n[{left_out} characters left out]\n{end}"


def _size(text: str, max_bytes: int) -> int:
    """Return the bytes of a text in UTF-8, or its characters if it is too long in any case."""
    # No text has fewer bytes than characters: one that must be cut is not encoded as a whole.
    if len(text) > max_bytes:
        return len(text)
    return len(text.encode("utf-8", "replace"))


def _well_formed(text: str) -> str:
    """Join surrogate pairs to characters, and replace a half of one by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
