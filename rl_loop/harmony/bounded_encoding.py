"""Tokenizes text of any length in time that is linear in it.

Byte-pair encoding cuts text into pieces (words, runs of spaces, numbers) and merges the bytes of
each piece, in time that grows with the square of the piece. A tool can print a piece that is as
long as it likes: 64 KB of U+FFFD, a run without breaks, took 14 seconds. Here pieces of more than
LONGEST_PIECE characters are cut. All other text has exactly the ids that it has as a whole; a
longer run has a few others around each cut, which decode to the same text.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

LONGEST_PIECE = 1024
"""Characters; words of people, identifiers, hashes and rules of dashes are far shorter."""
WINDOW = 2048
"""Characters that are cut into pieces, and then tokenized, at a time: what a thread may hold the
interpreter for."""
UNSURE_PIECES = 2
"""The last pieces of a window may be others when more text follows: "don" and "'" become
"don't"."""

# How o200k splits text before byte-pair merging; published with the vocabulary.
O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def encode_bounded(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Encode ``text`` by ``encode``, which gets several pieces of o200k's splitting at a time."""
    if len(text) <= LONGEST_PIECE:
        return encode(text)

    ids: list[int] = []
    for part in parts_of(text):
        ids += encode(part)
    return ids


def parts_of(text: str, longest: int = LONGEST_PIECE, window: int = WINDOW) -> Iterator[str]:
    """Cut ``text`` where byte-pair encoding does, and pieces of more than ``longest`` anywhere.

    ``longest`` and ``window`` are in characters.
    """
    start = 0
    while start < len(text):
        visible = text[start : start + window]
        more_follows = start + window < len(text)

        pieces = [span for _, span in _splitter().pre_tokenize_str(visible)]
        if more_follows:
            # They come again with the next window.
            pieces = pieces[:-UNSURE_PIECES]

        # All pieces up to the first that is too long.
        ends = []
        for first, last in pieces:
            if last - first > longest:
                break
            ends.append(last)

        if more_follows or len(ends) < len(pieces):
            # How spaces are cut depends on what follows them, which must be in the same part.
            behind_words = [end for end in ends if not visible[end - 1].isspace()]
            ends = behind_words or ends

        # If already the first piece is too long, it is cut anywhere.
        end = min(longest, len(visible))
        if ends:
            end = ends[-1]
        yield visible[:end]
        start += end


@cache
def _splitter() -> "PreTokenizer":
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(O200K_PATTERN), "isolated")
