"""Cuts a text to a size in bytes."""

from rl_loop.chat.codec import without_surrogates


def cut_text(text: str, max_bytes: int) -> str:
    """Return ``text`` if its UTF-8 has at most ``max_bytes``, else its beginning and its end.

    These have ``max_bytes`` together, and between them stands how much is left out. Lone
    surrogates become U+FFFD."""
    if len(text) <= max_bytes:
        data = without_surrogates(text).encode()
        if len(data) <= max_bytes:
            return data.decode()

    # Only as many characters are encoded as can be kept. Errors are those of a character that is
    # cut in two.
    half = max_bytes // 2
    begin = without_surrogates(text[:half]).encode()[:half].decode(errors="ignore")
    end = ""
    if half > 0:
        end = without_surrogates(text[-half:]).encode()[-half:].decode(errors="ignore")

    left_out = len(text) - len(begin) - len(end)
    return f"{begin}\n[{left_out} characters left out]\n{end}"
