"""Load of benchmarks/gateway/load.py on a gateway: it detects mixed-up sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import openai
import pytest

from benchmarks.gateway.load import EchoEngine, answer, find_error, question
from rl_loop.config.episode import EpisodeLimits
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, ModelShape, SamplingParams
from rl_loop.gateway.server import Gateway, GatewaySettings
from rl_loop.gateway.session import ConversationSession, SessionSettings
from rl_loop.harmony.codec import Harmony, PromptConfig
from rl_loop.harmony.vocabulary import GptOssVocabulary

MINE, OTHER = (f"session-{digit * 32}" for digit in "ab")
TURNS = 2
Generate = Callable[[GenerateRequest], Awaitable[GenerateResult]]


@pytest.fixture(scope="module")
def harmony() -> Harmony:
    return Harmony(GptOssVocabulary(), PromptConfig())


async def captured(
    harmony: Harmony, word: str, generate: Generate | None = None
) -> ConversationSession:
    """Hold a conversation with the word ``word``, and return its session."""
    engine = EchoEngine(harmony, 0.0)
    if generate is not None:
        engine.generate = generate  # type: ignore[method-assign]
    limits = EpisodeLimits(max_turns=10, max_episode_tokens=4096, max_episode_seconds=60.0)
    settings = SessionSettings(limits, SamplingParams(max_new_tokens=64))
    gateway = Gateway(
        engine, harmony, ModelShape(harmony.vocabulary.size), GatewaySettings(settings)
    )
    await gateway.start()
    session = gateway.open_session(word)
    client = openai.AsyncOpenAI(base_url=gateway.base_url, api_key=session.api_key, max_retries=0)

    messages: list[dict[str, str]] = []
    for turn in range(1, TURNS + 1):
        messages.append({"role": "user", "content": question(word, turn)})
        completion = await client.chat.completions.create(model="any", messages=messages)  # type: ignore[arg-type]
        messages.append(
            {"role": "assistant", "content": completion.choices[0].message.content or ""}
        )
    await client.close()
    await gateway.close()
    return session


def test_separate_session_has_no_errors(harmony: Harmony) -> None:
    session = asyncio.run(captured(harmony, MINE))
    assert find_error(session, harmony, MINE, TURNS) == ""


def test_answer_of_another_session_is_detected(harmony: Harmony) -> None:
    session = asyncio.run(captured(harmony, OTHER))
    assert answer(OTHER, 1) in find_error(session, harmony, MINE, TURNS)


def test_missing_turn_is_detected(harmony: Harmony) -> None:
    session = asyncio.run(captured(harmony, MINE))
    assert find_error(session, harmony, MINE, TURNS + 1) == "2 of 3 turns were captured"


def test_log_probs_of_another_session_are_detected(harmony: Harmony) -> None:
    engine = EchoEngine(harmony, 0.0)

    async def others_log_probs(request: GenerateRequest) -> GenerateResult:
        result = await engine.generate(request)
        result.output_log_probs = [-0.125] * len(result.output_ids)
        return result

    session = asyncio.run(captured(harmony, MINE, others_log_probs))
    assert "log-probs" in find_error(session, harmony, MINE, TURNS)
