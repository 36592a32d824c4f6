"""The special tokens of a sampled assistant turn, and the headers between them.

openai-harmony's parser does not check them: it takes special tokens inside a message for text, and
inside a header for a recipient.
"""

from collections.abc import Sequence
from enum import Enum, auto

from rl_loop.harmony.vocabulary import (
    FIRST_SPECIAL_ID,
    SPECIAL_TOKENS,
    TURN_ENDS,
    special_id,
)


class _Place(Enum):
    """Where in a turn the next token is."""

    HEADER = auto()
    TEXT = auto()
    BETWEEN_MESSAGES = auto()
    AFTER_TURN = auto()


def split_headers(harmony_ids: Sequence[int]) -> list[list[int]] | None:
    """Return the ordinary tokens of each header of an assistant turn.

    A turn is HEADER <|message|> TEXT, then <|end|> <|start|> and the next header, or <|return|>
    or <|call|> at its end. It begins inside a header, as after <|start|>. A header may hold
    <|channel|> and <|constrain|> once each, in any order.

    Returns None if the special tokens do not follow one another like this.
    """
    names = {special_id(token): token for token in SPECIAL_TOKENS}
    place = _Place.HEADER
    headers: list[list[int]] = [[]]
    in_header: set[str] = set()  # special tokens of the current header

    for token_id in harmony_ids:
        if token_id < FIRST_SPECIAL_ID:
            if place is _Place.HEADER:
                headers[-1].append(token_id)
            elif place is not _Place.TEXT:
                return None
            continue

        # Reserved tokens have no name and are allowed nowhere.
        token = names.get(token_id)
        match place:
            case _Place.HEADER if token in ("<|channel|>", "<|constrain|>"):
                if token in in_header:
                    return None
                in_header.add(token)
            case _Place.HEADER if token == "<|message|>":
                place = _Place.TEXT
            case _Place.TEXT if token == "<|end|>":
                place = _Place.BETWEEN_MESSAGES
            case _Place.TEXT if token in TURN_ENDS:
                place = _Place.AFTER_TURN
            case _Place.BETWEEN_MESSAGES if token == "<|start|>":
                place = _Place.HEADER
                headers.append([])
                in_header = set()
            case _:
                return None

    if place is not _Place.AFTER_TURN:
        return None
    return headers


def split_texts(harmony_ids: Sequence[int]) -> tuple[tuple[int, ...], list[list[int]]]:
    """Split a turn that ``split_headers`` has accepted into all but its texts, and these.

    A text is what stands between <|message|> and the special token behind it.
    """
    message = special_id("<|message|>")
    frame: list[int] = []
    texts: list[list[int]] = []
    is_text = False
    for token_id in harmony_ids:
        if is_text and token_id < FIRST_SPECIAL_ID:
            texts[-1].append(token_id)
            continue
        frame.append(token_id)
        is_text = token_id == message
        if is_text:
            texts.append([])
    return tuple(frame), texts
