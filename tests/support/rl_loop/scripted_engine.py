"""An engine with a scripted policy, for tests of the agent loop token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import GenerateRequest, GenerateResult


def log_prob_at(position: int) -> float:
    """Return a different number for every position in an episode."""
    return -(position + 1) / 1024


class ScriptedEngine:
    """Samples the scripted turns in sequence, with new weights for every request.

    Args:
        turns: ids of each turn.
        aborts: number of tokens after which each request is aborted; None or the end: not aborted.
        hang: whether a request waits for ``abort`` after it has sampled its tokens.
    """

    def __init__(
        self, turns: Sequence[list[int]], aborts: Iterable[int | None] = (), *, hang: bool = False
    ) -> None:
        self._turns, self._aborts, self._hang = [list(turn) for turn in turns], list(aborts), hang
        self._aborted = asyncio.Event()
        self._processed: list[int] = []
        self.requests: list[GenerateRequest] = []
        self.results: list[GenerateResult] = []
        self.aborts_asked = 0
        self.returns_routes = True

    async def close(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        if request.on_begin is not None:
            request.on_begin()
        version = len(self.requests)
        room = request.sampling.max_new_tokens
        cut = self._aborts.pop(0) if self._aborts else None
        turn = self._turns[0]
        n = min(len(turn), room, room if cut is None else cut)
        output, self._turns[0] = turn[:n], turn[n:]
        if cut == n and output[-1:] != turn[-1:]:
            reason = FinishReason.ABORT
        else:
            reason = FinishReason.LENGTH if self._turns[0] else FinishReason.STOP
            self._turns.pop(0)
        if self._hang:
            await self._aborted.wait()
            reason = FinishReason.ABORT
        await asyncio.sleep(0)
        start = len(request.input_ids)
        routes = None
        if request.return_routed_experts and self.returns_routes and n:
            positions = np.arange(request.routes_start, start + n - 1, dtype=np.int16)
            routes = np.stack([positions, np.full_like(positions, version)], axis=1)[:, None]
        result = GenerateResult(
            output,
            [log_prob_at(start + i) for i in range(n)],
            reason,
            [WeightVersionSpan(0, n, version)] if n else [],
            routes,
            cached_tokens=max(
                0, len(self._processed) - 1
            ),  # the last token was sampled and has not been an input yet
        )
        self._processed = request.input_ids + output
        self.results.append(result)
        return result

    async def abort(self, request_id: str | None = None) -> None:
        self.aborts_asked += 1
        if request_id is None or request_id == self.requests[-1].request_id:
            self._aborted.set()

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        return [log_prob_at(i) for i in range(1, len(input_ids))]

    async def sync_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None: ...


class EngineOfMany:
    """A scripted engine for each episode."""

    def __init__(self, turns: list[list[int]]) -> None:
        self._turns = turns
        self._engines: dict[str, ScriptedEngine] = {}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        engine = self._engines.setdefault(request.episode, ScriptedEngine(self._turns))
        return await engine.generate(request)

    async def abort(self, request_id: str | None = None) -> None: ...

    async def close(self) -> None: ...
