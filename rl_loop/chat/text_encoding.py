"""Check that a vocabulary encodes text without loss, and never as a special token."""

from collections.abc import Collection, Iterable
from functools import cache
from itertools import count
from typing import Protocol

BYTE_TOKENS = 256
"""Number of tokens that are single bytes. They come first in o200k."""
REPLACEMENT = "\ufffd"
"""U+FFFD, which replaces characters without tokens."""


class TextVocabulary(Protocol):
    """Part of ``rl_loop.chat.codec.Vocabulary`` that is checked."""

    def encode_text(self, text: str) -> list[int]: ...


@cache
def probe_texts() -> tuple[str, ...]:
    """Return texts that contain every byte that UTF-8 can contain."""
    # All of ASCII, every continuation byte, and one character for every other first byte.
    points = [*range(0x800), *range(0x800, 0x10000, 0x1000), *range(0x10000, 0x110000, 0x40000)]
    # Surrogates are not characters, so UTF-8 cannot encode them.
    characters = [chr(point) for point in points if not 0xD800 <= point < 0xE000]
    return (*characters[:128], "".join(characters[128:]), REPLACEMENT, "\ud800", "a\x00\x04\x7fb")


def check_encodes_text(
    vocabulary: TextVocabulary, special_ids: Collection[int], names: Iterable[str]
) -> None:
    """Check that a vocabulary encodes text as text.

    Args:
        vocabulary: the vocabulary to check.
        special_ids: ids that text must not become.
        names: spellings of special tokens. In a text, they must be encoded as plain text.

    Raises:
        ValueError: if a text becomes a special token or is lost. The error names the text.
    """
    special = set(special_ids)
    # Tokenizers find added tokens anywhere in a text, so test the names alone and within a text.
    spelled = [text for name in names for text in (name, f"a {name}\n{name}b")]
    for text in (*probe_texts(), *spelled):
        ids = vocabulary.encode_text(text)
        # Some tokenizers drop bytes without a token.
        if not ids:
            raise ValueError(f"the text {text!r} is encoded as an empty list of tokens")
        if not special.isdisjoint(ids):
            special_id = min(special.intersection(ids))
            raise ValueError(f"the text {text[:40]!r} is encoded as the special token {special_id}")


def byte_characters() -> list[str]:
    """Return the 256 characters that byte-level BPE (GPT-2) uses for bytes.

    transformers has the same table, but importing it takes a second.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)}
    printable |= set(range(ord("®"), ord("ÿ") + 1))

    # A printable byte is its own character. The others get characters after the last byte, in
    # order.
    substitutes = count(BYTE_TOKENS)
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(BYTE_TOKENS)]
