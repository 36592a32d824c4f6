"""Cuts a text to a size in bytes."""

from rl_loop.chat.codec import without_surrogates


def truncate_text(text: str, max_bytes: int) -> str:
    r"""Return ``text``, or its beginning and end if its UTF-8 has more than ``max_bytes``.

    Beginning and end have ``max_bytes`` together. A note between them has the size of the gap. Lone
    surrogates become U+FFFD.

    Example:
        >>> truncate_text("0123456789", max_bytes=4)
        '01\n[6 characters left out]\n89'
    """
    # A character has at least one byte, so a longer text need not be encoded as a whole.
    if len(text) <= max_bytes:
        data = without_surrogates(text).encode()
        if len(data) <= max_bytes:
            return data.decode()

    # Encode only characters that can be kept. An error means that a character was cut in two.
    half = max_bytes // 2
    begin = without_surrogates(text[:half]).encode()[:half].decode(errors="ignore")
    end = ""
    if half > 0:
        end = without_surrogates(text[-half:]).encode()[-half:].decode(errors="ignore")

    left_out = len(text) - len(begin) - len(end)
    return f"{begin}\n[{left_out} characters left out]\n{end}"
