"""An episode is split into messages by its special tokens, and no token of it is lost."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.viewer.conversation import Message, messages_of
from tests.recorded_episodes import VOCABULARY


def split(*texts: str) -> list[Message]:
    return messages_of(texts, [True] * len(texts))


def header(*texts: str) -> tuple[str, str | None, str | None, str | None]:
    (message,) = split("<|start|>", *texts, "<|message|>", "x", "<|end|>")
    return message.role, message.channel, message.recipient, message.content_type


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("user",), ("user", None, None, None)),
        (("assistant", "<|channel|>", "final"), ("assistant", "final", None, None)),
        (
            ("assistant", "<|channel|>", "commentary", " to=", "functions", ".f", " ", "<|constrain|>", "json"),
            ("assistant", "commentary", "functions.f", "<|constrain|>json"),
        ),
        (
            ("assistant", " to=python", "<|channel|>", "analysis", " code"),
            ("assistant", "analysis", "python", "code"),
        ),
        (
            ("functions.f", " to=assistant", "<|channel|>", "commentary"),
            ("functions.f", "commentary", "assistant", None),
        ),
    ],
)  # fmt: skip
def test_a_header_is_read_in_either_order(
    texts: Sequence[str], expected: tuple[str, str | None, str | None, str | None]
) -> None:
    assert header(*texts) == expected


def test_the_name_of_a_special_token_in_text_is_text() -> None:
    (message,) = split("<|start|>", "user", "<|message|>", "say ", "<|", "end", "|>", "<|end|>")
    assert message.text == "say <|end|>"
    assert message.ended_by == "<|end|>"


def test_a_message_that_was_cut_short_says_so() -> None:
    first, second = split("<|start|>", "user", "<|message|>", "hi", "<|start|>", "assistant")
    assert (first.text, first.ended_by) == ("hi", None)
    assert (second.role, second.text, second.ended_by) == ("assistant", "assistant", None)


@given(st.lists(st.sampled_from(VOCABULARY.texts), max_size=40))
def test_whatever_was_sampled_every_token_is_in_one_message(texts: list[str]) -> None:
    messages = messages_of(texts, [False] * len(texts))
    covered = [i for message in messages for i in range(message.start, message.end)]
    assert covered == list(range(len(texts)))
    for message in messages:
        assert message.start <= message.body <= message.body_end <= message.end
