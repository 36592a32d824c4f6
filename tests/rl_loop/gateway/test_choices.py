"""Several choices of one request: separate samples, branches, retries and failures."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest
from transformers import GptOssForCausalLM

from rl_loop.gateway import server
from rl_loop.harmony.codec import Harmony
from tests.support.rl_loop.gateway.chats import echo
from tests.support.rl_loop.gateway.policy import Script
from tests.support.rl_loop.gateway.scripted import talking
from tests.support.rl_loop.gateway.serving import (
    LIMITS,
    SETTINGS,
    check_capture,
    eventually,
    serving,
)

HI: list[Any] = [{"role": "user", "content": "Hi"}]
RETRY = {"x-stainless-retry-count": "1"}


def final(text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|return|>"


def test_choices_are_branches_that_are_trained_once(
    tiny: Harmony, model: GptOssForCausalLM, script: Script
) -> None:
    warm = replace(SETTINGS, sampling=replace(SETTINGS.sampling, temperature=1.0))

    async def run() -> None:
        async with serving(tiny, model, warm) as served:
            completion = await served.client().chat.completions.create(
                model="any", messages=HI, n=3
            )
            assert [choice.index for choice in completion.choices] == [0, 1, 2]

            trajectories = served.trajectories()
            assert len(trajectories) == 3
            prompt = script.prompt("Hi")
            for trajectory in trajectories:
                assert trajectory.token_ids[: len(prompt)].tolist() == prompt
            check_capture(served, trajectories)

            seeds = {call.request.sampling.seed for call in served.engine.answered}
            assert len(seeds) == 3
            sampled = sum(len(call.result.output_ids) for call in served.engine.answered)
            assert completion.usage is not None
            assert completion.usage.prompt_tokens == len(prompt)
            assert completion.usage.completion_tokens == sampled

    asyncio.run(run())


def test_conversation_continues_from_the_chosen_answer(tiny: Harmony) -> None:
    turns = [final("one"), final("two"), final("end")]

    async def run() -> None:
        async with talking(tiny, turns) as talk:
            create = talk.client.chat.completions.create
            completion = await create(model="any", messages=HI, n=2)
            first, second = (choice.message for choice in completion.choices)
            assert (first.content, second.content) == ("one", "two")

            more: Any = {"role": "user", "content": "More"}
            await create(model="any", messages=[*HI, echo(second), more])
            assert talk.shown().startswith(talk.shown(1) + final("two"))
            trajectories = [t for _, t in talk.session.trajectories("task")]
            assert [t.assistant_turns for t in trajectories] == [1, 2]

            # Each choice has a separate name, by which it can get a reward.
            names = [node.response_id for node in talk.session.forest.nodes[:2]]
            assert names == [completion.id, f"{completion.id}-1"]

    asyncio.run(run())


def test_stream_has_the_chunks_of_every_choice(tiny: Harmony) -> None:
    async def run() -> None:
        async with talking(tiny, [final("one"), final("two")]) as talk:
            stream = await talk.client.chat.completions.create(
                model="any",
                messages=HI,
                n=2,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
            texts = {0: "", 1: ""}
            reasons = {}
            for choice in (choice for chunk in chunks for choice in chunk.choices):
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason
            assert texts == {0: "one", 1: "two"}
            assert reasons == {0: "stop", 1: "stop"}
            assert len({chunk.id for chunk in chunks}) == 1

    asyncio.run(run())


def test_repeated_request_gets_the_same_choices(tiny: Harmony) -> None:
    async def run() -> None:
        async with talking(tiny, [final("one"), final("two")]) as talk:
            create = talk.client.chat.completions.create
            await create(model="any", messages=HI, n=2)
            again = await create(model="any", messages=HI, n=2, extra_headers=RETRY)
            assert [choice.message.content for choice in again.choices] == ["one", "two"]
            assert len(talk.policy.requests) == 2

    asyncio.run(run())


def test_failed_choice_stops_the_others(tiny: Harmony, model: GptOssForCausalLM) -> None:
    limits = LIMITS.model_copy(update={"max_turns": 2})

    async def run() -> None:
        async with serving(tiny, model, replace(SETTINGS, limits=limits)) as served:
            with pytest.raises(openai.BadRequestError) as refusal:
                await served.client().chat.completions.create(model="any", messages=HI, n=3)
            assert refusal.value.code == "session_over"
            await eventually(lambda: len(served.session._pending) == 0)
            assert served.session.in_flight == 0

    asyncio.run(run())


def test_choices_count_as_requests_in_flight(
    tiny: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_IN_FLIGHT", 3)

    async def run() -> None:
        async with talking(tiny, [final("one")] * 3) as talk:
            create = talk.client.chat.completions.create
            with pytest.raises(openai.RateLimitError):
                await create(model="any", messages=HI, n=4)
            assert len((await create(model="any", messages=HI, n=3)).choices) == 3
            assert talk.session.in_flight == 0

    asyncio.run(run())
