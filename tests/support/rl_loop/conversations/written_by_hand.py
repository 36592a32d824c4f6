"""Conversations in all formats, and their expected samples.

The samples were written by hand from Harmony's documentation (github.com/openai/harmony,
docs/format.md). Tokens that have a loss are between « and »: those that inference would sample.
Prompts have no system message unless a case says otherwise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rl_loop.conversations.config import Format
from rl_loop.harmony.codec import PromptConfig
from tests.support.rl_loop.prompts import SHORT_PROMPT


@dataclass(frozen=True)
class Case:
    name: str
    form: Format
    record: dict[str, Any]
    samples: list[str]
    history: str = "harmony"
    prompt: PromptConfig = field(default_factory=lambda: SHORT_PROMPT)


def chat(*messages: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"messages": list(messages), **others}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **others}


def call(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def calls(*made: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(made), **others}


def told(text: str, call_id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def gpt(*turns: tuple[str, str], **others: Any) -> dict[str, Any]:
    return {"conversations": [{"from": who, "value": text} for who, text in turns], **others}


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how it is.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "description": "Tells the time."},
}

DESCRIBED = """\
<|start|>developer<|message|># Tools

## functions

namespace functions {

// Says how it is.
type weather = (_: {
// Where.
city: string,
}) => any;

} // namespace functions<|end|>"""

BOTH_DESCRIBED = """\
<|start|>developer<|message|># Instructions

Be kind.

# Tools

## functions

namespace functions {

// Says how it is.
type weather = (_: {
// Where.
city: string,
}) => any;

// Tells the time.
type clock = () => any;

} // namespace functions<|end|>"""

SYSTEM = """\
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06

Reasoning: low

# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"""

SYSTEM_WITH_FUNCTIONS = """\
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06

Reasoning: medium

# Valid channels: analysis, commentary, final. Channel must be included for every message.
Calls to these tools must go to the commentary channel: 'functions'.<|end|>"""

SYSTEM_OF_RECORD = """\
<|start|>system<|message|>You are a clerk.
Knowledge cutoff: 2023-01
Current date: 2025-06-28

Reasoning: high

# Valid channels: analysis, final. Channel must be included for every message.<|end|>"""

RECORD_SYSTEM = {
    "role": "system",
    "content": [
        {
            "type": "system_content",
            "model_identity": "You are a clerk.",
            "knowledge_cutoff": "2023-01",
            "conversation_start_date": "2025-06-28",
            "reasoning_effort": "High",
            "channel_config": {"valid_channels": ["analysis", "final"], "channel_required": True},
        }
    ],
}
RECORD_DEVELOPER = {
    "role": "developer",
    "content": [
        {
            "type": "developer_content",
            "tools": {"functions": {"name": "functions", "tools": [WEATHER["function"]]}},
        }
    ],
}

CASES = [
    Case(
        "one answer",
        "messages",
        chat(user("Hi"), said("Hello.")),
        [
            "<|start|>user<|message|>Hi<|end|><|start|>assistant"
            "«<|channel|>final<|message|>Hello.<|return|>»"
        ],
    ),
    Case(
        "a chat's system message is the developer's",
        "messages",
        chat({"role": "system", "content": "Be brief."}, user("Hi"), said("Yes?")),
        [
            "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
            "<|start|>user<|message|>Hi<|end|><|start|>assistant"
            "«<|channel|>final<|message|>Yes?<|return|>»"
        ],
    ),
    Case(
        "thoughts lead to the answer, and both are sampled with what is between them",
        "messages",
        chat(user("2+2?"), said("4", thinking="Two and two.")),
        [
            "<|start|>user<|message|>2+2?<|end|><|start|>assistant"
            "«<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant"
            "<|channel|>final<|message|>4<|return|>»"
        ],
    ),
    Case(
        "a later turn sees an earlier one without its analysis, and <|end|> behind its answer",
        "messages",
        chat(user("2+2?"), said("4", thinking="Easy."), user("3+3?"), said("6", thinking="Also.")),
        [
            "<|start|>user<|message|>2+2?<|end|><|start|>assistant"
            "«<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant"
            "<|channel|>final<|message|>4<|return|>»",
            "<|start|>user<|message|>2+2?<|end|>"
            "<|start|>assistant<|channel|>final<|message|>4<|end|>"
            "<|start|>user<|message|>3+3?<|end|><|start|>assistant"
            "«<|channel|>analysis<|message|>Also.<|end|><|start|>assistant"
            "<|channel|>final<|message|>6<|return|>»",
        ],
    ),
    Case(
        "append: one sample, all of it as it was sampled",
        "messages",
        chat(user("2+2?"), said("4", thinking="Easy."), user("3+3?"), said("6")),
        [
            "<|start|>user<|message|>2+2?<|end|><|start|>assistant"
            "«<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant"
            "<|channel|>final<|message|>4<|return|>»"
            "<|start|>user<|message|>3+3?<|end|><|start|>assistant"
            "«<|channel|>final<|message|>6<|return|>»"
        ],
        history="append",
    ),
    Case(
        "a call ends a turn with <|call|>, and the answer of the tool is not learned",
        "messages",
        chat(
            user("Rome?"),
            calls(call("weather", '{"city": "Rome"}')),
            told("sunny"),
            said("It is sunny."),
            tools=[WEATHER],
        ),
        [
            DESCRIBED + "<|start|>user<|message|>Rome?<|end|><|start|>assistant"
            '«<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>»'
            "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>sunny<|end|>"
            "<|start|>assistant«<|channel|>final<|message|>It is sunny.<|return|>»"
        ],
    ),
    Case(
        "arguments that are an object are written as JSON",
        "messages",
        chat(user("Oslo?"), calls(call("weather", {"city": "Ås", "days": [1, 2]}))),
        [
            "<|start|>user<|message|>Oslo?<|end|><|start|>assistant"
            "«<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
            '{"city": "Ås", "days": [1, 2]}<|call|>»'
        ],
    ),
    Case(
        "text before a call is a preamble",
        "messages",
        chat(
            user("Time?"),
            {**calls(call("clock", "")), "content": "I look."},
            told("noon"),
            said("Noon."),
        ),
        [
            "<|start|>user<|message|>Time?<|end|><|start|>assistant"
            "«<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>»"
            "<|start|>functions.clock to=assistant<|channel|>commentary<|message|>noon<|end|>"
            "<|start|>assistant«<|channel|>final<|message|>Noon.<|return|>»"
        ],
    ),
    Case(
        "thoughts before a call stay until the answer is given",
        "messages",
        chat(
            user("Time?"),
            calls(call("clock", "{}"), thinking="A clock helps."),
            told("noon"),
            said("Noon.", thinking="It says noon."),
        ),
        [
            "<|start|>user<|message|>Time?<|end|><|start|>assistant"
            "«<|channel|>analysis<|message|>A clock helps.<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>»"
            "<|start|>functions.clock to=assistant<|channel|>commentary<|message|>noon<|end|>"
            "<|start|>assistant«<|channel|>analysis<|message|>It says noon.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Noon.<|return|>»"
        ],
    ),
    Case(
        "history has calls with the recipient in the role, and no analysis",
        "messages",
        chat(
            user("Time?"),
            calls(call("clock", "{}"), thinking="A clock helps."),
            told("noon"),
            said("Noon.", thinking="It says noon."),
            user("Thanks"),
            said("Bye."),
        ),
        [
            "<|start|>user<|message|>Time?<|end|><|start|>assistant"
            "«<|channel|>analysis<|message|>A clock helps.<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>»"
            "<|start|>functions.clock to=assistant<|channel|>commentary<|message|>noon<|end|>"
            "<|start|>assistant«<|channel|>analysis<|message|>It says noon.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Noon.<|return|>»",
            "<|start|>user<|message|>Time?<|end|>"
            "<|start|>assistant to=functions.clock<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
            "<|start|>functions.clock to=assistant<|channel|>commentary<|message|>noon<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Noon.<|end|>"
            "<|start|>user<|message|>Thanks<|end|><|start|>assistant"
            "«<|channel|>final<|message|>Bye.<|return|>»",
        ],
    ),
    Case(
        "calls that were made together are made one after the other, answers by their ids",
        "messages",
        chat(
            user("Both?"),
            calls(
                call("clock", "{}", "a"), call("weather", '{"city": "Bonn"}', "b"), thinking="Two."
            ),
            told("rain", "b"),
            told("noon", "a"),
            said("Rain at noon."),
        ),
        [
            "<|start|>user<|message|>Both?<|end|><|start|>assistant"
            "«<|channel|>analysis<|message|>Two.<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>»"
            "<|start|>functions.clock to=assistant<|channel|>commentary<|message|>noon<|end|>"
            "<|start|>assistant"
            '«<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}<|call|>»'
            "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>rain<|end|>"
            "<|start|>assistant«<|channel|>final<|message|>Rain at noon.<|return|>»"
        ],
    ),
    Case(
        "a message of weight 0 is context",
        "messages",
        chat(user("a"), said("b", weight=0), user("c"), said("d", weight=1)),
        [
            "<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"
            "<|start|>user<|message|>c<|end|><|start|>assistant«<|channel|>final<|message|>d<|return|>»"
        ],
        history="append",
    ),
    Case(
        "a turn of weight 0 is no sample of its own",
        "messages",
        chat(user("a"), said("b", weight=0), user("c"), said("d")),
        [
            "<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|end|>"
            "<|start|>user<|message|>c<|end|><|start|>assistant«<|channel|>final<|message|>d<|return|>»"
        ],
    ),
    Case(
        "of a turn that is learned in part, the call alone",
        "messages",
        chat(user("a"), calls(call("clock", "{}")), told("noon"), said("No.", weight=0)),
        [
            "<|start|>user<|message|>a<|end|><|start|>assistant"
            "«<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>»"
            "<|start|>functions.clock to=assistant<|channel|>commentary<|message|>noon<|end|>"
            "<|start|>assistant<|channel|>final<|message|>No.<|return|>"
        ],
    ),
    Case(
        "an answer that was cut off has no stop token",
        "messages",
        chat(user("Tell"), said("Once upon", finish_reason="length")),
        [
            "<|start|>user<|message|>Tell<|end|><|start|>assistant"
            "«<|channel|>final<|message|>Once upon»"
        ],
    ),
    Case(
        "thoughts that were cut off have none either",
        "messages",
        chat(
            user("Tell"),
            {"role": "assistant", "thinking": "Well, there", "finish_reason": "length"},
        ),
        [
            "<|start|>user<|message|>Tell<|end|><|start|>assistant"
            "«<|channel|>analysis<|message|>Well, there»"
        ],
    ),
    Case(
        "parts of text are one text",
        "messages",
        chat(
            user([{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]),
            said("Hello."),
        ),
        [
            "<|start|>user<|message|>Hi there<|end|><|start|>assistant"
            "«<|channel|>final<|message|>Hello.<|return|>»"
        ],
    ),
    Case(
        "servers call thoughts reasoning_content, and null says nothing",
        "messages",
        chat(
            {"role": "user", "content": "Hi", "tool_calls": None, "name": None},
            said("Hello.", reasoning_content="Greet.", tool_calls=None, weight=None),
        ),
        [
            "<|start|>user<|message|>Hi<|end|><|start|>assistant"
            "«<|channel|>analysis<|message|>Greet.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Hello.<|return|>»"
        ],
    ),
    Case(
        "Hugging Face's thoughts are null where there are none",
        "messages",
        chat(
            {"role": "system", "content": "reasoning language: French", "thinking": None},
            {"role": "user", "content": "Hi", "thinking": None},
            {"role": "assistant", "content": "Hello.", "thinking": "Bonjour."},
            reasoning_language="French",
        ),
        [
            "<|start|>developer<|message|># Instructions\n\nreasoning language: French<|end|>"
            "<|start|>user<|message|>Hi<|end|><|start|>assistant"
            "«<|channel|>analysis<|message|>Bonjour.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Hello.<|return|>»"
        ],
    ),
    Case(
        "the effort of a record is in the system message",
        "messages",
        chat(user("Hi"), said("Hello."), reasoning_effort="low"),
        [
            SYSTEM + "<|start|>user<|message|>Hi<|end|><|start|>assistant"
            "«<|channel|>final<|message|>Hello.<|return|>»"
        ],
        prompt=PromptConfig(),
    ),
    Case(
        "the system message says where functions are called; instructions and tools are one message",
        "messages",
        chat(
            {"role": "developer", "content": "Be kind."},
            user("Hi"),
            said("Hello."),
            tools=[WEATHER, CLOCK],
        ),
        [
            SYSTEM_WITH_FUNCTIONS
            + BOTH_DESCRIBED
            + "<|start|>user<|message|>Hi<|end|><|start|>assistant"
            "«<|channel|>final<|message|>Hello.<|return|>»"
        ],
        prompt=PromptConfig(),
    ),
    Case(
        "the developer may speak later, too",
        "messages",
        chat(
            user("a"),
            said("b"),
            {"role": "system", "content": "Now in German."},
            user("c"),
            said("d"),
        ),
        [
            "<|start|>user<|message|>a<|end|><|start|>assistant«<|channel|>final<|message|>b<|return|>»"
            "<|start|>developer<|message|># Instructions\n\nNow in German.<|end|>"
            "<|start|>user<|message|>c<|end|><|start|>assistant«<|channel|>final<|message|>d<|return|>»"
        ],
        history="append",
    ),
    Case(
        "ShareGPT",
        "sharegpt",
        gpt(("human", "Hi"), ("gpt", "Hello.")),
        [
            "<|start|>user<|message|>Hi<|end|><|start|>assistant"
            "«<|channel|>final<|message|>Hello.<|return|>»"
        ],
    ),
    Case(
        "ShareGPT with two turns and instructions",
        "sharegpt",
        gpt(("system", "Be kind."), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")),
        [
            "<|start|>developer<|message|># Instructions\n\nBe kind.<|end|>"
            "<|start|>user<|message|>a<|end|><|start|>assistant«<|channel|>final<|message|>b<|return|>»",
            "<|start|>developer<|message|># Instructions\n\nBe kind.<|end|>"
            "<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|end|>"
            "<|start|>user<|message|>c<|end|><|start|>assistant«<|channel|>final<|message|>d<|return|>»",
        ],
    ),
    Case(
        "ShareGPT with tools as text, a call and what was observed",
        "sharegpt",
        gpt(
            ("human", "Rome?"),
            ("function_call", '{"name": "weather", "arguments": {"city": "Rome"}}'),
            ("observation", "sunny"),
            ("gpt", "It is sunny."),
            tools=json.dumps([WEATHER["function"]]),
        ),
        [
            DESCRIBED + "<|start|>user<|message|>Rome?<|end|><|start|>assistant"
            '«<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>»'
            "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>sunny<|end|>"
            "<|start|>assistant«<|channel|>final<|message|>It is sunny.<|return|>»"
        ],
    ),
    Case(
        "Harmony's own messages",
        "harmony",
        chat(
            user("Hi"),
            said("Greet.", channel="analysis"),
            said("Hello.", channel="final"),
        ),
        [
            "<|start|>user<|message|>Hi<|end|><|start|>assistant"
            "«<|channel|>analysis<|message|>Greet.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Hello.<|return|>»"
        ],
    ),
    Case(
        "the system message of a record replaces that of the run",
        "harmony",
        chat(RECORD_SYSTEM, user("Hi"), said("Hello.", channel="final")),
        [
            SYSTEM_OF_RECORD + "<|start|>user<|message|>Hi<|end|><|start|>assistant"
            "«<|channel|>final<|message|>Hello.<|return|>»"
        ],
        prompt=PromptConfig(),
    ),
    Case(
        "functions that Harmony's developer describes, and authors with names",
        "harmony",
        chat(
            RECORD_DEVELOPER,
            {"author": {"role": "user"}, "content": [{"type": "text", "text": "Rome?"}]},
            said(
                "{}",
                channel="commentary",
                recipient="functions.weather",
                content_type="<|constrain|>json",
            ),
            {
                "author": {"role": "tool", "name": "functions.weather"},
                "recipient": "assistant",
                "channel": "commentary",
                "content": [{"type": "text", "text": "sunny"}],
            },
            said("It is sunny.", channel="final"),
        ),
        [
            DESCRIBED + "<|start|>user<|message|>Rome?<|end|><|start|>assistant"
            "«<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}<|call|>»"
            "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>sunny<|end|>"
            "<|start|>assistant«<|channel|>final<|message|>It is sunny.<|return|>»"
        ],
    ),
    Case(
        "Python is called on the analysis channel, which an answer ends",
        "harmony",
        chat(
            user("2**9?"),
            said("2**9", channel="analysis", recipient="python", content_type="code"),
            {"role": "tool", "name": "python", "channel": "analysis", "content": "512"},
            said("512", channel="final"),
            user("Sure?"),
            said("Yes.", channel="final"),
        ),
        [
            "<|start|>user<|message|>2**9?<|end|><|start|>assistant"
            "«<|channel|>analysis to=python code<|message|>2**9<|call|>»"
            "<|start|>python to=assistant<|channel|>analysis<|message|>512<|end|>"
            "<|start|>assistant«<|channel|>final<|message|>512<|return|>»",
            "<|start|>user<|message|>2**9?<|end|>"
            "<|start|>assistant<|channel|>final<|message|>512<|end|>"
            "<|start|>user<|message|>Sure?<|end|><|start|>assistant"
            "«<|channel|>final<|message|>Yes.<|return|>»",
        ],
    ),
    Case(
        "structured output names its type",
        "harmony",
        chat(user("JSON?"), said('{"a": 1}', channel="final", content_type="<|constrain|>json")),
        [
            "<|start|>user<|message|>JSON?<|end|><|start|>assistant"
            '«<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>»'
        ],
    ),
    Case(
        "what only looks like a special token is text",
        "messages",
        chat(user("Is a<|b|>c a token, or <|end?"), said("Neither, 🙂 <|.")),
        [
            "<|start|>user<|message|>Is a<|b|>c a token, or <|end?<|end|><|start|>assistant"
            "«<|channel|>final<|message|>Neither, 🙂 <|.<|return|>»"
        ],
    ),
]
