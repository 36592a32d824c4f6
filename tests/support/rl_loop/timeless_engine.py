"""An engine whose tokens depend on the episode and the place of the token, and on nothing else.

Neither weights nor batches nor the moments at which requests are aborted change what it samples, so that episodes can
be compared however they were scheduled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

import torch

from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import GenerateRequest, GenerateResult

STOP_CHANCE = 1 / 64
"""That a token ends the turn."""


class TimelessEngine:
    """``seconds_of``: how long a request takes, by its episode; ``seconds`` if that is the same for all. One that is
    aborted before, by new weights, has sampled half of its tokens. Requests that begin with weights before
    ``ends_from`` end in no other way."""

    def __init__(
        self,
        stop_token_ids: tuple[int, ...],
        seconds_of: Callable[[str], float] | None = None,
        *,
        seconds: float = 0.0,
        ends_from: int = 0,
    ) -> None:
        self.stop_token_ids = stop_token_ids
        self.ends_from = ends_from
        self.seconds_of = seconds_of or (lambda episode: seconds)
        self.version = 0
        self.syncs: list[int] = []
        self.begun: list[tuple[str, int]] = []
        """Episode of every request, and the version with which it began."""
        self._aborted = asyncio.Event()

    def token_at(self, episode: str, position: int) -> tuple[int, float]:
        """Id and log-prob of a token of an episode."""
        chance = random.Random(f"{episode}/{position}")
        if chance.random() < STOP_CHANCE:
            return self.stop_token_ids[0], -3.0
        return chance.randrange(20, 90), -chance.uniform(1.0, 6.0)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.on_begin is not None:
            request.on_begin()
        version = self.version
        self.begun.append((request.episode, version))
        wanted = self._whole_turn(request)

        seconds = self.seconds_of(request.episode)
        if version < self.ends_from:
            seconds = 600.0
        tokens = len(wanted)
        try:
            await asyncio.wait_for(self._aborted.wait(), seconds)
            tokens = len(wanted) // 2
        except TimeoutError:
            pass

        sampled = wanted[:tokens]
        is_whole = tokens == len(wanted)
        stopped = is_whole and sampled[-1][0] in self.stop_token_ids
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return GenerateResult(
            output_ids=[token for token, _ in sampled],
            output_log_probs=[log_prob for _, log_prob in sampled],
            finish_reason=reason if is_whole else FinishReason.ABORT,
            weight_versions=[WeightVersionSpan(0, tokens, version)] if tokens else [],
        )

    def _whole_turn(self, request: GenerateRequest) -> list[tuple[int, float]]:
        """What is sampled if nothing comes between."""
        start = len(request.input_ids)
        turn: list[tuple[int, float]] = []
        for position in range(start, start + request.sampling.max_new_tokens):
            turn.append(self.token_at(request.episode, position))
            if turn[-1][0] in self.stop_token_ids:
                break
        return turn

    async def sync_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        self.set_min_version(version)

    def set_min_version(self, version: int) -> None:
        self.version = version
        self.syncs.append(version)
        self._aborted.set()
        self._aborted = asyncio.Event()

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        return [-1.0] * (len(input_ids) - 1)

    async def abort(self, request_id: str | None = None) -> None:
        self._aborted.set()
        self._aborted = asyncio.Event()

    async def close(self) -> None: ...
