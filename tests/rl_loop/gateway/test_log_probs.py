"""Log-probs and token counts in answers, with the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from transformers import GptOssForCausalLM

from rl_loop.harmony.codec import Harmony, ParsedMessage
from tests.support.rl_loop.engines.models import plain_log_probs
from tests.support.rl_loop.gateway.chats import TOOLS, echo
from tests.support.rl_loop.gateway.policy import Script
from tests.support.rl_loop.gateway.scripted import talking
from tests.support.rl_loop.gateway.serving import Served, check_capture, serving

HI: list[Any] = [{"role": "user", "content": "Hi"}]
INCLUDE: Any = ["message.output_text.logprobs"]


async def chat(served: Served, **options: Any) -> Any:
    async with served.client(max_retries=0) as client:
        return await client.chat.completions.create(model="any", messages=HI, **options)


def test_log_probs_equal_a_plain_forward_pass(
    tiny: Harmony, model: GptOssForCausalLM, script: Script
) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            completion = await chat(served, logprobs=True)
            tokens = completion.choices[0].logprobs.content
            joined = b"".join(bytes(token.bytes) for token in tokens)
            assert joined.decode() == completion.choices[0].message.content == "Hello"

            sampled = script.says("Hello", thinks=True)
            exact = plain_log_probs(model, script.prompt("Hi") + sampled)
            # The last token of the turn is its end, and has no text.
            expected = exact[-1 - len(tokens) : -1]
            assert [token.logprob for token in tokens] == pytest.approx(expected, abs=1e-4)
            assert [token.top_logprobs for token in tokens] == [[]] * len(tokens)
            check_capture(served, served.trajectories())

            # An equal request without log-probs has another answer.
            assert (await chat(served)).choices[0].logprobs is None

    asyncio.run(run())


def test_streams_and_responses_have_the_same_log_probs(
    tiny: Harmony, model: GptOssForCausalLM
) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            plain = (await chat(served, logprobs=True)).choices[0].logprobs.content
            chunks = [chunk async for chunk in await chat(served, logprobs=True, stream=True)]
            listed = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
            assert [entry.content for entry in listed] == [plain]

            client = served.client()
            response = await client.responses.create(model="any", input="Hi", include=INCLUDE)
            [part] = response.output[-1].content
            expected = [(token.token, token.logprob) for token in plain]
            assert [(token.token, token.logprob) for token in part.logprobs] == expected
            async with client.responses.stream(model="any", input="Hi", include=INCLUDE) as stream:
                events = [event async for event in stream]
            [delta] = [event for event in events if event.type == "response.output_text.delta"]
            assert [(token.token, token.logprob) for token in delta.logprobs] == expected

    asyncio.run(run())


def test_part_of_a_character_is_written_as_bytes(tiny: Harmony) -> None:
    turn = tiny.render_assistant([ParsedMessage("final", None, None, "a🙂")])

    async def run() -> None:
        async with talking(tiny, [turn]) as talk:
            completion = await talk.client.chat.completions.create(
                model="any", messages=HI, logprobs=True
            )
            [choice] = completion.choices
            assert choice.logprobs is not None
            tokens = choice.logprobs.content or []
            assert b"".join(bytes(token.bytes or []) for token in tokens) == "a🙂".encode()
            parts = [token for token in tokens if len(token.bytes or []) < 4 and token.token != "a"]
            assert parts
            for token in parts:
                assert token.token == "".join(f"\\x{byte:02x}" for byte in token.bytes or [])

    asyncio.run(run())


def test_log_probs_end_before_the_stop_text_and_the_call(tiny: Harmony) -> None:
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    comment = "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"

    async def run() -> None:
        final = "<|channel|>final<|message|>one two three<|return|>"
        async with talking(tiny, [thought + comment + call, final]) as talk:
            for stop, text in ((None, "I add."), (" three", "one two")):
                completion = await talk.client.chat.completions.create(
                    model="any", messages=HI, tools=TOOLS, logprobs=True, stop=stop
                )
                [choice] = completion.choices
                assert choice.message.content == text
                assert choice.logprobs is not None
                tokens = choice.logprobs.content or []
                assert "".join(token.token for token in tokens) == text

    asyncio.run(run())


# ---- token counts


def test_usage_counts_cached_tokens(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            client = served.client()
            first = await client.chat.completions.create(model="any", messages=HI)
            messages = [*HI, echo(first.choices[0].message), {"role": "user", "content": "More"}]
            second = await client.chat.completions.create(model="any", messages=messages)
            for completion, call in zip((first, second), served.engine.answered, strict=True):
                usage = completion.usage
                assert usage is not None and usage.prompt_tokens_details is not None
                assert usage.prompt_tokens_details.cached_tokens == call.result.cached_tokens
            # The engine has computed all tokens of the first turn but its last one.
            turn = served.engine.answered[0]
            seen = len(turn.request.input_ids) + len(turn.result.output_ids)
            assert served.engine.answered[1].result.cached_tokens == seen - 1

            response = await client.responses.create(model="any", input=messages)
            assert response.usage is not None
            last = served.engine.answered[-1].result.cached_tokens
            assert response.usage.input_tokens_details.cached_tokens == last > 0

    asyncio.run(run())
