"""A gateway over real HTTP with a scripted policy."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai

from rl_loop.chat.codec import ChatCodec
from rl_loop.config.episode import EpisodeLimits
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    ModelShape,
    NewTokens,
    SamplingParams,
)
from rl_loop.gateway.server import Gateway, GatewaySettings
from rl_loop.gateway.session import ConversationSession, SessionSettings
from rl_loop.harmony.codec import Harmony
from rl_loop.harmony.vocabulary import harmony_encoding


class ScriptedPolicy:
    """An engine that responds with the turns of a script, in order."""

    def __init__(self, turns: Sequence[list[int]], seconds: float = 0.0) -> None:
        self.turns = list(turns)
        self.requests: list[GenerateRequest] = []
        self._seconds = seconds
        self.piece = 1
        """Tokens of a piece of a stream."""
        self.pause_after = sys.maxsize
        """Index of the first token after which a stream waits for ``may_continue``."""
        self.may_continue = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        if request.on_begin is not None:
            request.on_begin()
        turn = self.turns.pop(0)
        await asyncio.sleep(self._seconds)
        count = min(len(turn), request.sampling.max_new_tokens)
        if request.on_tokens is not None:
            await self._stream(request.on_tokens, turn[:count])
        reason = FinishReason.STOP if count == len(turn) else FinishReason.LENGTH
        spans = [WeightVersionSpan(0, count, 1)]
        return GenerateResult(turn[:count], [-0.5] * count, reason, spans)

    async def _stream(self, on_tokens: Callable[[NewTokens], None], turn: list[int]) -> None:
        """Pass on a turn in several pieces."""
        for begin in range(0, len(turn), self.piece):
            ids = turn[begin : begin + self.piece]
            on_tokens(NewTokens(ids, [-0.5] * len(ids), [[] for _ in ids]))
            await asyncio.sleep(0)
            if begin >= self.pause_after:
                await self.may_continue.wait()

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        return [-0.5] * (len(input_ids) - 1)

    async def abort(self, request_id: str | None = None) -> None: ...

    async def close(self) -> None: ...


@dataclass
class Talk:
    """A session of a gateway, and the prompts that its policy received."""

    gateway: Gateway
    session: ConversationSession
    client: openai.AsyncOpenAI
    policy: ScriptedPolicy
    codec: ChatCodec

    def shown(self, number: int = -1) -> str:
        """Return the prompt of a request, with special tokens as text."""
        return self.codec.decode(self.policy.requests[number].input_ids)


@asynccontextmanager
async def talking(
    codec: ChatCodec, turns: Sequence[str | list[int]], *, seconds: float = 0.0, **settings: Any
) -> AsyncIterator[Talk]:
    """Serve a script. Turns given as text contain Harmony's special tokens as text."""
    policy = ScriptedPolicy([_ids(codec, turn) for turn in turns], seconds)
    limits = EpisodeLimits(max_turns=50, max_episode_tokens=8000, max_episode_seconds=300.0)
    session_settings = SessionSettings(limits, SamplingParams(max_new_tokens=400), **settings)
    shape = ModelShape(codec.vocabulary.size)
    gateway = Gateway(policy, codec, shape, GatewaySettings(session_settings))
    await gateway.start()
    session = gateway.open_session("session")
    client = openai.AsyncOpenAI(base_url=gateway.base_url, api_key=session.api_key, max_retries=0)
    try:
        yield Talk(gateway, session, client, policy, codec)
    finally:
        await client.close()
        await gateway.close()


def _ids(codec: ChatCodec, turn: str | list[int]) -> list[int]:
    if isinstance(turn, list):
        return turn
    assert isinstance(codec, Harmony)
    return codec.vocabulary.from_harmony(harmony_encoding().encode(turn, allowed_special="all"))
