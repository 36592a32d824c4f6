"""Samples the turns of one episode from an engine that is not believed: every answer is checked, faults are retried."""

import asyncio
import hashlib
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    ModelShape,
    RolloutEngine,
    SamplingParams,
    check_result,
    fault_in_log_probs,
)
from rl_loop.infrastructure import EngineFault, describe
from rl_loop.rollout.episode_clock import EpisodeClock, end_task

FAULT_PAUSES = (0.1, 1.0, 4.0)
"""Seconds before a request that met a fault is sent again; after the last time the fault stays."""
ABORT_PAUSES = (0.0, 0.02, 0.1, 0.5, 2.0, 5.0, 5.0, 5.0)
"""Seconds before a request goes on that was aborted without a token, once, twice and so on in a row. A weight sync
aborts once, so the first time costs nothing; an engine that does nothing else is not asked thousands of times a
second."""
ABORT_SECONDS = 10.0
"""How long an engine may take to end a request that it was told to abort."""


@dataclass
class TurnSampler:
    """Of one episode."""

    engine: RolloutEngine
    episode: str
    """Unique to the episode: requests are named ``EPISODE/turn/tokens of the turn so far``."""
    sampling: SamplingParams
    clock: EpisodeClock
    shape: ModelShape
    queue_seconds: float
    """How long a request may wait in the engine's queue."""
    routed_experts: bool = False

    async def sample(self, turn: str, prefix: list[int], max_new_tokens: int) -> GenerateResult:
        """One turn after ``prefix``, resumed from its own tokens as often as the engine aborts it (to take new weights,
        say). Out of time, it ends with what there is, perhaps nothing, and FinishReason.TIMEOUT.

        The turn is a function of episode and turn (and of the weights): they give the seed. Raises EngineFault."""
        sampled = GenerateResult([], [], FinishReason.ABORT)
        idle_aborts = 0
        while sampled.finish_reason is FinishReason.ABORT:
            room = max_new_tokens - len(sampled.output_ids)
            if room == 0:
                return replace(sampled, finish_reason=FinishReason.LENGTH)
            if self.clock.is_over:
                return replace(sampled, finish_reason=FinishReason.TIMEOUT)

            part = await self._sample_rest(f"{self.episode}/{turn}", prefix, sampled.output_ids, room)
            aborted_idle = part.finish_reason is FinishReason.ABORT and not part.output_ids
            if aborted_idle and not self.clock.is_over:
                if idle_aborts == len(ABORT_PAUSES):
                    what = f"aborted {idle_aborts + 1} times in a row without a token"
                    raise EngineFault(f"{self.episode}/{turn}/{len(sampled.output_ids)}", what)
                await self.clock.pause(ABORT_PAUSES[idle_aborts])
                idle_aborts += 1
            elif not aborted_idle:
                idle_aborts = 0
            sampled = _joined(sampled, part)
        return sampled

    async def score(self, token_ids: list[int]) -> list[float]:
        """Log-probs of ``token_ids[1:]`` at the sampling temperature. Raises EngineFault."""
        name = f"{self.episode}/score"
        for pause in (*FAULT_PAUSES, None):
            try:
                log_probs = await self.engine.score(token_ids, temperature=self.sampling.temperature or 1.0)
                if len(log_probs) != len(token_ids) - 1:
                    raise EngineFault(name, f"{len(log_probs)} log-probs came back for {len(token_ids)} tokens")
                if log_probs and (fault := fault_in_log_probs(log_probs)) is not None:
                    raise EngineFault(name, fault)
                return log_probs
            except Exception as error:
                await self._pause_or_raise(name, error, pause)
        raise AssertionError("the last fault is raised")

    async def _sample_rest(self, turn: str, prefix: list[int], done: list[int], room: int) -> GenerateResult:
        """What the engine says after ``prefix`` and the tokens ``done`` of the turn, in ``room`` tokens at most."""
        name = f"{turn}/{len(done)}"
        # the rest of an aborted turn must not see the random numbers of its beginning again
        sampling = replace(self.sampling, max_new_tokens=room, seed=_seed_of(name))
        request = GenerateRequest(name, prefix + done, sampling, self.routed_experts)

        for attempt, pause in enumerate((*FAULT_PAUSES, None), start=1):
            try:
                result = await self._generate(request)
                check_result(request, result, self.shape)
                return result
            except Exception as error:
                await self._pause_or_raise(name, error, pause)
            request = replace(request, request_id=f"{name}.{attempt}")  # an engine may still be at the one before
        raise AssertionError("the last fault is raised")

    async def _pause_or_raise(self, name: str, error: Exception, pause: float | None) -> None:
        """Wait before the next attempt; without one, or for what no attempt can mend, raise EngineFault."""
        fault = error if isinstance(error, EngineFault) else EngineFault(name, describe(error))
        if pause is None or isinstance(error, ValueError):  # a ValueError is of the request
            raise fault from error
        await self.clock.pause(pause)

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        """One request. The clock stands until the engine begins it; out of time, the engine is told to abort."""
        begun = asyncio.Event()

        def begin() -> None:
            self.clock.start()
            begun.set()

        self.clock.stop()
        running: asyncio.Future[GenerateResult] = asyncio.ensure_future(
            self.engine.generate(replace(request, on_begin=begin))
        )
        beginning = asyncio.ensure_future(begun.wait())
        either: set[asyncio.Future[Any]] = {running, beginning}
        try:
            await asyncio.wait(either, timeout=self.queue_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and not begun.is_set():
                raise EngineFault(request.request_id, f"not begun within {self.queue_seconds:g} s")

            self.clock.start()
            await asyncio.wait({running}, timeout=max(0.0, self.clock.left))
            if not running.done():
                await self._abort(request.request_id, running)
            if running.cancelled():
                raise EngineFault(request.request_id, "cancelled by the engine")
            return running.result()
        finally:
            await end_task(beginning)
            await end_task(running)

    async def _abort(self, request_id: str, running: "asyncio.Future[GenerateResult]") -> None:
        """Tell the engine to abort, and wait until the request has ended. Raises EngineFault if it does not."""

        async def ask() -> None:
            with suppress(Exception):  # what counts is whether the request ends
                await self.engine.abort(request_id)

        asking = asyncio.ensure_future(ask())
        await asyncio.wait({running}, timeout=ABORT_SECONDS)
        await end_task(asking)
        if not running.done():
            raise EngineFault(request_id, f"neither ended in time nor within {ABORT_SECONDS:g} s of its abort")


def _joined(begin: GenerateResult, rest: GenerateResult) -> GenerateResult:
    """Two parts of one turn as one."""
    done = len(begin.output_ids)
    return GenerateResult(
        output_ids=begin.output_ids + rest.output_ids,
        output_log_probs=begin.output_log_probs + rest.output_log_probs,
        finish_reason=rest.finish_reason,
        weight_versions=begin.weight_versions + shifted(rest.weight_versions, done),
        routed_experts=first_routes(begin.routed_experts, rest.routed_experts),
        cached_tokens=begin.cached_tokens if done else rest.cached_tokens,
    )


def first_routes(earlier: np.ndarray | None, latest: np.ndarray | None) -> np.ndarray | None:
    """Every token keeps the experts that it was first processed with: they made the log-probs that were returned."""
    if earlier is None or latest is None:
        return latest if earlier is None else earlier
    return np.concatenate([earlier, latest[len(earlier) :]])


def shifted(spans: list[WeightVersionSpan], by: int) -> list[WeightVersionSpan]:
    """The spans ``by`` tokens further on."""
    return [WeightVersionSpan(span.start + by, span.end + by, span.version) for span in spans]


def _seed_of(request_id: str) -> int:
    """63 bits: what a torch generator takes."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest()) >> 1
