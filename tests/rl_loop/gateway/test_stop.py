"""Stop texts: the returned text, the recorded tokens, and the continued conversation."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GptOssForCausalLM

from rl_loop.chat.codec import ChatCodec
from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.prompt_config import ChatMlConfig
from rl_loop.chatml.vocabulary import tiny_vocabulary
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import GenerateResult
from rl_loop.gateway.answer import read_turn
from rl_loop.gateway.stop_text import find_stop, shorten
from rl_loop.harmony.codec import Harmony, ParsedMessage
from tests.support.rl_loop.gateway.chats import TOOLS, echo, say
from tests.support.rl_loop.gateway.policy import ARGUMENTS, LONG, Script
from tests.support.rl_loop.gateway.scripted import talking
from tests.support.rl_loop.gateway.serving import SETTINGS, serving

COUNT: list[Any] = [{"role": "user", "content": "Count"}]
STOP: dict[str, Any] = {"role": "user", "content": "Stop"}


def first_tokens_with(codec: ChatCodec, ids: list[int], text: str) -> int:
    """Return the length of the shortest prefix whose text has ``text``."""
    return next(n for n in range(len(ids) + 1) if text in codec.decode(ids[:n]))


# ---- with the embedded engine


def test_turn_ends_at_the_stop_text(
    tiny: Harmony, model: GptOssForCausalLM, script: Script
) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            completion = await served.client().chat.completions.create(
                model="any", messages=COUNT, stop=["13 1", "2 1"]
            )
            [choice] = completion.choices
            assert (choice.message.content, choice.finish_reason) == ("10 11 1", "stop")

            sampled = script.says(LONG)
            kept = first_tokens_with(tiny, sampled, "12 1")
            assert kept < len(sampled)
            assert completion.usage is not None
            assert completion.usage.completion_tokens == kept

            # The trained tokens are the first tokens of the engine's result, with its numbers.
            [trajectory] = served.trajectories()
            prompt = script.prompt("Count")
            assert trajectory.token_ids.tolist() == prompt + sampled[:kept]
            assert trajectory.loss_mask.tolist() == [False] * len(prompt) + [True] * kept
            assert trajectory.finish_reason is FinishReason.STOP
            [call] = served.engine.answered
            assert call.result.output_ids == sampled
            trained = trajectory.rollout_log_probs[len(prompt) :]
            assert trained == pytest.approx(call.result.output_log_probs[:kept], abs=1e-7)
            assert isinstance(trajectory.routed_experts, np.ndarray)
            assert call.result.routed_experts is not None
            np.testing.assert_array_equal(
                trajectory.routed_experts[: len(prompt) + kept - 1],
                call.result.routed_experts[: len(prompt) + kept - 1],
            )
            assert trajectory.weight_versions[-1].end == len(trajectory)
            trajectory.validate()

    asyncio.run(run())


def test_stop_text_comes_before_the_token_limit(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            reasons = []
            for stop in ("11", "39"):
                completion = await served.client().chat.completions.create(
                    model="any", messages=COUNT, stop=stop, max_tokens=12
                )
                reasons.append(completion.choices[0].finish_reason)
            assert reasons == ["stop", "length"]

    asyncio.run(run())


def test_continued_conversation_lacks_the_stop_text(
    tiny: Harmony, model: GptOssForCausalLM
) -> None:
    async def run() -> None:
        for history in ("append", "harmony"):
            settings = replace(SETTINGS, history=history)
            async with serving(tiny, model, settings) as served:
                client = served.client()
                message = await say(client, COUNT, stop="2 1")
                messages = [*COUNT, echo(message), STOP]
                await say(client, messages, max_tokens=1)

                # The stopped turn is trained with its stop text, in a sequence of its own.
                first, second = served.trajectories()
                assert tiny.decode(first.token_ids[first.loss_mask].tolist()).endswith("12 13")
                assert second.loss_mask.sum() == 1
                context = tiny.decode(second.token_ids[:-1].tolist())
                assert context == tiny.decode(tiny.render_prompt(messages))

    asyncio.run(run())


def test_reasoning_and_calls_are_not_searched(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            client = served.client()
            hi: list[Any] = [{"role": "user", "content": "Hi"}]
            assert (await say(client, hi, stop=["ok", "final", "<|"])).content == "Hello"
            ask: list[Any] = [{"role": "user", "content": "1+1"}]
            message = await say(client, ask, tools=TOOLS, stop=["add", '"a"', "ok"])
            assert message.tool_calls[0].function.arguments == ARGUMENTS

    asyncio.run(run())


def test_stream_ends_at_the_stop_text(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            stream = await served.client().chat.completions.create(
                model="any", messages=COUNT, stop="13", stream=True
            )
            choices = [chunk.choices[0] async for chunk in stream]
            assert "".join(choice.delta.content or "" for choice in choices) == "10 11 12 "
            assert choices[-1].finish_reason == "stop"

    asyncio.run(run())


# ---- with a scripted policy


def test_malformed_text_after_the_stop_text_was_never_sampled(tiny: Harmony) -> None:
    turn = "<|channel|>final<|message|>one two<|message|>three<|return|>"

    async def run() -> None:
        async with talking(tiny, [turn, turn], is_episode=False) as talk:
            assert (await say(talk.client, COUNT, stop=" two")).content == "one"
            with pytest.raises(openai.InternalServerError, match="invalid content"):
                await say(talk.client, COUNT, stop="four")

    asyncio.run(run())


def test_malformed_turn_before_the_stop_text_is_a_format_error(tiny: Harmony) -> None:
    ids = tiny.vocabulary.encode_text
    turn = [
        *tiny.render_sampled(ParsedMessage("analysis", None, None, "x"), "<|end|>"),
        *ids("no header"),
        *tiny.render_sampled(ParsedMessage("final", None, None, "one two"), "<|return|>"),
    ]
    read = read_turn(tiny, GenerateResult(turn, [], FinishReason.STOP), [], "r", ["two"])
    assert read.format_error is not None
    assert read.kept == len(turn) - 1


def test_stop_text_in_a_comment_ends_the_turn_before_its_call(tiny: Harmony) -> None:
    turn = (
        "<|channel|>commentary<|message|>I add now.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    )

    async def run() -> None:
        async with talking(tiny, [turn]) as talk:
            message = await say(talk.client, COUNT, tools=TOOLS, stop=" now")
            assert (message.content, message.tool_calls) == ("I add", None)

    asyncio.run(run())


def test_long_turn_ends_at_its_stop_text(tiny: Harmony) -> None:
    text = " ".join(str(number) for number in range(150))
    turn = tiny.render_assistant([ParsedMessage("final", None, None, text)])
    assert len(turn) > 256

    async def run() -> None:
        async with talking(tiny, [turn]) as talk:
            message = await say(talk.client, COUNT, stop=" 149")
            assert message.content == text.removesuffix(" 149")

    asyncio.run(run())


# ---- the search


@pytest.fixture(scope="module")
def chatml() -> ChatMl:
    return ChatMl(tiny_vocabulary(400, "one two three"), ChatMlConfig())


TEXTS = st.text("ab é漢🙂\n", min_size=1, max_size=12)


@given(text=TEXTS, stops=st.lists(st.text("ab é漢🙂\n", min_size=1, max_size=3), max_size=3))
def test_stop_is_the_first_one_to_be_complete(
    tiny: Harmony, chatml: ChatMl, text: str, stops: list[str]
) -> None:
    for codec in (tiny, chatml):
        turn = codec.render_assistant([ParsedMessage("final", None, None, text)])
        cut = find_stop(codec, turn, codec.answer_ranges(turn), stops)
        # The independent way reads character by character.
        prefixes = [text[:n] for n in range(len(text) + 1)]
        prefix = next((p for p in prefixes if p.endswith(tuple(stops))), None) if stops else None
        if prefix is None:
            assert cut is None
            continue
        assert cut is not None
        stop = max((s for s in stops if prefix.endswith(s)), key=len)
        assert cut.text == prefix.removesuffix(stop)
        # The kept tokens are the fewest ones with the stop text, which is one of the last tokens.
        start = codec.answer_ranges(turn)[0].start
        assert prefix in codec.decode(turn[start : cut.kept])
        assert prefix not in codec.decode(turn[start : cut.kept - 1])
        assert codec.decode(turn[start : cut.kept - cut.dropped]) + cut.rest == cut.text


def test_chatml_text_ends_before_its_call(chatml: ChatMl) -> None:
    call = ParsedMessage("commentary", "functions.f", None, "{}")
    thought = ParsedMessage("analysis", None, None, "one two")
    turn = chatml.render_assistant([thought, call])
    [places] = chatml.answer_ranges(turn)
    assert chatml.decode([turn[place] for place in places]) == "one two"
    assert find_stop(chatml, turn, [places], ["name", "\n", "tool"]) is None


def test_shortened_result_has_the_versions_of_its_tokens() -> None:
    spans = [WeightVersionSpan(0, 2, 1), WeightVersionSpan(2, 4, 2), WeightVersionSpan(4, 5, 3)]
    result = GenerateResult(
        [1, 2, 3, 4, 5], [-1.0, -2.0, -3.0, -4.0, -5.0], FinishReason.STOP, spans
    )
    result.routed_experts = np.arange(7, dtype=np.uint8).reshape(7, 1, 1)
    short = shorten(result, 3)
    assert (short.output_ids, short.output_log_probs) == ([1, 2, 3], [-1.0, -2.0, -3.0])
    assert short.weight_versions == [WeightVersionSpan(0, 2, 1), WeightVersionSpan(2, 3, 2)]
    assert short.routed_experts is not None
    assert short.routed_experts.ravel().tolist() == [0, 1, 2, 3, 4]
