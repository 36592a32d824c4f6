"""Tools and requests for chats."""

from __future__ import annotations

from typing import Any

import openai

from tests.support.rl_loop.gateway.policy import ADD

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": ADD.parameters}},
]


async def say(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    completion = await client.chat.completions.create(model="any", messages=messages, **options)
    return completion.choices[0].message


def echo(message: Any) -> Any:
    """Return the message as agents send it back: the fields known to the client, no reasoning."""
    kept = message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    return kept
