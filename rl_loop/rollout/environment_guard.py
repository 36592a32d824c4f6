"""Calls the methods of an environment.

They are user code, so they may raise any exception or never return.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from numbers import Real
from typing import Any, assert_never

from rl_loop.chat.messages import ParsedMessage
from rl_loop.environments.base import Environment, StepResult
from rl_loop.infrastructure import InfrastructureError, describe
from rl_loop.rollout.episode import (
    Ending,
    EpisodeCompleted,
    EpisodeFailed,
    LimitReached,
    MalformedTurn,
)
from rl_loop.rollout.episode_clock import EpisodeClock, OutOfTimeError
from rl_loop.threads import call_user_code

OPEN_SECONDS = 300.0
"""Time limit of ``Environment.open``. It exceeds the limits of environments, whose messages name
the cause."""
CLOSE_SECONDS = 30.0
"""Time limit of ``Environment.close``."""
METHOD_SECONDS = 60.0
"""Minimum time limit of every method except ``open``, ``close`` and ``step``.

On a busy machine even a method that computes nothing may take seconds.
"""

logger = logging.getLogger(__name__)


class EnvironmentGuard:
    """Environment of one episode, whose errors become InfrastructureError."""

    def __init__(self, environment: Environment, clock: EpisodeClock, seconds: float) -> None:
        """Guard an environment.

        Args:
            environment: environment of the episode.
            clock: clock of the episode, which limits ``step``.
            seconds: time limit of each method except ``open``, ``close`` and ``step``, at least
                METHOD_SECONDS.
        """
        self.environment = environment
        self._clock = clock
        self._seconds = max(seconds, METHOD_SECONDS)

    @property
    def name(self) -> str:
        """Name of the environment's class."""
        return type(self.environment).__name__

    async def open(self) -> None:
        """Open the environment, with the clock stopped. Raises InfrastructureError."""
        # The time limit of an episode does not include the start of its environment. The clock runs
        # if a failed step opens the environment again.
        was_running = self._clock.is_running
        self._clock.stop()
        try:
            await _call_with_limit(self.environment.open(), "open", OPEN_SECONDS)
        finally:
            if was_running:
                self._clock.start()

    async def close(self, task_id: str) -> None:
        """Close the environment. Errors are logged only, because the episode has ended."""
        try:
            await asyncio.wait_for(self.environment.close(), CLOSE_SECONDS)
        except Exception as error:
            logger.warning("%s.close() failed for task %s: %s", self.name, task_id, describe(error))

    async def step(self, messages: Sequence[ParsedMessage]) -> StepResult:
        """Run ``Environment.step`` within the time of the episode.

        Raises InfrastructureError and OutOfTimeError.
        """
        try:
            result = await self._clock.limit(self.environment.step(messages))
        # The caller handles these two errors. All other errors are faults of the environment.
        except (InfrastructureError, OutOfTimeError):
            raise
        except Exception as error:
            raise InfrastructureError("environment", f"step(): {describe(error)}") from error

        # Rewards count only at the end, so only the end is checked for a finite reward. A result of
        # another type is rejected there, too.
        if isinstance(result, StepResult) and not result.done:
            return result
        return check_outcome(result)

    async def call_method[**P, T](
        self, method: Callable[P, T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Call a method on a thread, so that a method that hangs does not block other episodes.

        Raises:
            InfrastructureError: the method raises an exception, or exceeds the time limit.
        """
        name = getattr(method, "__name__", "a method")
        call = call_user_code(partial(method, *arguments, **options), f"{self.name}.{name}")
        return await _call_with_limit(call, name, self._seconds)

    async def reward_ending(self, ending: Ending) -> StepResult:
        """Return the reward of an episode that ended without an answer.

        Args:
            ending: ending of the episode.

        Raises:
            InfrastructureError: infrastructure ended the episode, or the environment fails.
        """
        match ending:
            case MalformedTurn(kind):
                result = await self.call_method(self.environment.end_with_format_error, kind)
            case LimitReached() | EpisodeCompleted():
                # An external agent completes an episode without an answer if it just stops.
                result = await self.call_method(self.environment.end_truncated)
            case EpisodeFailed(failure):
                raise failure
            case _:
                assert_never(ending)
        return check_outcome(result)


async def _call_with_limit[T](call: Coroutine[Any, Any, T], name: str, seconds: float) -> T:
    """Await the call of a method.

    Raises:
        InfrastructureError: if the method raises an exception, or exceeds the time limit.
    """
    try:
        return await asyncio.wait_for(call, seconds)
    except InfrastructureError:
        raise
    except TimeoutError:
        reason = f"{name}() did not return within {seconds:g} s"
        raise InfrastructureError("environment", reason) from None
    except Exception as error:
        raise InfrastructureError("environment", f"{name}(): {describe(error)}") from error


def check_outcome(result: StepResult) -> StepResult:
    """Return the result with which an episode ends, unchanged.

    Raises:
        InfrastructureError: ``result`` is not a StepResult, or its reward or a reward part is not a
            finite number.
    """
    if not isinstance(result, StepResult):
        reason = f"an episode ended with {type(result).__name__}, expected a StepResult"
        raise InfrastructureError("environment", reason)

    # One NaN would spread to the advantages of the whole group.
    for name, value in {"reward": result.reward, **result.reward_parts}.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            reason = f"{name} is {value!r}, expected a finite number"
            raise InfrastructureError("checker", reason)
    return result
