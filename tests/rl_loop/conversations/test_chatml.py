"""Trained tokens of ChatML conversations equal the tokens that inference would sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_loop.chat.messages import FormatError
from rl_loop.chat.tools import Tool
from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.prompt_config import ChatMlConfig
from rl_loop.chatml.vocabulary import IM_END, tiny_vocabulary
from rl_loop.conversations.chatml import ChatMlRenderer
from rl_loop.conversations.config import DataConfig
from rl_loop.conversations.dataset import ConversationData
from rl_loop.conversations.errors import ConversationError
from rl_loop.conversations.harmony import RenderedSample, RenderOptions
from rl_loop.conversations.rejections import RejectionReport
from tests.support.rl_loop.chatml_vocabularies import VOCABULARIES

LONG = 100_000
OPTIONS = RenderOptions("harmony", LONG, "reject")
CODECS = {name: ChatMl(v, ChatMlConfig(system=None)) for name, v in VOCABULARIES.items()}

USER = {"role": "user", "content": "Hi?"}
AGAIN = {"role": "user", "content": "Again."}
ANSWER = {"role": "assistant", "content": "Yes."}
FIND = {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FIND}]


def call(argument: int, key: str | None = None) -> dict[str, Any]:
    function = {"name": "find", "arguments": json.dumps({"q": argument})}
    return {"id": key, "type": "function", "function": function}


CALLS = {"role": "assistant", "content": "Let me see.", "tool_calls": [call(1, "a"), call(2, "b")]}
SECOND = {"role": "tool", "tool_call_id": "b", "content": "two"}
FIRST = {"role": "tool", "tool_call_id": "a", "content": "one"}

# The trained tokens are between « and ».
BY_HAND = {
    "one turn": (
        {"messages": [USER, ANSWER]},
        "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n«Yes.<|im_end|>»",
    ),
    "a system message, and a second turn": (
        {"messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER, AGAIN, ANSWER]},
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n"
        "<|im_start|>assistant\n«Yes.<|im_end|>»\n<|im_start|>user\nAgain.<|im_end|>\n"
        "<|im_start|>assistant\n«Yes.<|im_end|>»",
    ),
    "weight 0": (
        {"messages": [USER, ANSWER | {"weight": 0}, AGAIN, ANSWER]},
        "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n«Yes.<|im_end|>»",
    ),
    "cut off": (
        {"messages": [USER, ANSWER | {"finish_reason": "length"}]},
        "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n«Yes.»",
    ),
    "two calls, whose answers come in another order": (
        {"messages": [USER, CALLS, SECOND, FIRST, ANSWER]},
        "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n«Let me see.\n"
        '<tool_call>\n{"name": "find", "arguments": {"q": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "find", "arguments": {"q": 2}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«Yes.<|im_end|>»",
    ),
    "sharegpt, ending with a call": (
        {
            "conversations": [
                {"from": "human", "value": "Hi?"},
                {"from": "function_call", "value": '{"name": "find", "arguments": {"q": 1}}'},
            ]
        },
        "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n«<tool_call>\n"
        '{"name": "find", "arguments": {"q": 1}}\n</tool_call><|im_end|>»',
    ),
}


def rendered(record: Any, codec: ChatMl) -> RenderedSample:
    (sample,), rejected = ChatMlRenderer(codec, OPTIONS).render_record(record, "auto")
    assert rejected == []
    return sample


def trained_spans(sample: RenderedSample) -> list[tuple[int, int]]:
    """Return begin and end of every run of trained tokens."""
    mask = [False, *sample.loss_mask, False]
    edges = [i for i in range(len(mask) - 1) if mask[i] != mask[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("vocabulary", CODECS)
def test_chatml_mask_equals_the_one_written_by_hand(name: str, vocabulary: str) -> None:
    record, expected = BY_HAND[name]
    codec = CODECS[vocabulary]
    sample = rendered(record, codec)

    shown, at = "", 0
    for begin, end in trained_spans(sample):
        shown += codec.decode(sample.token_ids[at:begin])
        shown += f"«{codec.decode(sample.token_ids[begin:end])}»"
        at = end
    assert shown + codec.decode(sample.token_ids[at:]) == expected


@pytest.mark.parametrize("vocabulary", CODECS)
def test_turn_begins_where_the_prompt_of_inference_ends(vocabulary: str) -> None:
    """These texts would merge with the header or the next text if they were encoded together."""
    codec = CODECS[vocabulary]
    texts = ["\n\n two\n", " x", "3.\n"]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "S"}]
    for text in texts:
        messages += [USER, {"role": "assistant", "content": text}]
    sample = rendered({"messages": messages, "tools": TOOLS}, codec)

    spans = trained_spans(sample)
    assert len(spans) == len(texts)
    tools = [Tool(FIND["name"], FIND["description"], FIND["parameters"])]  # type: ignore[arg-type]
    prompt = codec.render_prompt(messages[:2], tools)
    for number, ((begin, end), text) in enumerate(zip(spans, texts, strict=True)):
        assert sample.token_ids[:begin] == prompt
        sampled = sample.token_ids[begin:end]
        parsed = codec.parse(sampled)
        assert not isinstance(parsed, FormatError) and parsed[0].text == text
        assert sampled == codec.render_assistant(parsed)
        if number + 1 < len(texts):
            prompt += sampled + codec.render_observation([], "Hi?")
    assert sample.token_ids == prompt + sampled


REFUSED = {
    "'thinking' cannot be rendered in ChatML": [USER, ANSWER | {"thinking": "Hm."}],
    r"contains <\|im_end\|>": [USER | {"content": "a<|im_end|>"}, ANSWER],
    "contains <tool_call>": [USER, ANSWER | {"content": "<tool_call>\n{}"}],
    "calls 2 functions, but 1 tool outputs follow": [USER, CALLS, FIRST, ANSWER],
    "calls 2 functions, but 0 tool outputs follow": [USER, CALLS, AGAIN, ANSWER],
    "calls 0 functions, but 1 tool outputs follow": [USER, FIRST, ANSWER],
    "it calls find, which is not described": [USER, CALLS],
    "ends with message 2 .role 'user'.": [USER, ANSWER, AGAIN],
    "begins with an assistant message": [ANSWER, USER, ANSWER],
    "followed by another assistant message": [USER, ANSWER, ANSWER],
    "must be the last one": [USER, ANSWER | {"finish_reason": "length"}, AGAIN, ANSWER],
    "every message has weight 0": [USER, ANSWER | {"weight": 0}],
    "no assistant message": [USER],
}


@pytest.mark.parametrize("message", REFUSED)
def test_turn_that_no_policy_samples_is_rejected(message: str) -> None:
    tools = [{"name": "other"}] if "describe" in message else []
    record = {"messages": REFUSED[message], "tools": tools}
    with pytest.raises(ConversationError, match=message):
        ChatMlRenderer(CODECS["qwen"], OPTIONS).render_record(record, "auto")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [USER | {"channel": "x"}, ANSWER]}, "it is in Harmony's format"),
        (
            {"messages": [USER, ANSWER], "reasoning_effort": "low"},
            "'reasoning_effort' is not supported",
        ),
        ({"messages": [USER, ANSWER], "tools": [{"name": "python"}]}, "Rename the function"),
    ],
)
def test_harmony_fields_are_rejected_in_chatml(record: Any, message: str) -> None:
    with pytest.raises(ConversationError, match=message):
        ChatMlRenderer(CODECS["qwen"], OPTIONS).render_record(record, "auto")


def test_long_conversation_is_rejected_or_truncated() -> None:
    record = {"messages": [USER, ANSWER]}
    codec = CODECS["qwen"]
    whole = rendered(record, codec)
    limit = len(whole.token_ids) - 1
    refusing = ChatMlRenderer(codec, RenderOptions("append", limit, "reject"))
    with pytest.raises(ConversationError, match=r"more than data\.max_tokens"):
        refusing.render_record(record, "messages")
    (cut,), _ = ChatMlRenderer(codec, RenderOptions("append", limit, "truncate")).render_record(
        record, "messages"
    )
    assert (
        cut.token_ids == whole.token_ids[:-1]
        and whole.token_ids[-1] == (codec.vocabulary.markup[IM_END])
    )


def test_other_processes_render_equal_samples(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": [USER, ANSWER]}) + "\n" for _ in range(3)))
    codec = ChatMl(tiny_vocabulary(600, "Hi? Yes."), ChatMlConfig())
    config = DataConfig.model_validate({"path": str(path), "workers": 1})
    with ConversationData(config, codec, LONG) as data:
        samples = data.stream(RejectionReport(lambda records: None, print)).take(1)
    assert samples is not None
    assert list(samples.token_ids) == rendered({"messages": [USER, ANSWER]}, codec).token_ids
