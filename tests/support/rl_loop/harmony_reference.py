"""Reference for rendering and parsing, based on openai-harmony.

It does not call ``rl_loop.harmony.codec``. openai-harmony renders valid turns. Regular expressions
on the text of the tokens, and openai-harmony's parser, give the meaning of a sampled turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from openai_harmony import (
    Author,
    Conversation,
    HarmonyError,
    Message,
    RenderConversationConfig,
    Role,
)

from rl_loop.harmony.codec import ParsedMessage
from rl_loop.harmony.vocabulary import SPECIAL_TOKENS, harmony_encoding

KEEP_ANALYSIS = RenderConversationConfig(auto_drop_analysis=False)
START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL = (
    200_006, 200_005, 200_003, 200_008, 200_007, 200_002, 200_012,
)  # fmt: skip

# Place of the recipient in a header: as openai-harmony renders it, or as GPT-OSS samples it.
RecipientPlace = Literal["role", "channel"]


def encode(text: str) -> list[int]:
    """Return the ids of a text. Names of special tokens in it are encoded as these tokens."""
    return harmony_encoding().encode(text, allowed_special="all")


def assistant(
    text: str, channel: str, recipient: str | None = None, content_type: str | None = None
) -> Message:
    message = Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)
    message.recipient = recipient
    message.content_type = content_type
    return message


def tool(name: str, text: str, channel: str) -> Message:
    message = Message.from_author_and_content(Author.new(Role.TOOL, name), text)
    return message.with_channel(channel).with_recipient("assistant")


def user(text: str) -> Message:
    return Message.from_role_and_content(Role.USER, text)


def render(messages: Sequence[Message]) -> list[int]:
    """Return a conversation as openai-harmony renders it, without omissions."""
    return harmony_encoding().render_conversation(
        Conversation.from_messages(messages), KEEP_ANALYSIS
    )


def render_for_completion(messages: Sequence[Message]) -> list[int]:
    conversation = Conversation.from_messages(messages)
    return harmony_encoding().render_conversation_for_completion(
        conversation, Role.ASSISTANT, KEEP_ANALYSIS
    )


def render_for_training(messages: Sequence[Message]) -> list[int]:
    conversation = Conversation.from_messages(messages)
    return harmony_encoding().render_conversation_for_training(conversation, KEEP_ANALYSIS)


def sampled_turn(messages: Sequence[Message], place: RecipientPlace = "role") -> list[int]:
    """Return the ids of an assistant turn after ``<|start|>assistant``, as an engine returns them.

    They are openai-harmony's, with the stop token that ends sampling.
    """
    ids: list[int] = []
    for message in messages:
        ids += [*render([message])[:-1], END]

    ids[-1] = CALL if messages[-1].recipient is not None else RETURN
    if place == "channel":
        ids = with_recipient_after_channel(ids)
    return ids[len(encode("<|start|>assistant")) :]


def with_recipient_after_channel(ids: Sequence[int]) -> list[int]:
    """Move the recipient in assistant headers: `` to=N<|channel|>C`` to ``<|channel|>C to=N``."""
    return _with_headers(ids, r"^(<\|start\|>assistant)( to=\S+)(<\|channel\|>\w+)", r"\1\3\2")


def with_recipient_in_role(ids: Sequence[int]) -> list[int]:
    """Invert ``with_recipient_after_channel``."""
    return _with_headers(ids, r"^(<\|start\|>assistant)(<\|channel\|>\w+)( to=\S+)", r"\1\3\2")


def _with_headers(ids: Sequence[int], pattern: str, replacement: str) -> list[int]:
    """Rewrite the text of every header, from ``<|start|>`` to ``<|message|>``, not of messages."""
    out: list[int] = []
    position = 0
    while position < len(ids):
        if ids[position] != START or MESSAGE not in ids[position:]:
            out.append(ids[position])
            position += 1
            continue
        end = list(ids).index(MESSAGE, position)
        header = harmony_encoding().decode(ids[position:end])
        out += encode(re.sub(pattern, replacement, header))
        position = end
    return out


# ---- the meaning of a sampled turn

# A character per special token that does not occur in texts, and one for all reserved tokens.
MARKS = {encode(name)[0]: chr(0x10F000 + number) for number, name in enumerate(SPECIAL_TOKENS)}
RESERVED = chr(0x10F100)
ANY = f"[^{''.join(MARKS.values())}{RESERVED}]*"
HEADER = (
    f"(?P<before>{ANY})"
    f"(?:{MARKS[CHANNEL]}{ANY}(?:{MARKS[CONSTRAIN]}{ANY})?|{MARKS[CONSTRAIN]}{ANY}{MARKS[CHANNEL]}{ANY})"
    f"{MARKS[MESSAGE]}"
)
ANONYMOUS_HEADER = HEADER.replace("?P<before>", "?:")
TURN = f"(?:{ANONYMOUS_HEADER}{ANY}{MARKS[END]}{MARKS[START]})*{ANONYMOUS_HEADER}{ANY}[{MARKS[RETURN]}{MARKS[CALL]}]"


def marked(ids: Sequence[int]) -> str:
    """Return the text of ids, with every special token as one private character."""
    text, ordinary = "", list[int]()
    for token in [*ids, RETURN]:
        if token < 199_998:
            ordinary.append(token)
            continue
        text += harmony_encoding().decode(ordinary) + MARKS.get(token, RESERVED)
        ordinary = []
    return text[:-1]


def meaning(ids: Sequence[int]) -> list[ParsedMessage] | None:
    """Return the messages of a sampled turn; None if it is malformed.

    A valid turn is one that openai-harmony parses without an error, by the assistant, on a known
    channel, with special tokens as documented, ended by the correct stop token, and without both a
    call and a final answer.

    Args:
        ids: Harmony's ids after ``<|start|>assistant``.
    """
    text = marked(ids)
    if re.fullmatch(TURN, text) is None:
        return None
    if any("<|" in header.group() for header in re.finditer(ANONYMOUS_HEADER, text)):
        return None  # a header contains the name of a special token as text
    try:
        parsed = harmony_encoding().parse_messages_from_completion_tokens(list(ids), Role.ASSISTANT)
    except HarmonyError:
        return None

    messages: list[ParsedMessage] = []
    for message in parsed:
        recipient, content_type = message.recipient, message.content_type
        if recipient is not None and recipient.startswith("<|constrain|>"):
            recipient, content_type = None, recipient
        if message.author.role is not Role.ASSISTANT or message.channel not in (
            "analysis",
            "commentary",
            "final",
        ):
            return None
        messages.append(
            ParsedMessage(message.channel, recipient, content_type, message.content[0].text)
        )

    called = [message.recipient is not None for message in messages]
    if called[-1] != (ids[-1] == CALL):
        return None
    if any(called) and (not called[-1] or any(message.channel == "final" for message in messages)):
        return None
    return messages
