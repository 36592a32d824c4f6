"""Log-probs and token counts in answers, with the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
import torch
from transformers import GptOssForCausalLM

from rl_loop.engines.protocol import GenerateRequest, SamplingParams
from rl_loop.engines.sglang.client import ServerError
from rl_loop.engines.sglang.turn import ResponseReader, StreamedTurn
from rl_loop.harmony.codec import Harmony, ParsedMessage
from tests.support.rl_loop.engines.models import plain_log_probs
from tests.support.rl_loop.gateway.chats import TOOLS, echo
from tests.support.rl_loop.gateway.policy import Script
from tests.support.rl_loop.gateway.scripted import talking
from tests.support.rl_loop.gateway.serving import Served, check_capture, serving
from tests.support.rl_loop.sglang_protocol import SERVED_MODEL, VOCAB

HI: list[Any] = [{"role": "user", "content": "Hi"}]
INCLUDE: Any = ["message.output_text.logprobs"]


async def streamed(served: Served, **options: Any) -> list[Any]:
    """Return the entries of the chunks of a stream."""
    async with served.client(max_retries=0) as client:
        create: Any = client.chat.completions.create
        stream = await create(model="any", messages=HI, stream=True, **options)
        listed = [chunk.choices[0].logprobs async for chunk in stream]
    return [token for entry in listed if entry is not None for token in entry.content]


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
            retry = {"x-stainless-retry-count": "1"}
            assert await streamed(served, logprobs=True, extra_headers=retry) == plain
            # The prefix cache changes the last bits of later requests.
            check_listed(await streamed(served, logprobs=True), plain)

            client = served.client()
            response = await client.responses.create(model="any", input="Hi", include=INCLUDE)
            [part] = response.output[-1].content
            check_listed(part.logprobs, plain)
            async with client.responses.stream(model="any", input="Hi", include=INCLUDE) as stream:
                events = [event async for event in stream]
            deltas = [event for event in events if event.type == "response.output_text.delta"]
            tokens = [token for delta in deltas for token in delta.logprobs]
            check_listed(tokens, plain)

    asyncio.run(run())


def check_listed(tokens: list[Any], expected: list[Any]) -> None:
    """Check that tokens and log-probs of two answers are equal up to rounding."""
    assert [token.token for token in tokens] == [token.token for token in expected]
    values = [token.logprob for token in tokens]
    assert values == pytest.approx([token.logprob for token in expected], abs=1e-5)


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


# ---- most likely tokens


def likely_tokens(tokens: list[Any]) -> list[list[str]]:
    """Return each token and the most likely tokens of its position."""
    return [[token.token, *(entry.token for entry in token.top_logprobs)] for token in tokens]


def test_top_log_probs_equal_a_plain_forward_pass(
    tiny: Harmony, model: GptOssForCausalLM, script: Script
) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            completion = await chat(served, logprobs=True, top_logprobs=3)
            tokens = completion.choices[0].logprobs.content
            ids = script.prompt("Hi") + script.says("Hello", thinks=True)
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, -2 - len(tokens) : -2]
            values, likely = logits.float().log_softmax(-1).topk(3)
            for token, log_probs, others in zip(tokens, values, likely, strict=True):
                listed = token.top_logprobs
                assert [entry.logprob for entry in listed] == pytest.approx(
                    log_probs.tolist(), abs=1e-4
                )
                texts = [bytes(entry.bytes) for entry in listed]
                assert texts == [tiny.vocabulary.token_bytes(other) for other in others.tolist()]
                # Greedy sampling takes the most likely token.
                assert (listed[0].token, listed[0].logprob) == (token.token, token.logprob)

            # An equal request without them has another answer, and streams have equal ones.
            assert (await chat(served, logprobs=True)).choices[0].logprobs.content != tokens
            again = await streamed(served, logprobs=True, top_logprobs=3)
            assert likely_tokens(again) == likely_tokens(tokens)

    asyncio.run(run())


def test_long_lists_of_log_probs_are_complete(
    tiny: Harmony, model: GptOssForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            short = await chat(served, logprobs=True, top_logprobs=20)
            for module in ("session", "send"):
                monkeypatch.setattr(f"rl_loop.gateway.{module}.SHORT_LISTS", 0)
            long = await chat(served, logprobs=True, top_logprobs=20, seed=1)
            expected = likely_tokens(short.choices[0].logprobs.content)
            assert likely_tokens(long.choices[0].logprobs.content) == expected
            assert [len(row) for row in expected] == [21] * len(expected)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("chat/completions", {"messages": HI, "top_logprobs": 2}),
        ("chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 21}),
        ("chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": -1}),
        ("responses", {"input": "Hi", "top_logprobs": 2}),
        ("responses", {"input": "Hi", "include": INCLUDE, "top_logprobs": 21}),
    ],
)
def test_wrong_number_of_top_log_probs_is_rejected(
    tiny: Harmony, dialect: str, body: dict[str, Any]
) -> None:
    async def run() -> None:
        async with talking(tiny, []) as talk:
            with pytest.raises(openai.BadRequestError) as refusal:
                await talk.client.post(f"/{dialect}", cast_to=object, body=body)
            assert refusal.value.param == "top_logprobs"
            assert talk.policy.requests == []

    asyncio.run(run())


def test_engine_without_top_log_probs_is_reported(tiny: Harmony) -> None:
    turn = tiny.render_assistant([ParsedMessage("final", None, None, "a")])

    async def run() -> None:
        async with talking(tiny, [turn] * 2) as talk:
            create: Any = talk.client.chat.completions.create
            with pytest.raises(openai.BadRequestError, match="log-probs of sampled tokens only"):
                await create(model="any", messages=HI, logprobs=True, top_logprobs=2)
            # The session continues.
            assert (await create(model="any", messages=HI)).choices[0].message.content == "a"

    asyncio.run(run())


async def check_sglang_chunks() -> None:
    sampling = SamplingParams(4)
    request = GenerateRequest("e/0/0", [1, 2], sampling, top_log_probs=2, on_tokens=list)
    turn = StreamedTurn(request)
    body = turn.next_body()
    assert body["top_logprobs_num"] == 2
    assert body["sampling_params"]["stream_interval"] == 1  # type: ignore[index]
    reader = ResponseReader(SERVED_MODEL)

    def chunk(rows: list[Any]) -> dict[str, Any]:
        meta = {
            "weight_version": "1",
            "finish_reason": None,
            "completion_tokens": 2,
            "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None]],
            "output_top_logprobs": rows,
        }
        return {"output_ids": [7, 8], "meta_info": meta}

    rows = [[[-0.5, 7, None], [-2.0, 9, None]], [[-1.0, 3, None], [-1.5, 8, None]]]
    read = reader.read(chunk(rows), turn, 0, "http://s", 1)
    assert read.top_log_probs == [[(7, -0.5), (9, -2.0)], [(3, -1.0), (8, -1.5)]]
    wrong: list[list[Any]] = [
        rows[:1],
        [rows[0], rows[1][:1]],
        [rows[0], [[-1.0, VOCAB, None], [-1.5, 8, None]]],
        [rows[0], [[0.5, 3, None], [-1.5, 8, None]]],
        [rows[0], None],
    ]
    for bad in wrong:
        with pytest.raises(ServerError):
            reader.read(chunk(bad), turn, 0, "http://s", 1)


def test_sglang_chunk_has_the_requested_tokens() -> None:
    # A turn needs a running event loop.
    asyncio.run(check_sglang_chunks())


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
