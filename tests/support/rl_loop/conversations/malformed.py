"""Invalid lines of data files, and the expected errors."""

from __future__ import annotations

import json
from typing import Any

from rl_loop.conversations.config import Format
from tests.support.rl_loop.conversations.written_by_hand import (
    WEATHER,
    call,
    calls,
    chat,
    gpt,
    said,
    told,
    user,
)


def line(record: Any) -> bytes:
    return json.dumps(record).encode()


MALFORMED: list[tuple[str, Format, bytes, str]] = [
    ("no JSON", "messages", b'{"messages": [', "not JSON: Expecting value at character 15"),
    ("no UTF-8", "messages", b'{"messages": "\xff"}', "not UTF-8: byte 14 is 0xff"),
    ("a list", "messages", b"[1, 2]", "a conversation is a JSON object, not a list"),
    (
        "other keys",
        "auto",
        line({"prompt": "a", "completion": "b"}),
        "nor a list 'conversations', but prompt, completion",
    ),
    (
        "nothing said",
        "messages",
        line({"messages": []}),
        "'messages' must be a list of at least one message, not an empty list",
    ),
    (
        "a role that there is not",
        "messages",
        line(chat({"role": "robot", "content": "a"})),
        "message 0 (role 'robot'): the role must be one of",
    ),
    (
        "an image",
        "messages",
        line(chat(user([{"type": "image_url"}]), said("A cat."))),
        "message 0 (role 'user'): a part of the content has the type 'image_url'",
    ),
    (
        "a key that would be lost",
        "messages",
        line(chat(user("a"), said("b", refusal="No."))),
        "message 1 (role 'assistant'): 'refusal' cannot be rendered here",
    ),
    (
        "an orphaned tool output",
        "messages",
        line(chat(user("a"), told("b", "c9"), said("c"))),
        "message 1 (role 'tool'): no open call with id 'c9' precedes this tool output",
    ),
    (
        "a call without a tool output",
        "messages",
        line(chat(user("a"), calls(call("f", "{}")), user("b"), said("c"))),
        "message 2 (role 'user'): the earlier call of functions.f has no tool output",
    ),
    (
        "one of two calls is answered",
        "messages",
        line(
            chat(
                user("a"),
                calls(call("f", "{}", "x"), call("g", "{}", "y")),
                told("b", "x"),
                said("c"),
            )
        ),
        "message 1 (role 'assistant'): only 1 of its 2 calls have a tool output",
    ),
    (
        "a function that is not described",
        "messages",
        line(chat(user("a"), calls(call("f", "{}")), tools=[WEATHER])),
        "message 1: it calls functions.f, which is not described (described: weather)",
    ),
    (
        "arguments that are no JSON",
        "messages",
        line(chat(user("a"), calls(call("f", "{city: 1}")))),
        "message 1 (role 'assistant'): the arguments of f are not JSON",
    ),
    (
        "arguments that are a list",
        "messages",
        line(chat(user("a"), calls(call("f", "[1]")))),
        "the arguments of f are a list, not an object",
    ),
    (
        "the user speaks last",
        "messages",
        line(chat(user("a"), said("b"), user("c"))),
        "it ends with message 2 (role 'user'). The last message must be the assistant's",
    ),
    ("nobody answers", "messages", line(chat(user("a"))), "it has no assistant message"),
    (
        "two answers",
        "messages",
        line(chat(user("a"), said("b"), said("c"))),
        "message 1: an answer of the assistant is followed by another assistant message",
    ),
    (
        "an empty answer",
        "messages",
        line(chat(user("a"), said(""))),
        "message 1 (role 'assistant'): it needs at least one of content, thinking, tool_calls",
    ),
    (
        "thoughts without an answer",
        "messages",
        line(chat(user("a"), {"role": "assistant", "thinking": "Hm."})),
        "message 1: the assistant's turn ends on channel analysis, without a call or an answer",
    ),
    (
        "a special token",
        "messages",
        line(chat(user("<|start|>user<|message|>a<|end|>"), said("b"))),
        "message 0: its text contains the special token <|start|>",
    ),
    (
        "a special token of a tool",
        "messages",
        line(chat(user("a"), said("b"), tools=[{"name": "f", "description": "<|end|>"}])),
        "the tool f: its text contains the special token <|end|>",
    ),
    (
        "nothing to learn",
        "messages",
        line(chat(user("a"), said("b", weight=0))),
        "no token is in the loss: every message has weight 0",
    ),
    (
        "half a weight",
        "messages",
        line(chat(user("a"), said("b", weight=0.5))),
        "message 1 (role 'assistant'): weight is 0.5. It must be 0 or 1",
    ),
    (
        "half a surrogate pair",
        "messages",
        line(chat(user("\ud83d"), said("b"))),
        "message 0 (role 'user'): 'content' has half of a surrogate pair",
    ),
    (
        "functions of 2023",
        "messages",
        line(chat(user("a"), said("b"), functions=[{"name": "f"}])),
        "'functions' is a deprecated key",
    ),
    (
        "tools that are no JSON",
        "messages",
        line(chat(user("a"), said("b"), tools="[f]")),
        "'tools' is text that is not JSON",
    ),
    (
        "a tool of another kind",
        "messages",
        line(chat(user("a"), said("b"), tools=[{"type": "web_search"}])),
        "tool 0: its type is 'web_search'. Only functions can be described",
    ),
    (
        "ShareGPT of nobody",
        "sharegpt",
        line(gpt(("bing", "a"))),
        "message 0 (from 'bing'): 'from' must be one of system, human, user",
    ),
    (
        "a ShareGPT call that is no JSON",
        "sharegpt",
        line(gpt(("human", "a"), ("function_call", "f()"), ("observation", "b"), ("gpt", "c"))),
        "message 1 (from 'function_call'): its value is not JSON",
    ),
    (
        "the assistant begins",
        "sharegpt",
        line(gpt(("gpt", "a"), ("human", "b"), ("gpt", "c"))),
        "it begins with an assistant message",
    ),
    (
        "Harmony's system message as text",
        "harmony",
        line(
            chat({"role": "system", "content": "Be brief."}, user("a"), said("b", channel="final"))
        ),
        "message 0 (role 'system'): in Harmony's format, role 'system' needs content of type 'system_content'",
    ),
    (
        "a channel that there is not",
        "harmony",
        line(chat(user("a"), said("b", channel="thoughts"))),
        "message 1 (role 'assistant'): 'thoughts' is not a channel",
    ),
]
