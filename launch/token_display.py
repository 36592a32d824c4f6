"""Tokens with their loss mask, for terminals and files."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.text import Text

from launch.control_characters import show_control_characters
from rl_loop.chat.codec import ChatCodec

MAX_CHARACTER_TOKENS = 4
"""Maximum number of tokens over which one character's bytes can be spread."""

TRAINED_STYLES = ("black on green", "black on bright_green")
CONTEXT_STYLES = ("bright_black", "white")
"""Two styles for tokens of each kind, alternating, to show the boundaries of tokens."""


@dataclass(frozen=True)
class TokenPiece:
    """One token, or several tokens that form one character."""

    token_ids: list[int]
    text: str
    trained: bool


def decode_pieces(
    token_ids: np.ndarray, loss_mask: np.ndarray, codec: ChatCodec
) -> Iterator[TokenPiece]:
    """Yield the tokens with their texts.

    Args:
        token_ids: int [tokens].
        loss_mask: bool [tokens].
        codec: decodes the tokens.
    """
    waiting: list[int] = []
    for token_id, trained in zip(token_ids.tolist(), loss_mask.tolist(), strict=True):
        waiting.append(token_id)
        # Byte-level tokens can hold a part of a character, which decodes to U+FFFD.
        text = codec.decode(waiting)
        # Show an incomplete character together with its other tokens.
        if text.endswith("\ufffd") and len(waiting) < MAX_CHARACTER_TOKENS:
            continue
        yield TokenPiece(waiting, text, trained)
        waiting = []
    # A truncated sample may end within a character.
    if waiting:
        yield TokenPiece(waiting, codec.decode(waiting), bool(loss_mask[-1]))


def token_lines(
    token_ids: np.ndarray, loss_mask: np.ndarray, codec: ChatCodec, start: int = 0
) -> Iterator[str]:
    """Yield a line per token: position, "train" if it has a loss, id and text.

    Args:
        token_ids: int [tokens].
        loss_mask: bool [tokens].
        codec: decodes the tokens.
        start: position of the first token.
    """
    position = start
    for piece in decode_pieces(token_ids, loss_mask, codec):
        mask = "train" if piece.trained else ""
        ids = "+".join(map(str, piece.token_ids))
        yield f"{position:6}  {mask:5}  {ids:>8}  {piece.text!r}"
        position += len(piece.token_ids)


def color_tokens(token_ids: np.ndarray, loss_mask: np.ndarray, codec: ChatCodec) -> Text:
    """Return the text of tokens. Those that have a loss are on a green background."""
    text = Text()
    for number, piece in enumerate(decode_pieces(token_ids, loss_mask, codec)):
        styles = TRAINED_STYLES if piece.trained else CONTEXT_STYLES
        # A visible line break, whose style shows whether it is trained.
        shown = show_control_characters(piece.text).replace("\n", "\u23ce\n")
        text.append(shown, style=styles[number % 2])
    return text


def print_line(line: str, console: Console, style: str | None = None) -> None:
    """Print untrusted text without its control characters, markup and line wrapping."""
    shown = show_control_characters(line)
    # Data may contain :smile:, which rich would replace.
    console.print(shown, style=style, highlight=False, markup=False, emoji=False, soft_wrap=True)
