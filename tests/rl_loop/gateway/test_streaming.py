"""Streams with the official client: the deltas, the recorded tokens, disconnects and errors."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from transformers import GptOssForCausalLM

from rl_loop.chat.codec import ChatCodec
from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.prompt_config import ChatMlConfig
from rl_loop.chatml.vocabulary import tiny_vocabulary
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, NewTokens
from rl_loop.harmony.codec import Harmony
from rl_loop.rollout.episode import EpisodeFailed, MalformedTurn
from tests.support.rl_loop.gateway.chats import TOOLS
from tests.support.rl_loop.gateway.scripted import ScriptedPolicy, Talk, talking
from tests.support.rl_loop.gateway.serving import SETTINGS, check_capture, eventually, serving

HI: list[Any] = [{"role": "user", "content": "Hi"}]
COUNT: list[Any] = [{"role": "user", "content": "Count"}]
FUNCTIONS: list[Any] = [{"type": "function", **TOOLS[0]["function"]}]
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Let me see \U0001f642.{NEXT}"
COMMENT = f"<|channel|>commentary<|message|>I add.{NEXT}"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 23}'
FINAL = "<|channel|>final<|message|>one two \U0001f642\U0001f643 three<|return|>"

TURNS = {
    "answer": THOUGHT + FINAL,
    "no reasoning": FINAL,
    "call": THOUGHT + CALL + "<|call|>",
    "all kinds": THOUGHT + COMMENT + THOUGHT + CALL + NEXT + COMMENT + CALL + "<|call|>",
    "empty text": THOUGHT + "<|channel|>final<|message|><|return|>",
    "type of the content": THOUGHT + "<|channel|>final <|constrain|>json<|message|>{}<|return|>",
    "recipient first": THOUGHT.replace(NEXT, NEXT + " to=functions.add") + CALL.replace(
        " to=functions.add", ""
    ) + "<|call|>",
}  # fmt: skip
CHATML_TURNS = {
    "answer": "one two\n",
    "call": 'ok <tool_cal\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "call only": '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
}


def added(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """Return the message that the deltas of a choice form, as a client joins them."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        if choice.index != index:
            continue
        delta = choice.delta
        message["content"] += delta.content or ""
        message["reasoning"] += getattr(delta, "reasoning", None) or ""
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(message["tool_calls"])
                message["tool_calls"].append([call.function.name, ""])
            message["tool_calls"][call.index][1] += call.function.arguments
        message["finish_reason"] = choice.finish_reason
    return message


def plain(choice: Any) -> dict[str, Any]:
    """Return the message of a plain answer in the same form."""
    message = choice.message
    return {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning", ""),
        "tool_calls": [[c.function.name, c.function.arguments] for c in message.tool_calls or []],
        "finish_reason": choice.finish_reason,
    }


async def collect_chunks(client: openai.AsyncOpenAI, **options: Any) -> list[Any]:
    stream = await client.chat.completions.create(
        model="any", stream=True, **{"messages": HI, **options}
    )
    return [chunk async for chunk in stream]


async def check_equal(talk: Talk, **options: Any) -> list[Any]:
    """Check that the next two turns, which are equal, give equal answers. Return the chunks."""
    create: Any = talk.client.chat.completions.create
    completion = await create(model="any", messages=HI, **options)
    chunks = await collect_chunks(talk.client, **options)
    assert added(chunks) == plain(completion.choices[0])
    if options.get("logprobs"):
        listed = [choice.logprobs for chunk in chunks for choice in chunk.choices]
        tokens = [token for entry in listed if entry is not None for token in entry.content]
        assert tokens == completion.choices[0].logprobs.content
    first, second = talk.session.forest.nodes[-2:]
    assert first.sampled.output_ids == second.sampled.output_ids
    assert first.closing == second.closing
    return chunks


# ---- deltas


@pytest.mark.parametrize("piece", [1, 3, 1000])
@pytest.mark.parametrize("kind", TURNS)
def test_chat_deltas_form_the_plain_answer(full: Harmony, kind: str, piece: int) -> None:
    async def run() -> None:
        async with talking(full, [TURNS[kind]] * 2) as talk:
            talk.policy.piece = piece
            chunks = await check_equal(talk, tools=TOOLS, logprobs=True)
            if piece == 1:
                assert len(chunks) > 2

    asyncio.run(run())


@pytest.mark.parametrize("kind", TURNS)
def test_response_events_form_the_plain_answer(full: Harmony, kind: str) -> None:
    options: Any = {"model": "any", "input": "Hi", "tools": FUNCTIONS}

    async def run() -> None:
        async with talking(full, [TURNS[kind]] * 2) as talk:
            response = await talk.client.responses.create(**options)
            async with talk.client.responses.stream(**options) as stream:
                events: list[Any] = [event async for event in stream]
                streamed = await stream.get_final_response()
            assert [event.sequence_number for event in events] == list(range(len(events)))
            # Ids differ, because each answer is another response.
            assert [kinds_and_texts(item) for item in streamed.output] == [
                kinds_and_texts(item) for item in response.output
            ]
            done = [event.item for event in events if event.type == "response.output_item.done"]
            names = [(item.id, *kinds_and_texts(item)) for item in done]
            final = events[-1].response.output
            assert names == [(item.id, *kinds_and_texts(item)) for item in final]
            for number, item in enumerate(done):
                deltas = [
                    event.delta
                    for event in events
                    if event.type.endswith(".delta") and event.output_index == number
                ]
                assert "".join(deltas) == kinds_and_texts(item)[1]

    asyncio.run(run())


def kinds_and_texts(item: Any) -> tuple[str, str]:
    if item.type == "function_call":
        return f"call of {item.name}", item.arguments
    return item.type, "".join(part.text for part in item.content)


@pytest.mark.parametrize("stop", [["two"], ["o \U0001f642", "e"], ["\U0001f643"], ["absent"]])
def test_stop_texts_are_not_streamed(full: Harmony, stop: list[str]) -> None:
    async def run() -> None:
        for piece in (1, 4):
            async with talking(full, [THOUGHT + FINAL] * 2) as talk:
                talk.policy.piece = piece
                await check_equal(talk, stop=stop, logprobs=True)

    asyncio.run(run())


def test_truncated_turn_has_equal_deltas(full: Harmony) -> None:
    turn = TURNS["all kinds"]
    tokens = len(full.encode_sampled(turn))

    async def run() -> None:
        async with talking(full, [turn] * 2 * tokens) as talk:
            for most in range(1, tokens, 4):
                await check_equal(talk, tools=TOOLS, max_tokens=most)

    asyncio.run(run())


def test_invalid_utf8_has_equal_deltas(full: Harmony) -> None:
    [smile, *_] = [
        token for token in full.vocabulary.encode_text("\U0001f643")
        if len(full.vocabulary.token_bytes(token)) < 4
    ]  # fmt: skip
    broken = full.encode_sampled("<|channel|>final<|message|>one")
    broken += [smile, *full.encode_sampled(" two<|return|>")]

    async def run() -> None:
        async with talking(full, [broken] * 2) as talk:
            chunks = await check_equal(talk)
            assert "\ufffd" in added(chunks)["content"]

    asyncio.run(run())


@pytest.mark.parametrize("kind", CHATML_TURNS)
def test_chatml_deltas_form_the_plain_answer(kind: str) -> None:
    codec: ChatCodec = ChatMl(tiny_vocabulary(640, "one two ok"), ChatMlConfig())
    turn = codec.encode_sampled(CHATML_TURNS[kind] + "<|im_end|>")

    async def run() -> None:
        for stop in ([], [" t"], ["k"]):
            async with talking(codec, [turn] * 2) as talk:
                chunks = await check_equal(talk, tools=TOOLS, stop=stop, logprobs=True)
                if kind == "answer" and not stop:
                    assert len(chunks) > 4

    asyncio.run(run())


def test_deltas_arrive_while_the_engine_samples(full: Harmony) -> None:
    async def run() -> None:
        async with talking(full, [THOUGHT + FINAL]) as talk:
            talk.policy.pause_after = 5
            create: Any = talk.client.chat.completions.create
            stream = await create(model="any", messages=HI, stream=True)
            chunks = []
            async for chunk in stream:
                chunks.append(chunk)
                if added(chunks)["reasoning"] == "Let me":
                    # The engine waits, so the turn is not complete.
                    assert talk.session.forest.nodes == []
                    talk.policy.may_continue.set()
            assert added(chunks)["reasoning"].startswith("Let me see")
            assert added(chunks)["content"].startswith("one")

    asyncio.run(run())


# ---- recorded tokens


def test_streaming_does_not_change_the_recorded_data(
    tiny: Harmony, model: GptOssForCausalLM
) -> None:
    warm = replace(SETTINGS, sampling=replace(SETTINGS.sampling, temperature=1.0))
    recorded = []

    async def run(*, stream: bool) -> None:
        async with serving(tiny, model, warm) as served:
            create: Any = served.client(max_retries=0).chat.completions.create
            for text in ("Hi", "Count"):
                messages = [{"role": "user", "content": text}]
                if stream:
                    await collect_chunks(served.client(max_retries=0), messages=messages, n=2)
                else:
                    await create(model="any", messages=messages, n=2)
            trajectories = served.trajectories()
            check_capture(served, trajectories)
            # Concurrent choices may end in any order.
            recorded.append(sorted(trajectories, key=lambda one: one.token_ids.tolist()))

    asyncio.run(run(stream=False))
    asyncio.run(run(stream=True))
    before, after = recorded
    assert len(before) == len(after) == 4
    for one, other in zip(before, after, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.loss_mask.tolist() == other.loss_mask.tolist()
        # Batches differ in time, which changes the last bits. ``check_capture`` compares them with
        # the results of the engine.
        np.testing.assert_allclose(one.rollout_log_probs, other.rollout_log_probs, atol=1e-5)
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


class InterruptedPolicy(ScriptedPolicy):
    """An engine that aborts a turn after its first tokens, as a weight sync does."""

    def __init__(self, turn: list[int], rest: list[int]) -> None:
        super().__init__([turn])
        self._rest = rest

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        whole = self.turns[0]
        assert request.on_tokens is not None
        sampled = whole[:6]
        reason = FinishReason.ABORT
        if len(self.requests) > 1:
            sampled, reason = self._rest, FinishReason.STOP
        for token in sampled:
            request.on_tokens(NewTokens([token], [-0.5], [[]]))
            await asyncio.sleep(0)
        spans = [WeightVersionSpan(0, len(sampled), len(self.requests))]
        return GenerateResult(sampled, [-0.5] * len(sampled), reason, spans)


def test_stream_continues_after_a_weight_sync(full: Harmony) -> None:
    turn = full.encode_sampled(THOUGHT + FINAL)

    async def run() -> None:
        async with talking(full, []) as talk:
            talk.session._engine.engine = InterruptedPolicy(turn, turn[6:])
            message = added(await collect_chunks(talk.client))
            assert message["reasoning"] == "Let me see \U0001f642."
            [node] = talk.session.forest.nodes
            assert node.sampled.output_ids == turn
            assert [span.version for span in node.sampled.weight_versions] == [1, 2]

    asyncio.run(run())


def test_engine_that_streams_other_tokens_fails(full: Harmony) -> None:
    turn = full.encode_sampled(THOUGHT + FINAL)

    class LyingPolicy(ScriptedPolicy):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            result = await super().generate(request)
            result.output_ids = full.encode_sampled(FINAL)
            result.output_log_probs = [-0.5] * len(result.output_ids)
            result.weight_versions = []
            return result

    async def run() -> None:
        async with talking(full, []) as talk:
            talk.session._engine.engine = LyingPolicy([turn])
            with pytest.raises(openai.APIError, match="different tokens than it streamed"):
                await collect_chunks(talk.client)
            assert isinstance(talk.session.end, EpisodeFailed)
            assert talk.session.forest.nodes == []

    asyncio.run(run())


# ---- the client leaves


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_client_that_leaves_a_stream_stops_sampling(
    tiny: Harmony, model: GptOssForCausalLM, dialect: str
) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            async with served.client(max_retries=0) as client:
                create: Any = client.responses.create
                body: dict[str, Any] = {"input": "Count"}
                if dialect == "chat":
                    create, body = client.chat.completions.create, {"messages": COUNT}
                stream = await create(model="any", stream=True, **body)
                async for _ in stream:
                    break
                await stream.close()
            await eventually(lambda: served.session.in_flight == 0)
            await eventually(lambda: not served.engine.engine._scheduler.has_work)
            [request] = served.engine.begun
            assert served.engine.answered == []
            assert served.session.forest.nodes == []

            # The client repeats the request, and gets another sample.
            chunks = await collect_chunks(served.client(), messages=COUNT)
            assert added(chunks)["content"].startswith("10 11")
            assert len(served.engine.answered) == 1
            assert served.engine.begun[-1].request_id != request.request_id

    asyncio.run(run())


def test_retry_streams_the_stored_answer(full: Harmony) -> None:
    async def run() -> None:
        async with talking(full, [THOUGHT + FINAL]) as talk:
            first = await collect_chunks(talk.client)
            retry = {"x-stainless-retry-count": "1"}
            again = await collect_chunks(talk.client, extra_headers=retry)
            assert added(again) == added(first)
            assert again[0].id == first[0].id
            assert len(talk.policy.requests) == 1

    asyncio.run(run())


# ---- errors


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_format_error_ends_the_stream_and_the_session(full: Harmony, dialect: str) -> None:
    turn = THOUGHT + "<|channel|>final<|message|>one<|end|><|start|>user<|message|>x<|return|>"

    async def run() -> None:
        endings = []
        for stream in (False, True):
            async with talking(full, [turn]) as talk:
                create: Any = talk.client.responses.create
                body: dict[str, Any] = {"input": "Hi"}
                if dialect == "chat":
                    create, body = talk.client.chat.completions.create, {"messages": HI}
                received = []
                with pytest.raises(openai.APIError, match="invalid content") as error:
                    answer = await create(model="any", stream=stream, **body)
                    async for event in answer:
                        received.append(event)
                assert error.value.body is not None
                assert error.value.type == "model_error"  # type: ignore[attr-defined]
                assert (len(received) > 0) == stream
                endings.append(talk.session.end)
                [node] = talk.session.forest.nodes
                assert node.finish_reason is FinishReason.FORMAT_ERROR
        assert endings[0] == endings[1]
        assert isinstance(endings[0], MalformedTurn)

    asyncio.run(run())


@pytest.mark.parametrize("turn", ["<|channel|>typo<|message|>x<|return|>", "x<|return|>"])
def test_error_before_the_first_delta_has_a_status(full: Harmony, turn: str) -> None:
    async def run() -> None:
        async with talking(full, [turn]) as talk:
            with pytest.raises(openai.InternalServerError, match="invalid content"):
                await collect_chunks(talk.client)

    asyncio.run(run())


def test_unknown_function_is_not_streamed(full: Harmony) -> None:
    async def run() -> None:
        async with talking(full, [CALL + "<|call|>"]) as talk:
            with pytest.raises(openai.InternalServerError, match="unknown_tool"):
                await collect_chunks(talk.client)

    asyncio.run(run())


def test_failed_choice_ends_the_whole_stream(full: Harmony) -> None:
    async def run() -> None:
        turns = [THOUGHT + FINAL, THOUGHT + "<|channel|>typo<|message|>x<|return|>"]
        async with talking(full, turns) as talk:
            with pytest.raises(openai.APIError, match="invalid content"):
                await collect_chunks(talk.client, n=2)
            assert talk.session.in_flight == 0

    asyncio.run(run())
