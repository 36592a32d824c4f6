"""Special tokens split an episode into messages, and every token is in a message."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.viewer.conversation import DisplayedMessage, split_episode
from tests.support.recorded_episodes import VOCABULARY


def split(*texts: str) -> list[DisplayedMessage]:
    return split_episode(texts, [True] * len(texts))


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


def test_truncated_message_is_marked() -> None:
    first, second = split("<|start|>", "user", "<|message|>", "hi", "<|start|>", "assistant")
    assert (first.text, first.ended_by) == ("hi", None)
    assert (second.role, second.text, second.ended_by) == ("assistant", "assistant", None)


@given(st.lists(st.sampled_from(VOCABULARY.texts), max_size=40))
def test_every_harmony_token_is_in_exactly_one_message(texts: list[str]) -> None:
    messages = split_episode(texts, [False] * len(texts))
    covered = [i for message in messages for i in range(message.start, message.end)]
    assert covered == list(range(len(texts)))
    for message in messages:
        assert message.start <= message.body <= message.body_end <= message.end


# ---- ChatML

CHATML = [
    "<|im_start|>", "system", "\n", "Be brief", ".", "<|im_end|>", "\n",
    "<|im_start|>", "user", "\n", "2 + 2?", "<|im_end|>", "\n",
    "<|im_start|>", "assistant", "\n", "I compute", ".\n",
    "<tool_call>", "\n", '{"name": "py', 'thon", "arguments": {}}',
    "\n", "</tool_call>", "\n", "<tool_call>", '{"name": "f"}', "</tool_call>", "<|im_end|>", "\n",
    "<|im_start|>", "user", "\n", "<tool_response>", "\n4\n</tool", "_response>", "<|im_end|>", "\n",
    "<|im_start|>", "assistant", "\n", "It is 4", "<|im_end|>",
]  # fmt: skip


def test_chatml_is_split_into_messages_calls_and_answers() -> None:
    messages = [(m.role, m.recipient, m.text, m.ended_by) for m in split(*CHATML)]
    assert messages == [
        ("system", None, "Be brief.", "<|im_end|>"),
        ("user", None, "2 + 2?", "<|im_end|>"),
        ("assistant", None, "I compute.\n", "<tool_call>"),
        ("assistant", "python", '{"name": "python", "arguments": {}}', "<tool_call>"),
        ("assistant", "f", '{"name": "f"}', "<|im_end|>"),
        ("tool", None, "4", "<|im_end|>"),
        ("assistant", None, "It is 4", "<|im_end|>"),
    ]


def test_call_without_text_is_one_message_also_if_truncated() -> None:
    (call,) = split("<|im_start|>", "assistant", "\n", "\n", "<tool_call>", '{"na')
    assert (call.recipient, call.text, call.ended_by) == ("a tool", '{"na', None)
    (header,) = split("<|im_start|>", "assis")
    assert (header.role, header.text, header.ended_by) == ("assistant", "assis", None)


def test_user_text_with_tool_answer_markup_stays_user_text() -> None:
    (message,) = split(
        "<|im_start|>", "user", "\n", "why <tool_response>x</tool_response>", "<|im_end|>"
    )
    assert (message.role, message.text) == ("user", "why <tool_response>x</tool_response>")


@given(st.lists(st.sampled_from(CHATML), max_size=40))
def test_every_chatml_token_is_in_exactly_one_message(texts: list[str]) -> None:
    messages = split(*texts)
    assert [message.start for message in messages[:1]] == [0] * bool(texts)
    assert all(a.end == b.start for a, b in pairwise(messages))
    assert sum(message.end - message.start for message in messages) == len(texts)
    for message in messages:
        assert message.start <= message.body <= message.body_end <= message.end
