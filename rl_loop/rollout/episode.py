"""Core of an episode: its limits, its clock, the sampling of its turns, and its ending.

The agent loop (``rollout.agent``) and the sessions of the gateway (``gateway.session``) run on it.
Every episode has one of four endings:

    EpisodeCompleted  the agent or its environment ended it
    MalformedTurn     the policy wrote a malformed turn
    LimitReached      a limit ended it: the episode is truncated
    EpisodeFailed     infrastructure failed: the episode is invalid
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from rl_loop.chat.codec import ChatCodec
from rl_loop.config.episode import EpisodeLimits
from rl_loop.data.trajectory import FinishReason, InvalidReason, Trajectory
from rl_loop.engines.protocol import (
    GenerateResult,
    ModelShape,
    RolloutEngine,
    SamplingParams,
    TokenMatcher,
)
from rl_loop.environments.base import StepResult
from rl_loop.infrastructure import InfrastructureError
from rl_loop.rollout.episode_clock import CallTime, EpisodeClock
from rl_loop.rollout.turn_sampler import TurnSampler


@dataclass(frozen=True)
class EpisodeCompleted:
    """The agent or its environment ended the episode."""

    reason: FinishReason = FinishReason.STOP
    """Limit that truncated the last turn of a conversation, if the agent accepted such a turn."""


@dataclass(frozen=True)
class MalformedTurn:
    """The policy wrote a malformed turn."""

    kind: str
    """Kind of the error, such as ``rl_loop.chat.messages.FormatError.kind``."""
    reason: ClassVar[FinishReason] = FinishReason.FORMAT_ERROR


@dataclass(frozen=True)
class LimitReached:
    """A limit ended the episode."""

    reason: FinishReason
    allowed: str
    """Limit with its unit, such as "4 turns"."""


@dataclass(frozen=True)
class EpisodeFailed:
    """An infrastructure failure ended the episode."""

    failure: InfrastructureError
    reason: ClassVar[FinishReason] = FinishReason.ABORT


type Ending = EpisodeCompleted | MalformedTurn | LimitReached | EpisodeFailed


class EpisodeOver(Exception):  # noqa: N818 - control flow, not an error
    """The episode accepts no further turns."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending)
        self.ending = ending


@dataclass(frozen=True)
class TokenBudget:
    """Maximum tokens per turn."""

    tokens: int
    """0 or less if no tokens are left."""
    limit: LimitReached
    """Limit that determines the number."""

    @classmethod
    def of(cls, tokens: int, reason: FinishReason, allowed: str) -> Self:
        """Return the budget of a limit. See ``LimitReached`` for ``reason`` and ``allowed``."""
        return cls(tokens, LimitReached(reason, allowed))


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the policy, of at least one token."""

    result: GenerateResult
    truncated_by: LimitReached | None
    """Limit that ended the turn. None if the policy ended it."""
    time: CallTime = field(default_factory=CallTime, compare=False)
    """Duration of sampling, and time in the engine's queue or before retries."""

    @property
    def reason(self) -> FinishReason:
        """Reason for the end of the turn."""
        return FinishReason.STOP if self.truncated_by is None else self.truncated_by.reason


class Episode:
    """One episode of the policy, in one or several conversations."""

    def __init__(
        self,
        name: str,
        engine: RolloutEngine,
        codec: ChatCodec,
        limits: EpisodeLimits,
        sampling: SamplingParams,
        *,
        shape: ModelShape | None = None,
        record_routes: bool = False,
    ) -> None:
        """Begin an episode. Its clock is stopped until the first turn is sampled.

        Args:
            name: unique name of the episode, which seeds the sampling.
            engine: engine that samples the turns.
            codec: chat format of the policy.
            limits: limits of the episode.
            sampling: temperature, top-p and the token limit of one turn. The stop ids are set here.
            shape: shape of the model, to check the engine's results. None to check the vocabulary
                only.
            record_routes: whether the engine has to return the experts of every token.
        """
        self.name = name
        self.limits = limits
        self.sampling = replace(sampling, stop_token_ids=codec.stop_token_ids)
        self.clock = EpisodeClock(limits.max_episode_seconds)
        self.sampler = TurnSampler(
            engine=engine,
            episode=name,
            sampling=self.sampling,
            clock=self.clock,
            shape=shape or ModelShape(codec.vocabulary.size),
            record_routes=record_routes,
        )
        self.ending: Ending | None = None
        """None while the episode takes turns."""
        self.sampled_tokens = 0
        """Sampled tokens in the turns that were kept."""
        self.reserved_tokens = 0
        """Tokens by which a teacher's prompt is longer, so that its sequence is not too long."""
        self._kept_turns = 0
        self._turns_in_flight = 0
        self._begun_turns = 0

    # ---- turns

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Count a turn while it is sampled. It stays counted if it is kept.

        Yields:
            The number of the turn, from 0.

        Raises:
            EpisodeOver: the episode has ended, or has no turns or no time left.
        """
        if self.ending is not None:
            raise EpisodeOver(self.ending)
        # Turns in flight count, too, because several conversations may sample at the same time.
        limit = self.limits.max_turns
        if self._kept_turns + self._turns_in_flight >= limit:
            raise EpisodeOver(LimitReached(FinishReason.MAX_TURNS, f"{limit} turns"))
        if self.clock.is_over:
            raise EpisodeOver(self.out_of_time())

        # Count turns that are not kept, too. The number seeds the sampling, so a turn with the
        # number of an earlier one would repeat it.
        number = self._begun_turns
        self._begun_turns += 1
        self._turns_in_flight += 1
        try:
            yield number
        finally:
            self._turns_in_flight -= 1

    async def sample(
        self,
        name: str,
        prefix: list[int],
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        routes_start: int = 0,
        new_matcher: Callable[[Sequence[int]], TokenMatcher] | None = None,
    ) -> SampledTurn:
        """Sample a turn. The turn is not kept yet.

        Args:
            name: name of the turn, which seeds the sampling together with the episode's name.
            prefix: token ids before the turn.
            max_new_tokens: limit of this turn in addition to the limits of the episode.
            sampling: sampling parameters of this turn. None for the parameters of the episode.
            routes_start: index of the first token whose experts are returned.
            new_matcher: see ``TurnSampler.sample``.

        Raises:
            EpisodeOver: no tokens are left, or no time to sample a token.
            EngineError: the engine failed repeatedly.
        """
        budget = self._budget(len(prefix), max_new_tokens)
        if budget.tokens <= 0:
            raise EpisodeOver(budget.limit)

        with self.clock.measure() as time:
            result = await self.sampler.sample(
                name,
                prefix,
                budget.tokens,
                sampling,
                routes_start=routes_start,
                new_matcher=new_matcher,
            )
        # The engine returns no token only if the time ran out before the first one.
        if not result.output_ids:
            raise EpisodeOver(self.out_of_time())
        if result.finish_reason is FinishReason.LENGTH:
            return SampledTurn(result, budget.limit, time)
        if result.finish_reason is FinishReason.TIMEOUT:
            return SampledTurn(result, self.out_of_time(), time)
        return SampledTurn(result, None, time)

    def keep(self, result: GenerateResult) -> None:
        """Make a sampled turn a part of the episode."""
        self._kept_turns += 1
        self.sampled_tokens += len(result.output_ids)

    def replace_turn(self, old: GenerateResult, new: GenerateResult) -> None:
        """Count a turn in place of one that was kept."""
        self.sampled_tokens += len(new.output_ids) - len(old.output_ids)

    # ---- limits

    def _budget(self, used: int, max_new_tokens: int | None) -> TokenBudget:
        """Return the budget of a turn after ``used`` tokens: the smallest of all limits."""
        limits = self.limits
        turn_limit = self.sampling.max_new_tokens
        budgets = [
            TokenBudget.of(turn_limit, FinishReason.LENGTH, f"{turn_limit} tokens of a turn"),
            TokenBudget.of(
                limits.max_episode_tokens - used - self.reserved_tokens,
                FinishReason.MAX_EPISODE_TOKENS,
                f"{limits.max_episode_tokens} tokens",
            ),
        ]
        if max_new_tokens is not None:
            allowed = f"{max_new_tokens} tokens of a turn"
            budgets.append(TokenBudget.of(max_new_tokens, FinishReason.LENGTH, allowed))
        if limits.max_sampled_tokens is not None:
            left = limits.max_sampled_tokens - self.sampled_tokens
            allowed = f"{limits.max_sampled_tokens} sampled tokens"
            budgets.append(TokenBudget.of(left, FinishReason.MAX_SAMPLED_TOKENS, allowed))
        # If several limits are equal, the first one gives the reason.
        return min(budgets, key=lambda budget: budget.tokens)

    def out_of_time(self) -> LimitReached:
        """Return the ending of an episode without time left."""
        return LimitReached(FinishReason.TIMEOUT, f"{self.limits.max_episode_seconds:g} s")

    # ---- the end

    def end(self, ending: Ending) -> None:
        """End the episode. The first ending counts."""
        if self.ending is None:
            self.ending = ending

    def conclude(
        self, sequences: Sequence[Trajectory], result: StepResult, ending: Ending
    ) -> Trajectory:
        """Return the trajectory of the episode, with its outcome.

        Args:
            sequences: token sequences of the episode. Each has the finish reason of its last turn.
            result: reward of the episode.
            ending: ending of the episode. All sequences get its reason.
        """
        is_truncated = isinstance(ending, LimitReached)
        masks = self.limits.truncated_episodes == "mask"
        for sequence in sequences:
            # A branch may be truncated in an episode that its agent completed.
            sequence.excluded = masks and (is_truncated or sequence.truncated)
            sequence.finish_reason = ending.reason
            sequence.format_error = result.format_error
            sequence.answer = result.answer
            sequence.reward = result.reward
            sequence.reward_parts = result.reward_parts
            sequence.validate()

        first, *branches = sequences
        first.branches = branches
        # A number of the whole episode, so only its first sequence has it.
        first.recomputed_tokens = self.sampler.recomputed_tokens
        return first


def invalidated(
    sequence: Trajectory, failure: InfrastructureError, failure_source: str = ""
) -> Trajectory:
    """Return the trajectory of an episode that infrastructure ended. It is not trained on.

    Args:
        sequence: tokens of the episode until the failure.
        failure: the failure.
        failure_source: failing component to name if the failure names none.
    """
    sequence.finish_reason = FinishReason.ABORT
    sequence.invalid = InvalidReason(
        failure.component, failure.reason, failure.failure_source or failure_source
    )
    sequence.excluded = True
    sequence.routed_experts = None
    # NaN shows wrong uses of the reward.
    sequence.reward = math.nan
    sequence.reward_parts = {}
    return sequence
