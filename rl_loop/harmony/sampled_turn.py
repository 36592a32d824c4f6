"""Parses a sampled turn in Harmony ids into analysis, calls and an answer.

It uses openai-harmony's parser, with stricter checks in front. The sampled ids of the turn are
kept and never rendered again from the parsed messages.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from openai_harmony import HarmonyError, Message, Role

from rl_loop.chat.messages import FormatError, ParsedMessage
from rl_loop.harmony.conversation import CHANNELS, CONSTRAIN, message_text
from rl_loop.harmony.messages import MessageSpan, split_turn
from rl_loop.harmony.vocabulary import FIRST_SPECIAL_ID, harmony_encoding, special_id

CACHED_FRAMES = 4096
"""Size of the cache for messages without texts. There are few distinct ones."""
MAX_FRAME_TOKENS = 128
"""Maximum tokens in a cached message without its text."""


def parse_turn(harmony_ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
    """Parse an assistant's turn in Harmony ids.

    The ids follow ``<|start|>assistant`` and include the token that ends the turn.
    """
    # Stricter than openai-harmony's parser, which accepts some malformed turns.
    spans = split_turn(harmony_ids)
    if spans is None:
        return FormatError("structure")

    # openai-harmony reads the *name* of a special token, in ordinary tokens, as the special token.
    headers = (_header_words(harmony_ids, span) for span in spans)
    if any("<|" in harmony_encoding().decode(header) for header in headers):
        return FormatError("header")

    # One message at a time, because the parser takes 0.1 ms for each and holds the interpreter lock
    # until all are parsed. A policy can write thousands.
    messages: list[ParsedMessage] = []
    errors: list[FormatError] = []
    for number, span in enumerate(spans):
        message = _parse_message(harmony_ids, span, is_first=number == 0)
        if isinstance(message, FormatError):
            errors.append(message)
        else:
            messages.append(message)
    if errors:
        # Report a malformed header before wrong roles and channels.
        return next((error for error in errors if error.kind == "header"), errors[0])

    ends_with_call_token = harmony_ids[-1] == special_id("<|call|>")
    if not _calls_are_valid(messages, ends_with_call_token):
        return FormatError("recipient")
    return messages


def _header_words(harmony_ids: Sequence[int], span: MessageSpan) -> list[int]:
    """Return the ordinary tokens of a header."""
    header = harmony_ids[span.header : span.body]
    return [token_id for token_id in header if token_id < FIRST_SPECIAL_ID]


def _parse_message(
    harmony_ids: Sequence[int], span: MessageSpan, *, is_first: bool
) -> ParsedMessage | FormatError:
    """Parse one message of a turn. The first one begins behind ``<|start|>assistant``."""
    # The parser takes 0.3 ms for the shortest message, mostly for the header. There are few
    # distinct headers, and their result does not depend on the text. Therefore results are cached.
    frame = (*harmony_ids[span.start : span.body], *harmony_ids[span.body_end : span.end])
    text = list(harmony_ids[span.body : span.body_end])
    try:
        decoded = harmony_encoding().decode_utf8(text)
    except HarmonyError:
        # The text is not UTF-8, so leave the decoding to the parser.
        return _parse_checked_message(tuple(harmony_ids[span.start : span.end]), is_first)

    # Do not cache long headers, because malformed ones would fill the memory.
    parse = _cached_frame if len(frame) <= MAX_FRAME_TOKENS else _parse_checked_message
    message = parse(frame, is_first)
    return message if isinstance(message, FormatError) else replace(message, text=decoded)


def _parse_checked_message(tokens: tuple[int, ...], is_first: bool) -> ParsedMessage | FormatError:
    """Parse a message whose special tokens are in order."""
    role = Role.ASSISTANT if is_first else None
    try:
        [message] = harmony_encoding().parse_messages_from_completion_tokens(tokens, role)
    except (HarmonyError, ValueError):
        return FormatError("header")

    # Otherwise a policy could write a tool output, or the user's next message, itself.
    if message.author.role is not Role.ASSISTANT:
        return FormatError("role")
    if message.channel not in CHANNELS:
        return FormatError("channel")
    return _read_message(message)


_cached_frame = lru_cache(maxsize=CACHED_FRAMES)(_parse_checked_message)


def _read_message(message: Message) -> ParsedMessage:
    recipient = message.recipient
    content_type = message.content_type

    # openai-harmony reads the only word of a header as the recipient. GPT-OSS writes
    # "final <|constrain|>json" before structured output, where it is the content type.
    if recipient is not None and recipient.startswith(CONSTRAIN):
        content_type = recipient
        recipient = None

    return ParsedMessage(message.channel or "", recipient, content_type, message_text(message))


def _calls_are_valid(messages: Sequence[ParsedMessage], ends_with_call_token: bool) -> bool:
    """Return True if calls come last in a turn, end with <|call|>, and exclude a final answer."""
    ends_with_call = messages[-1].recipient is not None
    if ends_with_call_token != ends_with_call:
        return False

    # Tools answer after the turn. An answer next to a call would be written without their results.
    has_call = any(message.recipient is not None for message in messages)
    has_answer = any(message.channel == "final" for message in messages)
    return not has_call or (ends_with_call and not has_answer)
