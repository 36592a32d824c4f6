"""An engine whose tokens depend only on the episode and the position.

Weights, batches and the times of aborts do not affect the sampled tokens, so episodes can be
compared for any schedule.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

import torch

from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import GenerateRequest, GenerateResult

STOP_CHANCE = 1 / 64
"""Probability that a token ends the turn."""


class TimelessEngine:
    """The engine.

    A request that is aborted by new weights has sampled half of its tokens.

    Args:
        stop_token_ids: tokens that end a turn.
        seconds_of: duration of a request by its episode and the weight version at its start; None
            for ``seconds``.
        seconds: duration of all requests.
        ends_from: requests that start with an earlier weight version end only by an abort.
    """

    def __init__(
        self,
        stop_token_ids: tuple[int, ...],
        seconds_of: Callable[[str, int], float] | None = None,
        *,
        seconds: float = 0.0,
        ends_from: int = 0,
    ) -> None:
        self.stop_token_ids = stop_token_ids
        self.ends_from = ends_from
        self.seconds_of = seconds_of or (lambda episode, version: seconds)
        self.version = 0
        self.syncs: list[int] = []
        self.begun: list[tuple[str, int]] = []
        """Episode of every request, and the weight version at its start."""
        self._aborted = asyncio.Event()

    def token_at(self, episode: str, position: int) -> tuple[int, float]:
        """Return id and log-prob of a token of an episode."""
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

        seconds = self.seconds_of(request.episode, version)
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
        """Return the tokens of a request that is not aborted."""
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
