"""Tokenizes text of any length in linear time.

Byte-pair encoding splits text into pieces (words, runs of spaces, numbers) and merges the bytes of
each piece. Its time is quadratic in the length of a piece. A tool can print a piece of any length:
64 KB of U+FFFD, a run without breaks, took 14 s. Therefore pieces above MAX_PIECE_CHARACTERS
are cut. The ids of all other text are unchanged. A cut piece has a few other ids around each cut,
which decode to the same text.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

MAX_PIECE_CHARACTERS = 1024
"""Maximum characters per piece. Words, identifiers, hashes and lines of dashes are far shorter."""
WINDOW = 2048
"""Number of characters that are split and tokenized at a time. Small, because a thread holds the
interpreter lock while it tokenizes a window."""
UNSETTLED_PIECES = 2
"""Last pieces of a window that may change with the following text: "don" and "'" become
"don't"."""

# o200k's pattern for splitting text before byte-pair merging, published with the vocabulary.
O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def encode_bounded(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Encode ``text`` with ``encode``, which gets several pieces of o200k's splitting at a time."""
    if len(text) <= MAX_PIECE_CHARACTERS:
        return encode(text)

    ids: list[int] = []
    for part in split_text(text):
        ids += encode(part)
    return ids


def split_text(
    text: str, longest: int = MAX_PIECE_CHARACTERS, window: int = WINDOW
) -> Iterator[str]:
    """Split ``text`` at boundaries of o200k's pieces. Pieces that are too long are cut anywhere.

    Args:
        text: text to split.
        longest: maximum characters per piece.
        window: number of characters to split at a time.
    """
    start = 0
    while start < len(text):
        visible = text[start : start + window]
        more_follows = start + window < len(text)

        pieces = [span for _, span in _splitter().pre_tokenize_str(visible)]
        if more_follows:
            # The next window includes them again.
            pieces = pieces[:-UNSETTLED_PIECES]

        # Take all pieces before the first one that is too long.
        ends = []
        for first, last in pieces:
            if last - first > longest:
                break
            ends.append(last)

        if more_follows or len(ends) < len(pieces):
            # The splitting of spaces depends on the following text, which must be in the same part.
            behind_words = [end for end in ends if not visible[end - 1].isspace()]
            ends = behind_words or ends

        # If the first piece is too long, cut it anywhere.
        end = min(longest, len(visible))
        if ends:
            end = ends[-1]
        yield visible[:end]
        start += end


@cache
def _splitter() -> "PreTokenizer":
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(O200K_PATTERN), "isolated")
