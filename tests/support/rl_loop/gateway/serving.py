"""A gateway with the embedded engine, and a record of the engine's requests and results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import openai
import pytest
import torch
from transformers import PreTrainedModel

from rl_loop.chat.codec import ChatCodec
from rl_loop.config.episode import EpisodeLimits
from rl_loop.data.trajectory import Trajectory
from rl_loop.engines.embedded.engine import TransformersEngine
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, ModelShape, SamplingParams
from rl_loop.gateway.server import Gateway, GatewaySettings
from rl_loop.gateway.session import ConversationSession, SessionSettings
from tests.support.rl_loop.engines.models import plain_log_probs
from tests.support.rl_loop.gateway.policy import build_engine

LIMITS = EpisodeLimits(max_turns=50, max_episode_tokens=1024, max_episode_seconds=300.0)
GREEDY = SamplingParams(max_new_tokens=200, temperature=0.0)
SETTINGS = SessionSettings(LIMITS, GREEDY, record_routes=True)


@dataclass(frozen=True)
class EngineCall:
    """A request to the engine and its result."""

    request: GenerateRequest
    result: GenerateResult


@dataclass
class RecordingEngine:
    """An engine that records its results before any other code receives them."""

    constrains_tokens: ClassVar[bool] = True

    engine: TransformersEngine
    begun: list[GenerateRequest] = field(default_factory=list)
    answered: list[EngineCall] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.begun.append(request)
        result = await self.engine.generate(request)
        # A copy, so that later changes to the result do not affect the record.
        copied = replace(
            result,
            output_ids=list(result.output_ids),
            output_log_probs=list(result.output_log_probs),
        )
        self.answered.append(
            EngineCall(replace(request, input_ids=list(request.input_ids)), copied)
        )
        return result

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        return await self.engine.score(input_ids, temperature)

    async def abort(self, request_id: str | None = None) -> None:
        await self.engine.abort(request_id)

    async def sync_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        await self.engine.sync_weights(named_tensors, version)

    async def close(self) -> None:
        await self.engine.close()


@dataclass
class Served:
    """A running gateway with one open session."""

    gateway: Gateway
    engine: RecordingEngine
    model: PreTrainedModel
    session: ConversationSession

    def client(
        self, session: ConversationSession | None = None, **options: Any
    ) -> openai.AsyncOpenAI:
        key = (session or self.session).api_key
        return openai.AsyncOpenAI(base_url=self.gateway.base_url, api_key=key, **options)

    def sync_client(
        self, session: ConversationSession | None = None, **options: Any
    ) -> openai.OpenAI:
        key = (session or self.session).api_key
        return openai.OpenAI(base_url=self.gateway.base_url, api_key=key, **options)

    def trajectories(self, session: ConversationSession | None = None) -> list[Trajectory]:
        return [trajectory for _, trajectory in (session or self.session).trajectories("task")]


@asynccontextmanager
async def serving(
    codec: ChatCodec, model: PreTrainedModel, settings: SessionSettings = SETTINGS
) -> AsyncIterator[Served]:
    engine = RecordingEngine(await build_engine(model))
    config = model.config
    shape = ModelShape(config.vocab_size)
    if settings.record_routes:
        shape = ModelShape(
            config.vocab_size,
            config.num_hidden_layers,
            config.num_experts_per_tok,
            config.num_local_experts,
        )
    gateway = Gateway(engine, codec, shape, GatewaySettings(settings))
    await gateway.start()
    try:
        yield Served(gateway, engine, model, gateway.open_session("session"))
    finally:
        await gateway.close()
        await engine.close()


def runs(mask: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the ranges [start, end) in which a mask is True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield int(start), int(end)


def check_capture(served: Served, trajectories: list[Trajectory], *, lost: int = 0) -> None:
    """Check that trained spans and the engine's results correspond one to one.

    Compares with the engine's record and with a plain forward pass over the whole text.

    Args:
        served: gateway to check.
        trajectories: trajectories of its sessions.
        lost: number of results that no client waited for.
    """
    unclaimed = list(served.engine.answered)
    for trajectory in trajectories:
        trajectory.validate()
        ids = trajectory.token_ids.tolist()
        exact = [0.0, *plain_log_probs(served.model, ids)]
        for start, end in runs(trajectory.loss_mask):
            captured = trajectory.rollout_log_probs[start:end]
            # Two results may have equal tokens, with log-probs that differ by the rounding of their
            # batches. Each is claimed once.
            call = min(
                (
                    call
                    for call in unclaimed
                    if call.request.input_ids == ids[:start]
                    and call.result.output_ids == ids[start:end]
                ),
                key=lambda call: np.abs(captured - call.result.output_log_probs).max(),
            )
            unclaimed.remove(call)
            assert captured == pytest.approx(call.result.output_log_probs, abs=1e-7)
            assert captured == pytest.approx(exact[start:end], abs=1e-4)
            if call.result.routed_experts is None:
                assert trajectory.routed_experts is None
                continue
            assert isinstance(trajectory.routed_experts, np.ndarray)
            # A turn that continues another one returns the routes of its new tokens only.
            earlier = [other for other, _ in runs(trajectory.loss_mask) if other < start]
            assert call.request.routes_start > 0 or not earlier
            np.testing.assert_array_equal(
                trajectory.routed_experts[call.request.routes_start : end - 1],
                call.result.routed_experts,
            )
    assert len(unclaimed) == lost


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
