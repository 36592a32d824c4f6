"""What tools answer and users say, cut to a size before it is tokenised.

Nothing bounds what a tool prints. A token has at least one byte, so a limit in bytes bounds the tokens too, and costs
nothing to check."""

from collections.abc import Sequence
from dataclasses import replace

from rl_loop.harmony.codec import ToolOutput


def cut_observation(
    outputs: Sequence[ToolOutput], user: str | None, max_bytes: int
) -> tuple[list[ToolOutput], str | None]:
    """All texts with at most about ``max_bytes`` of UTF-8 together: the longest are cut, to the same length. Half of a
    surrogate pair, which is no text, becomes U+FFFD."""
    texts = [output.text for output in outputs]
    if user is not None:
        texts.append(user)

    # no text has fewer bytes than characters: what is cut anyway is not encoded as a whole
    sizes = [len(text) if len(text) > max_bytes else len(text.encode("utf-8", "replace")) for text in texts]
    share = fair_share(sizes, max_bytes)
    cut = [cut_text(text, share) for text in texts]

    said = cut.pop() if user is not None else None
    return [replace(output, text=text) for output, text in zip(outputs, cut, strict=True)], said


def fair_share(sizes: Sequence[int], total: int) -> int:
    """The largest limit under which all of ``sizes``, cut to it, add up to ``total`` at most."""
    left = total
    for number, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - number)
        if size > share:
            return share
        left -= size
    return total


def cut_text(text: str, max_bytes: int) -> str:
    """``text`` as it is if its UTF-8 has at most ``max_bytes``; else its beginning and end of that size together, and
    between them how much is left out. Lone surrogates become U+FFFD."""
    if len(text) <= max_bytes:
        data = _well_formed(text).encode()
        if len(data) <= max_bytes:
            return data.decode()

    half = max_bytes // 2
    begin = _well_formed(text[:half]).encode()[:half].decode(errors="ignore")
    end = _well_formed(text[len(text) - half :]).encode()[-half:].decode(errors="ignore") if half else ""
    left_out = len(text) - len(begin) - len(end)
    return f"{begin}\n[{left_out} characters left out]\n{end}"


def _well_formed(text: str) -> str:
    """UTF-16 knows surrogates: a pair becomes its character, half of one becomes U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
