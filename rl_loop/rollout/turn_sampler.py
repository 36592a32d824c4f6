"""Samples the turns of one episode from an engine that is not trusted.

Results are checked, and faults are retried.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    ModelShape,
    RolloutEngine,
    SamplingParams,
    TokenMatcher,
    check_result,
    fault_in_log_probs,
)
from rl_loop.infrastructure import EngineError, describe
from rl_loop.rollout.episode_clock import EpisodeClock, end_task

FAULT_RETRY_DELAYS = (0.1, 1.0, 4.0)
"""Seconds before each retry of a request with a fault. The fault after the last retry is raised."""
ABORT_RETRY_DELAYS = (0.0, 0.02, 0.1, 0.5, 2.0, 5.0, 5.0, 5.0)
"""Seconds before a request that was aborted without a token is sent again, by the number of such
aborts in sequence. The first delay is 0, because a weight sync aborts once. The later delays keep
an engine that always aborts from getting thousands of requests per second."""
ABORT_SECONDS = 10.0
"""Time limit of an engine for ending an aborted request."""


QUEUE_SECONDS = 3600.0
"""Maximum time of a request in the engine's queue. A longer wait is an infrastructure failure."""


@dataclass
class TurnSampler:
    """Samples and scores for one episode."""

    engine: RolloutEngine
    episode: str
    """Unique name of the episode. Requests are named ``EPISODE/turn/tokens of the turn so far``."""
    sampling: SamplingParams
    clock: EpisodeClock
    shape: ModelShape
    """Shape of the model, to check the engine's results."""
    record_routes: bool = False
    """True if the engine has to return the experts of every token."""
    recomputed_tokens: int = 0
    """Tokens of the episode that an engine computed again because a turn was interrupted."""

    async def sample(
        self,
        turn: str,
        prefix: list[int],
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        routes_start: int = 0,
        new_matcher: Callable[[Sequence[int]], TokenMatcher] | None = None,
    ) -> GenerateResult:
        """Sample one turn.

        If the engine aborts the turn, for instance to load new weights, sampling continues from the
        tokens so far. If the time of the episode is over, the turn ends with the tokens so far,
        possibly none, and FinishReason.TIMEOUT.

        Args:
            turn: name of the turn. The seed depends on the names of episode and turn, so the result
                is a function of both names and the weights.
            prefix: token ids before the turn.
            max_new_tokens: limit of the turn.
            sampling: sampling parameters of the turn. None for ``self.sampling``.
            routes_start: index of the first token whose experts are returned.
            new_matcher: returns the constraint behind the first tokens of the turn. None to sample
                freely.

        Raises:
            EngineError: the engine failed repeatedly.
        """
        sampled = GenerateResult([], [], FinishReason.ABORT)
        idle_aborts = 0
        while sampled.finish_reason is FinishReason.ABORT:
            room = max_new_tokens - len(sampled.output_ids)
            if room == 0:
                return replace(sampled, finish_reason=FinishReason.LENGTH)
            if self.clock.is_over:
                return replace(sampled, finish_reason=FinishReason.TIMEOUT)

            rest = await self._sample_rest(
                f"{self.episode}/{turn}", prefix, sampled, room, sampling, routes_start, new_matcher
            )
            if sampled.output_ids and rest.output_ids:
                # All tokens except the last one were inputs before the abort.
                processed = len(prefix) + len(sampled.output_ids) - 1
                self.recomputed_tokens += max(0, processed - rest.cached_tokens)

            if rest.finish_reason is not FinishReason.ABORT or rest.output_ids:
                idle_aborts = 0
            elif not self.clock.is_over:
                if idle_aborts == len(ABORT_RETRY_DELAYS):
                    name = f"{self.episode}/{turn}/{len(sampled.output_ids)}"
                    raise EngineError(
                        name,
                        f"the engine aborted it {idle_aborts + 1} times in sequence before its "
                        "first token",
                    )
                await self.clock.sleep(ABORT_RETRY_DELAYS[idle_aborts])
                idle_aborts += 1
            sampled = _join_results(sampled, rest)
        return sampled

    async def score(self, token_ids: list[int]) -> list[float]:
        """Return log-probs (natural log) of ``token_ids[1:]`` at the sampling temperature.

        Raises:
            EngineError: the engine failed repeatedly.
        """
        name = f"{self.episode}/score"
        # Greedy sampling has a temperature of 0, at which log-probs are not defined.
        temperature = self.sampling.temperature or 1.0
        for delay in (*FAULT_RETRY_DELAYS, None):
            try:
                log_probs = await self.engine.score(token_ids, temperature=temperature)
                self._check_scores(name, log_probs, len(token_ids))
                return log_probs
            except Exception as error:
                await self._wait_or_raise(name, error, delay)
        raise AssertionError("the last fault is raised")

    @staticmethod
    def _check_scores(name: str, log_probs: list[float], tokens: int) -> None:
        """Raise EngineError if these cannot be the log-probs of ``tokens`` tokens."""
        if len(log_probs) != tokens - 1:
            raise EngineError(
                name, f"the engine returned {len(log_probs)} log-probs for {tokens} tokens"
            )
        if log_probs:
            fault = fault_in_log_probs(log_probs)
            if fault is not None:
                raise EngineError(name, fault)

    async def _sample_rest(
        self,
        turn: str,
        prefix: list[int],
        begin: GenerateResult,
        room: int,
        sampling: SamplingParams | None,
        routes_start: int,
        new_matcher: Callable[[Sequence[int]], TokenMatcher] | None,
    ) -> GenerateResult:
        """Sample at most ``room`` tokens after ``prefix`` and the ``begin`` of the turn."""
        done = begin.output_ids
        name = f"{turn}/{len(done)}"
        # The name contains the number of tokens, because the rest of an aborted turn must not reuse
        # the random numbers of its beginning.
        seeded = replace(sampling or self.sampling, max_new_tokens=room, seed=_derive_seed(name))
        # Every token keeps the experts of its first forward pass, which computed the returned
        # log-probs. An engine that continues a turn may choose others for the tokens before.
        if begin.routed_experts is not None:
            routes_start += len(begin.routed_experts)
        request = GenerateRequest(
            name,
            prefix + done,
            seeded,
            return_routed_experts=self.record_routes,
            routes_start=routes_start if self.record_routes else 0,
            new_matcher=None if new_matcher is None else partial(new_matcher, done),
        )

        for attempt, delay in enumerate((*FAULT_RETRY_DELAYS, None), start=1):
            try:
                result = await self._generate(request)
                check_result(request, result, self.shape)
                return result
            except Exception as error:
                await self._wait_or_raise(name, error, delay)
            # Use another id, because the engine may still run the previous attempt.
            request = replace(request, request_id=f"{name}.{attempt}")
        raise AssertionError("the last fault is raised")

    async def _wait_or_raise(self, name: str, error: Exception, delay: float | None) -> None:
        """Wait before the next attempt.

        Raises:
            EngineError: there is no further attempt, or it would fail, too.
        """
        is_of_request = isinstance(error, ValueError)  # Every attempt would raise it.
        if delay is None or is_of_request:
            fault = error if isinstance(error, EngineError) else EngineError(name, describe(error))
            raise fault from error
        await self.clock.sleep(delay)

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        """Send one request.

        The clock is stopped until the engine begins the request. When the time of the episode is
        over, the engine gets an abort.
        """
        begun = asyncio.Event()

        def begin() -> None:
            self.clock.start()
            begun.set()

        # Time in the engine's queue does not count as time of the episode.
        self.clock.stop()
        running: asyncio.Future[GenerateResult] = asyncio.ensure_future(
            self.engine.generate(replace(request, on_begin=begin))
        )
        beginning = asyncio.ensure_future(begun.wait())
        either: set[asyncio.Future[Any]] = {running, beginning}
        try:
            await asyncio.wait(either, timeout=QUEUE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and not begun.is_set():
                raise EngineError(
                    request.request_id, f"the engine did not start it within {QUEUE_SECONDS:g} s"
                )

            # An engine that answers at once may not have reported the beginning.
            self.clock.start()
            await asyncio.wait({running}, timeout=max(0.0, self.clock.left))
            if not running.done():
                await self._abort(request.request_id, running)
            if running.cancelled():
                raise EngineError(request.request_id, "cancelled by the engine")
            return running.result()
        finally:
            await end_task(beginning)
            await end_task(running)
            # A request that ends in the engine's queue has left the clock stopped.
            self.clock.start()

    async def _abort(self, request_id: str, running: "asyncio.Future[GenerateResult]") -> None:
        """Send an abort to the engine, and wait until the request has ended.

        Raises:
            EngineError: the request does not end.
        """

        async def ask() -> None:
            # An error here does not matter if the request ends.
            with suppress(Exception):
                await self.engine.abort(request_id)

        # A task, because an engine that hangs would not answer the abort either.
        asking = asyncio.ensure_future(ask())
        # Wait for the request, not for the answer to the abort, which may never come.
        await asyncio.wait({running}, timeout=ABORT_SECONDS)
        await end_task(asking)
        if not running.done():
            what = (
                "it exceeded the time of the episode, and the engine did not end it within "
                f"{ABORT_SECONDS:g} s after an abort"
            )
            raise EngineError(request_id, what)


def _join_results(begin: GenerateResult, rest: GenerateResult) -> GenerateResult:
    """Join two parts of one turn."""
    done = len(begin.output_ids)
    return GenerateResult(
        output_ids=begin.output_ids + rest.output_ids,
        output_log_probs=begin.output_log_probs + rest.output_log_probs,
        finish_reason=rest.finish_reason,
        weight_versions=begin.weight_versions + shift_spans(rest.weight_versions, done),
        routed_experts=_join_routes(begin, rest),
        # After an abort the cache also holds the tokens of this turn.
        cached_tokens=begin.cached_tokens if done else rest.cached_tokens,
    )


def _join_routes(begin: GenerateResult, rest: GenerateResult) -> np.ndarray | None:
    """Join the experts for two parts of one turn, both [tokens, layers, top_k].

    Those of ``rest`` begin with the first token that ``begin`` has no experts of.
    """
    # A part without tokens may have been aborted at any point of its prompt.
    if not rest.output_ids or rest.routed_experts is None:
        return begin.routed_experts
    if begin.routed_experts is None:
        return rest.routed_experts
    return np.concatenate([begin.routed_experts, rest.routed_experts])


def shift_spans(spans: list[WeightVersionSpan], by: int) -> list[WeightVersionSpan]:
    """Return the spans, shifted by ``by`` tokens."""
    return [WeightVersionSpan(span.start + by, span.end + by, span.version) for span in spans]


def _derive_seed(request_id: str) -> int:
    """Hash a name to 63 bits, so that the seed fits a signed 64-bit integer."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    # Python's hash() of strings differs between processes.
    return int.from_bytes(digest) >> 1
