"""All variants of the official client: two APIs, plain and streamed, synchronous and async."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from transformers import GptOssForCausalLM

from rl_loop.harmony.codec import Harmony
from tests.support.rl_loop.gateway.policy import Script
from tests.support.rl_loop.gateway.serving import Served, check_capture, serving

HI: dict[str, dict[str, Any]] = {
    "chat": {"model": "any", "messages": [{"role": "user", "content": "Hi"}]},
    "responses": {"model": "any", "input": "Hi"},
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_official_client_gets_its_answer_and_tokens_are_captured(
    tiny: Harmony,
    model: GptOssForCausalLM,
    script: Script,
    dialect: str,
    stream: bool,
    is_async: bool,
) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            answer = await (ask if is_async else ask_in_a_thread)(served, dialect, stream)
            assert answer == "Hello"
            [trajectory] = served.trajectories()
            expected = script.prompt("Hi") + script.says("Hello", thinks=True)
            assert trajectory.token_ids.tolist() == expected
            check_capture(served, [trajectory])

    asyncio.run(run())


async def ask(served: Served, dialect: str, stream: bool) -> str:
    async with served.client() as client:
        create = client.chat.completions.create if dialect == "chat" else client.responses.create
        given = await create(**HI[dialect], stream=stream)
        if stream:
            return "".join([read_piece(event) async for event in given])
        return read_text(given)


async def ask_in_a_thread(served: Served, dialect: str, stream: bool) -> str:
    def ask() -> str:
        with served.sync_client() as client:
            create = (
                client.chat.completions.create if dialect == "chat" else client.responses.create
            )
            given = create(**HI[dialect], stream=stream)
            if stream:
                return "".join([read_piece(event) for event in given])
            return read_text(given)

    return await asyncio.to_thread(ask)


def read_text(answer: Any) -> str:
    if isinstance(answer, openai.types.responses.Response):
        return answer.output_text
    return str(answer.choices[0].message.content)


def read_piece(event: Any) -> str:
    """Return the text that an event of a stream adds to the answer."""
    if isinstance(event, openai.types.chat.ChatCompletionChunk):
        return "".join(choice.delta.content or "" for choice in event.choices)
    return event.delta if event.type == "response.output_text.delta" else ""
