"""One session with a scripted policy: branches, dropped turns, options of clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rl_loop.config.episode import EpisodeLimits
from rl_loop.engines.protocol import ModelShape, SamplingParams
from rl_loop.gateway.errors import ApiError
from rl_loop.gateway.node import TurnNode
from rl_loop.gateway.request import TurnRequest
from rl_loop.gateway.reward import SubmittedReward
from rl_loop.gateway.serve import ServeOptions, served_settings
from rl_loop.gateway.session import ConversationSession, SessionSettings
from rl_loop.harmony.codec import Harmony, ParsedMessage
from tests.support.rl_loop.scripted_engine import ScriptedEngine

LIMITS = EpisodeLimits(max_turns=50, max_episode_tokens=400, max_episode_seconds=300.0)
TRAINED = SessionSettings(LIMITS, SamplingParams(max_new_tokens=100))
SERVED = served_settings(ServeOptions(history="append"), 400).session


def says(harmony: Harmony, text: str, thought: str = "", channel: str = "final") -> list[int]:
    messages = [ParsedMessage("analysis", None, None, thought)] if thought else []
    messages.append(ParsedMessage(channel, None, None, text))
    return harmony.render_assistant(messages, "<|return|>")


def request(*texts: str, **more: Any) -> TurnRequest:
    """Return a request whose messages alternate between user and policy."""
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return TurnRequest(tuple(messages), **more)


def converse(
    harmony: Harmony,
    turns: Sequence[list[int]],
    settings: SessionSettings,
    play: Callable[[ConversationSession], Awaitable[None]],
) -> ScriptedEngine:
    engine = ScriptedEngine(turns)
    shape = ModelShape(harmony.vocabulary.size)

    async def run() -> None:
        session = ConversationSession("s", engine, harmony, shape, settings)
        await play(session)
        await session.close()

    asyncio.run(run())
    return engine


async def ask(session: ConversationSession, response_id: str, asked: TurnRequest) -> TurnNode:
    node = await session.respond(asked, response_id)
    node.delivered = True
    return node


def test_response_id_selects_among_answers_of_equal_text(tiny: Harmony) -> None:
    """The answers differ only in their reasoning, which clients do not repeat."""

    async def play(session: ConversationSession) -> None:
        for name in ("one", "two"):
            await ask(session, name, request("Hi"))
        await ask(session, "three", request("More", previous_id="one"))
        # Without an id, the newest answer continues.
        await ask(session, "four", request("Hi", "Hello", "Again"))
        first, second = (sequence for _, sequence in session.trajectories("t"))
        assert [turn.role for turn in first.turns] == ["prompt", "assistant", "user", "assistant"]
        assert [turn.role for turn in second.turns] == ["prompt", "assistant", "user", "assistant"]

    turns = [says(tiny, "Hello", "ok"), says(tiny, "Hello", "so")]
    engine = converse(tiny, [*turns, says(tiny, "Bye"), says(tiny, "Bye")], TRAINED, play)
    prompt = engine.requests[0].input_ids
    assert engine.requests[2].input_ids[: len(prompt + turns[0])] == prompt + turns[0]
    assert engine.requests[3].input_ids[: len(prompt + turns[1])] == prompt + turns[1]


def test_dropped_turns_are_rendered_from_text(
    tiny: Harmony,
) -> None:
    settings = replace(SERVED, max_stored_turns=2)

    async def play(session: ConversationSession) -> None:
        first = await ask(session, "one", request("Hi"))
        await ask(session, "two", request("Count"))
        assert (await session.respond(request("Hi"), "again", is_retry=True)) is first
        await ask(session, "three", request("More"))
        with pytest.raises(ApiError, match="has no response 'one'"):
            await ask(session, "four", request("More", previous_id="one"))
        await ask(session, "four", request("Hi", "Hello", "More"))
        await ask(session, "five", request("Again", previous_id="three"))

    turns = [says(tiny, "Hello", "ok"), *[says(tiny, "Bye", "ok")] * 4]
    engine = converse(tiny, turns, settings, play)
    history = request("Hi", "Hello", "More").messages
    assert engine.requests[3].input_ids == tiny.render_prompt(history)
    # The newer turn is still stored, with its reasoning.
    beginning = engine.requests[2].input_ids + turns[2]
    assert engine.requests[4].input_ids[: len(beginning)] == beginning


def test_forest_drops_turns_beyond_its_memory_unless_trained(
    tiny: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is only served must not fill the memory with few, long conversations."""
    monkeypatch.setattr("rl_loop.gateway.forest.MAX_TURN_BYTES", 10_000)

    async def play(session: ConversationSession) -> None:
        for number in range(20):
            await ask(session, f"r{number}", request(f"{number} " + "x" * 60))
            assert session.forest._memory_bytes <= 10_000
        assert 1 < len(session.forest) < 20
        assert session.forest.has_response("r19")
        await ask(session, "last", request("More", previous_id="r19"))

    converse(tiny, [says(tiny, "Hello")] * 21, SERVED, play)

    async def train(session: ConversationSession) -> None:
        for number in range(20):
            await ask(session, f"r{number}", request(f"{number} " + "x" * 60))
        assert len(session.forest) == 20

    converse(tiny, [says(tiny, "Hello")] * 20, TRAINED, train)


@pytest.mark.parametrize(("settings", "chosen"), [(TRAINED, False), (SERVED, True)])
def test_client_sampling_options_apply_only_without_training(
    tiny: Harmony, settings: SessionSettings, chosen: bool
) -> None:
    async def play(session: ConversationSession) -> None:
        await ask(session, "one", request("Hi", temperature=0.25, top_p=0.5))
        await ask(session, "two", request("Hi"))

    [asked, plain] = converse(tiny, [says(tiny, "Hello")] * 2, settings, play).requests
    assert (plain.sampling.temperature, plain.sampling.top_p) == (1.0, 1.0)
    assert (asked.sampling.temperature == 0.25) is chosen
    assert (asked.sampling.top_p == 0.5) is chosen


def test_turns_of_equal_seed_have_different_request_ids(tiny: Harmony) -> None:
    async def play(session: ConversationSession) -> None:
        for name in ("one", "two"):
            await ask(session, name, request("Hi", seed=3))
        await ask(session, "three", request("Hi", seed=4))

    requests = converse(tiny, [says(tiny, "Hello")] * 3, TRAINED, play).requests
    assert len({asked.request_id for asked in requests}) == 3
    assert len({asked.sampling.seed for asked in requests}) == 3


def test_malformed_turn_ends_an_episode_but_not_a_served_session(
    tiny: Harmony,
) -> None:
    async def play(session: ConversationSession) -> None:
        for text in ("Hi", "Hi"):
            with pytest.raises(ApiError, match="invalid content") as error:
                await ask(session, "one", request(text))
            assert (error.value.status, error.value.kind) == (500, "model_error")
        answer = await ask(session, "two", request("Hi"))
        assert answer.answer.texts == ("Hello",)
        with pytest.raises(ApiError, match="accepts no rewards"):
            session.add_reward(SubmittedReward({"score": 1.0}, "two"))

    wrong = says(tiny, "x", channel="nonsense")
    converse(tiny, [wrong, wrong, says(tiny, "Hello")], SERVED, play)

    async def end(session: ConversationSession) -> None:
        for _ in range(2):
            with pytest.raises(ApiError, match="invalid content"):
                await ask(session, "one", request("Hi"))
        assert session.end is not None

    assert len(converse(tiny, [wrong], TRAINED, end).requests) == 1
