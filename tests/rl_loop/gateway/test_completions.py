"""Completions: text and token ids without a chat format, and their training data."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import openai
import pytest
from transformers import GptOssForCausalLM

from rl_loop.harmony.codec import Harmony, PromptConfig
from rl_loop.harmony.vocabulary import GptOssVocabulary
from tests.support.processor_speed import slowness
from tests.support.rl_loop.gateway.policy import Script
from tests.support.rl_loop.gateway.scripted import talking
from tests.support.rl_loop.gateway.serving import SETTINGS, check_capture, serving

RETRY = {"x-stainless-retry-count": "1"}


async def complete(client: openai.AsyncOpenAI, prompt: Any, **options: Any) -> Any:
    return await client.completions.create(
        model="any", prompt=prompt, max_tokens=options.pop("max_tokens", 200), **options
    )


# ---- with the embedded engine


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_continued_text_is_one_exact_sequence(
    tiny: Harmony, model: GptOssForCausalLM, script: Script, kind: str
) -> None:
    hi, more = script.prompt("Hi"), script.hears("More")
    hello, bye = script.says("Hello", thinks=True), script.says("Bye")

    async def run() -> None:
        async with serving(tiny, model) as served, served.client() as client:
            if kind == "text":
                first = await complete(client, tiny.decode(hi))
                # The client does not see the token that ended the turn, and writes it itself.
                assert first.choices[0].text == tiny.decode(hello[:-1])
                prompt: Any = tiny.decode(hi) + first.choices[0].text + "<|return|>"
                prompt += tiny.decode(more)
            else:
                first = await complete(client, hi, extra_body={"return_token_ids": True})
                assert first.choices[0].prompt_token_ids == hi
                assert first.choices[0].token_ids == hello
                prompt = hi + hello + more
            second = await complete(client, prompt)
            assert second.choices[0].text == tiny.decode(bye[:-1])
            assert second.choices[0].finish_reason == "stop"
            assert second.usage.prompt_tokens == len(hi + hello + more)
            assert second.usage.completion_tokens == len(bye)
            # All tokens before the new ones but the last, which the engine had not processed.
            cached = second.usage.prompt_tokens_details.cached_tokens
            assert cached == len(hi + hello) - 1

            [trajectory] = served.trajectories()
            assert trajectory.token_ids.tolist() == hi + hello + more + bye
            assert trajectory.loss_mask.sum() == len(hello + bye)
            check_capture(served, [trajectory])

    asyncio.run(run())


def test_text_without_the_end_token_begins_another_sequence(
    tiny: Harmony, model: GptOssForCausalLM, script: Script
) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served, served.client() as client:
            prompt = tiny.decode(script.prompt("Hi"))
            first = await complete(client, prompt)
            await complete(client, prompt + first.choices[0].text + " and", max_tokens=1)
            one, two = served.trajectories()
            kept = one.token_ids[:-1].tolist()
            assert two.token_ids[: len(kept)].tolist() == kept
            assert tiny.decode(two.token_ids[len(kept) : -1].tolist()) == " and"
            assert (one.loss_mask.sum(), two.loss_mask.sum()) == (
                first.usage.completion_tokens,
                1,
            )
            check_capture(served, [one, two])

    asyncio.run(run())


def test_truncated_completion_continues_without_new_text(
    tiny: Harmony, model: GptOssForCausalLM, script: Script
) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served, served.client() as client:
            prompt = tiny.decode(script.prompt("Hi"))
            first = await complete(client, prompt, max_tokens=3)
            assert first.choices[0].finish_reason == "length"
            second = await complete(client, prompt + first.choices[0].text)
            hello = script.says("Hello", thinks=True)
            assert first.choices[0].text + second.choices[0].text == tiny.decode(hello[:-1])
            [trajectory] = served.trajectories()
            assert trajectory.token_ids.tolist() == script.prompt("Hi") + hello
            assert [turn.role for turn in trajectory.turns] == ["prompt", "assistant", "assistant"]
            trajectory.validate()

    asyncio.run(run())


def test_prompts_and_choices_are_answered_in_order(
    tiny: Harmony, model: GptOssForCausalLM, script: Script
) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served, served.client() as client:
            prompts = [script.prompt("Hi"), script.prompt("Count")]
            answer = await complete(client, prompts, n=2, max_tokens=2, logprobs=0)
            assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
            begins = [
                tiny.decode(turn[:2]) for turn in (script.says("", thinks=True), script.says(""))
            ]
            assert [choice.text for choice in answer.choices] == [
                text for text in begins for _ in range(2)
            ]
            assert answer.usage.prompt_tokens == sum(map(len, prompts))
            assert answer.usage.completion_tokens == 8
            assert answer.choices[3].logprobs.top_logprobs is None
            assert len(served.trajectories()) == 4

    asyncio.run(run())


@pytest.mark.parametrize("stop", [None, "Hel"])
def test_streamed_chunks_form_the_plain_answer(
    tiny: Harmony, model: GptOssForCausalLM, script: Script, stop: str | None
) -> None:
    serving_settings = replace(SETTINGS, is_episode=False)

    async def run() -> None:
        async with serving(tiny, model, serving_settings) as served, served.client() as client:
            asked = {"prompt": tiny.decode(script.prompt("Hi")), "stop": stop, "logprobs": 1}
            plain = (await complete(client, **asked)).choices[0]
            stream = await complete(
                client, **asked, stream=True, stream_options={"include_usage": True}
            )
            *chunks, last = [chunk async for chunk in stream]
            assert last.choices == [] and last.usage.completion_tokens > 0
            choices = [chunk.choices[0] for chunk in chunks]
            assert len(choices) > 3
            assert "".join(choice.text for choice in choices) == plain.text
            assert choices[-1].finish_reason == plain.finish_reason == "stop"
            listed = [choice.logprobs for choice in choices if choice.logprobs is not None]
            joined = {
                name: [value for entry in listed for value in getattr(entry, name)]
                for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            }
            assert joined["tokens"] == plain.logprobs.tokens
            assert joined["text_offset"] == plain.logprobs.text_offset
            # The second request finds its prompt in the cache, which changes the last bits.
            assert joined["token_logprobs"] == pytest.approx(
                plain.logprobs.token_logprobs, abs=1e-4
            )
            assert [*map(list, joined["top_logprobs"])] == [*map(list, plain.logprobs.top_logprobs)]
            for token, offset in zip(joined["tokens"], joined["text_offset"], strict=True):
                assert plain.text[offset:].startswith(token)
            assert plain.text.endswith("<|message|>" if stop else "Hello")

    asyncio.run(run())


# ---- with a scripted policy


def test_sampled_tokens_are_not_tokenized_again() -> None:
    """The policy writes single bytes, which no tokenizer would choose, and half of a character."""
    codec = Harmony(GptOssVocabulary(), PromptConfig())
    odd = [token for byte in "héllo".encode() for token in _token_of_byte(codec, byte)]
    cut = [*odd, *_token_of_byte(codec, "é".encode()[0])]
    end = list(codec.stop_token_ids[:1])

    async def run() -> None:
        async with talking(codec, [odd, cut + end, end]) as talk:
            # Truncated by the limit: the script has no end token.
            first = await complete(talk.client, "Say: ", max_tokens=len(odd))
            assert first.choices[0].text == "héllo"
            second = await complete(talk.client, "Say: héllo. Again: ")
            assert second.choices[0].text == "héllo\ufffd"
            text = "Say: héllo. Again: héllo\ufffd<|return|>!"
            await complete(talk.client, text)
            shown = talk.policy.requests[-1].input_ids
            before = codec.vocabulary.encode_text("Say: ")
            between = codec.vocabulary.encode_text(". Again: ")
            rest = codec.vocabulary.encode_text("!")
            assert shown == before + odd + between + cut + end + rest

    asyncio.run(run())


def _token_of_byte(codec: Harmony, byte: int) -> list[int]:
    return [token for token in range(256) if codec.vocabulary.token_bytes(token) == bytes([byte])]


def test_repeated_request_gets_the_stored_completion(tiny: Harmony) -> None:
    turn = [*tiny.vocabulary.encode_text("one"), tiny.stop_token_ids[0]]

    async def run() -> None:
        async with talking(tiny, [turn, turn]) as talk:
            await complete(talk.client, "Say: ")
            again = await complete(talk.client, "Say: ", extra_headers=RETRY)
            assert again.choices[0].text == "one"
            assert len(talk.policy.requests) == 1
            # Token ids are another request than their text.
            await complete(talk.client, tiny.vocabulary.encode_text("Say: "), extra_headers=RETRY)
            assert len(talk.policy.requests) == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([["x"]], "prompt[0]"),
        (["x", ""], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([-1], "prompt"),
        ([2**40], "prompt"),
        ([10**6], "prompt"),
        (["x"] * 129, "prompt"),
    ],
)
def test_wrong_prompt_is_refused_and_session_continues(
    tiny: Harmony, prompt: Any, param: str
) -> None:
    turn = [*tiny.vocabulary.encode_text("one"), tiny.stop_token_ids[0]]

    async def run() -> None:
        async with talking(tiny, [turn]) as talk:
            with pytest.raises(openai.BadRequestError) as refusal:
                await complete(talk.client, prompt)
            assert (refusal.value.code, refusal.value.param) == ("invalid_request", param)
            assert talk.session.end is None
            assert (await complete(talk.client, "x")).choices[0].text == "one"

    asyncio.run(run())


def test_long_prompt_is_encoded_in_linear_time() -> None:
    """openai-harmony's own encoder is quadratic in the length of a word, and needs 100 times as
    long."""
    full = Harmony(GptOssVocabulary(), PromptConfig())
    text = "a" * 200_000 + "<|end|>"
    full.encode_sampled("a<|end|>")
    begin = time.process_time()
    ids = full.encode_sampled(text)
    assert time.process_time() - begin < 3 * slowness()
    assert full.decode(ids) == text
    assert full.decode_token(ids[-1]) == "<|end|>"
