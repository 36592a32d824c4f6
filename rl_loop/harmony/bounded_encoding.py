"""Tokenising text of any length in time that is linear in it.

Byte-pair encoding cuts text into pieces (words, runs of spaces, numbers) and merges the bytes of each piece, in time
that grows with the square of the piece. A tool can print one that is as long as it likes: 64 KB of U+FFFD, a run
without breaks, took 14 seconds. Here pieces of more than LONGEST_PIECE characters are cut. All other text has exactly
the ids that it has as a whole; a longer run has a few others around each cut, which decode to the same text."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

LONGEST_PIECE = 1024
"""Characters; words of people, identifiers, hashes and rules of dashes are far shorter."""
WINDOW = 2048
"""Characters that are cut into pieces, and then tokenised, at a time: what a thread may hold the interpreter for."""
UNSURE_PIECES = 2
"""The last pieces of a window may be others when more text follows: "don" and "'" become "don't"."""

# how o200k splits text before byte-pair merging; published with the vocabulary
O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def encode_bounded(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """The ids of ``text`` by ``encode``, which is given pieces of o200k's splitting, several at a time."""
    if len(text) <= LONGEST_PIECE:
        return encode(text)
    return [token for part in parts_of(text) for token in encode(part)]


def parts_of(text: str, longest: int = LONGEST_PIECE, window: int = WINDOW) -> Iterator[str]:
    """Cut ``text`` where byte-pair encoding does, and pieces of more than ``longest`` characters anywhere."""
    start = 0
    while start < len(text):
        seen = text[start : start + window]
        spans = [span for _, span in _splitter().pre_tokenize_str(seen)]
        if start + window < len(text):
            spans = spans[:-UNSURE_PIECES]

        # all pieces up to the first that is too long; what is unsure comes again with the next window
        ends = []
        for first, last in spans:
            if last - first > longest:
                break
            ends.append(last)

        if start + window < len(text) or len(ends) < len(spans):
            # how spaces are cut depends on what follows them, which must be in the same part
            behind_words = [end for end in ends if not seen[end - 1].isspace()]
            ends = behind_words or ends
        end = ends[-1] if ends else min(longest, len(seen))
        yield seen[:end]
        start += end


@cache
def _splitter() -> "PreTokenizer":
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(O200K_PATTERN), "isolated")
