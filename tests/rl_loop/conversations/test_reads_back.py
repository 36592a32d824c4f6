"""The parser of reinforcement learning reads turns of SFT as the original messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_loop.chat.messages import FormatError, ParsedMessage
from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.prompt_config import ChatMlConfig
from rl_loop.chatml.vocabulary import tiny_vocabulary
from rl_loop.conversations.errors import ConversationError
from rl_loop.conversations.harmony import RenderOptions
from rl_loop.conversations.renderers import conversation_renderer
from rl_loop.environments.arithmetic import vocabulary_text
from rl_loop.harmony.codec import Harmony
from rl_loop.harmony.vocabulary import GptOssVocabulary
from tests.support.rl_loop.prompts import SHORT_PROMPT

OPTIONS = RenderOptions("append", 100_000, "reject")
CODECS: dict[str, Any] = {
    "harmony": Harmony(GptOssVocabulary(), SHORT_PROMPT),
    "chatml": ChatMl(tiny_vocabulary(1300, vocabulary_text()), ChatMlConfig()),
}
RENDERERS = {name: conversation_renderer(codec, OPTIONS) for name, codec in CODECS.items()}

TEXTS = st.text('a1 \n{}"\\<|>é', min_size=1, max_size=8) | st.text(max_size=6)
NAMES = ["f", "functions.f", "python", "browser.search", "json", "to=functions.f", "assistant"]
ODD_NAMES = ["analysis", "final", "a b", "<|end|>", 'a"b', "ü", "", "f.g", "to="]
WORDS = st.sampled_from([*NAMES, *ODD_NAMES])
TYPES = st.none() | st.sampled_from(
    ["json", "code", "<|constrain|>json", "<|constrain|> json", "<|constrain|>", "to=f", "a b", ""]
)
ARGUMENTS = st.dictionaries(TEXTS, st.integers() | TEXTS | st.booleans(), max_size=2)
CALLS = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": WORDS, "arguments": ARGUMENTS | ARGUMENTS.map(json.dumps) | TEXTS}
        )
    },
    optional={"id": st.sampled_from(["c1", "c2"])},
)
ASSISTANT = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXTS | st.just("")},
    optional={
        "thinking": TEXTS,
        "tool_calls": st.lists(CALLS, min_size=1, max_size=2),
        "channel": st.sampled_from(["analysis", "commentary", "final"]),
        "recipient": WORDS,
        "content_type": TYPES,
    },
)
OTHERS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "tool"]), "content": TEXTS | st.just("")},
    optional={"tool_call_id": st.sampled_from(["c1", "c2"])},
)
RECORDS = st.lists(ASSISTANT | OTHERS, min_size=1, max_size=4).map(
    lambda messages: {"messages": [{"role": "user", "content": "q"}, *messages]}
)


def trained_turns(ids: list[int], mask: list[bool]) -> list[list[int]]:
    """Return the runs of trained tokens."""
    turns: list[list[int]] = []
    before = False
    for token, is_learned in zip(ids, mask, strict=True):
        if is_learned and not before:
            turns.append([])
        if is_learned:
            turns[-1].append(token)
        before = is_learned
    return turns


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None, max_examples=150)
@given(record=RECORDS)
def test_trained_turns_parse_to_the_original_messages(name: str, record: dict[str, Any]) -> None:
    codec = CODECS[name]
    for form in ("messages", "harmony") if name == "harmony" else ("messages",):
        try:
            samples, _ = RENDERERS[name].render_record(record, form)  # type: ignore[arg-type]
        except ConversationError:
            continue
        for sample in samples:
            for turn in trained_turns(sample.token_ids, sample.loss_mask):
                read = codec.parse(turn)
                assert not isinstance(read, FormatError), codec.decode(turn)
                assert codec.render_assistant(read) == turn, codec.decode(turn)


HEADERS = [
    ("commentary", "functions.f", "<|constrain|> json", "<|constrain|>json"),
    ("commentary", "functions.f", "<|constrain|>json", "<|constrain|>json"),
    ("commentary", "functions.f", "json", "json"),
    ("analysis", "python", "code", "code"),
    ("final", None, "json", "<|constrain|>json"),
    ("final", None, "<|constrain|> json", "<|constrain|>json"),
]


@pytest.mark.parametrize(("channel", "recipient", "given", "sampled"), HEADERS)
def test_trained_header_parses_like_a_sampled_one(
    channel: str, recipient: str | None, given: str, sampled: str
) -> None:
    codec = CODECS["harmony"]
    meant = ParsedMessage(channel, recipient, given, "{}")
    [read] = codec.parse(codec.render_assistant([meant]))
    assert read == ParsedMessage(channel, recipient, sampled, "{}")

    message = {"role": "assistant", "channel": channel, "content_type": given, "content": "{}"}
    record: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}, message]}
    if recipient is not None:
        message["recipient"] = recipient
    [sample], _ = RENDERERS["harmony"].render_record(record, "harmony")
    [turn] = trained_turns(sample.token_ids, sample.loss_mask)
    assert codec.parse(turn) == [read]


MISREAD = [("analysis", "python", "to=f"), ("final", "functions.f", None)]


@pytest.mark.parametrize(("channel", "recipient", "content_type"), MISREAD)
def test_header_that_would_parse_differently_is_rejected(
    channel: str, recipient: str, content_type: str | None
) -> None:
    message = {
        "role": "assistant",
        "channel": channel,
        "recipient": recipient,
        "content_type": content_type,
        "content": "{}",
    }
    record = {"messages": [{"role": "user", "content": "q"}, message]}
    with pytest.raises(ConversationError, match=r"message 1: .* a format error"):
        RENDERERS["harmony"].render_record(record, "harmony")


def test_call_of_an_unknown_tool_is_rejected() -> None:
    for recipient in ("json", "assistant", "search", "functionsf"):
        call = {"role": "assistant", "recipient": recipient, "content": "{}"}
        record = {"messages": [{"role": "user", "content": "q"}, call]}
        with pytest.raises(ConversationError, match=f"it calls {recipient}, which is neither"):
            RENDERERS["harmony"].render_record(record, "harmony")


def test_chatml_call_that_would_parse_differently_is_rejected() -> None:
    for name, arguments in (('a"b', {}), ("a b", {}), ("python", {"x": 1})):
        call = {"function": {"name": name, "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        with pytest.raises(ConversationError, match="message 1"):
            record = {"messages": [{"role": "user", "content": "q"}, turn]}
            RENDERERS["chatml"].render_record(record, "messages")
