"""Infrastructure failures: failures that the policy cannot cause.

They are failures of an engine, the sandbox, a tool's server, a checker or the environment. An
infrastructure failure is never a reward. The failed operation is retried a few times. An episode
that cannot continue is *invalid*: it enters no baseline, no gradient and no evaluation. It is
counted under ``rollout/invalid_fraction/COMPONENT`` and ``rollout/invalid_fraction/COMPONENT/SOURCE``.

A policy must not be able to cause such a failure, because it could then avoid a bad reward by
breaking things. A failure that the policy causes, such as an endless tool call, ends with a reward.
An error counts as an infrastructure failure only with evidence: a counter of the kernel, or a
control question that fails too.
"""

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from megatron_gptoss.user_error import UserError

if TYPE_CHECKING:
    from rl_loop.data.trajectory import Trajectory, TrajectoryGroup

COMPONENTS = ("engine", "sandbox", "tool", "checker", "environment")
"""Components that can fail: the names under which invalid episodes are counted."""


class InfrastructureError(RuntimeError):
    """Failure that the policy cannot cause.

    Environments raise it for failures that they recognize. Any other exception of a tool or a
    checker counts as such a failure, too.
    """

    def __init__(self, component: str, reason: str, failure_source: str = "") -> None:
        """Create a failure.

        Args:
            component: one of COMPONENTS.
            reason: description of the failure for people.
            failure_source: name of the component's failing part, equal for equal failures.
        """
        super().__init__(component, reason, failure_source)
        self.component = component
        self.reason = reason
        self.failure_source = failure_source

    def __str__(self) -> str:
        return f"{self.component}: {self.reason}"


class EngineError(InfrastructureError):
    """Failed engine. The message names the request and, with SGLang, the server."""

    def __init__(self, request_id: str, what: str, server: str = "") -> None:
        where = f"{server}: " if server else ""
        super().__init__("engine", f"request {request_id}: {where}{what}", server)
        # pickle calls the class with ``args``. Without this line it would pass component, reason
        # and failing component.
        self.args = (request_id, what, server)


class InfrastructureOutageError(UserError, RuntimeError):
    """Too many episodes were invalid, so the run ends. The message names the failing component."""


def root_cause(error: BaseException) -> BaseException:
    """Return an actor's exception instead of Ray's wrapper, whose message is a traceback."""
    # Without Ray there are no actors, and its exceptions need not be imported.
    ray: Any = sys.modules.get("ray.exceptions")
    if ray is None:
        return error

    # Every actor on the way from the failure to this process adds a wrapper.
    while (
        isinstance(error, ray.RayTaskError)
        and isinstance(error.cause, BaseException)
        and error.cause != error
    ):
        error = error.cause
    return error


def describe(error: BaseException) -> str:
    """Return the class of an exception's cause and the first line of its message, in one line."""
    error = root_cause(error)
    name = type(error).__name__
    # Some libraries print whole tensors into their messages.
    first_line = str(error).split("\n")[0][:500]
    return f"{name}: {first_line}" if first_line else name


MAX_STREAK = 64
"""Invalid episodes that end a run at once, before the end of a step. They are counted over
consecutive groups without a valid episode."""


class CircuitBreaker:
    """Circuit breaker: ends a run with broken infrastructure, even if a few episodes work.

    One breaker counts the episodes of one call that runs groups, usually one step.
    """

    def __init__(self, max_fraction: float, max_streak: int | None) -> None:
        """Start with no episodes.

        Args:
            max_fraction: maximum share of invalid episodes.
            max_streak: number of invalid episodes that end the run at once, in consecutive groups
                without a valid one, in the order of completion. None for no limit.
        """
        self._max_fraction = max_fraction
        self._max_streak = max_streak
        self._episodes = 0
        self._streak = 0
        self._invalid: list[Trajectory] = []

    @classmethod
    def with_streak(cls, max_fraction: float) -> Self:
        """Return a breaker that ends the run after ``MAX_STREAK`` consecutive invalid episodes."""
        return cls(max_fraction, MAX_STREAK)

    def observe(self, group: "TrajectoryGroup") -> None:
        """Count the episodes of a group. Raises InfrastructureOutageError if the streak is too long."""
        self._episodes += len(group.trajectories) + len(group.invalid)
        self._invalid += group.invalid

        # One valid episode shows that the infrastructure works.
        if group.trajectories:
            self._streak = 0
        else:
            self._streak += len(group.invalid)
        if self._max_streak is not None and self._streak >= self._max_streak:
            limit = f"{self._streak} in a row, and the limit is {self._max_streak}"
            raise InfrastructureOutageError(self._message(limit))

    def check_fraction(self) -> None:
        """Raise InfrastructureOutageError if too many of all episodes were invalid."""
        if len(self._invalid) > self._max_fraction * self._episodes:
            raise InfrastructureOutageError(
                self._message(f"rollout.max_invalid_fraction is {self._max_fraction:g}")
            )

    def _message(self, limit: str) -> str:
        """Return the message: failures per component, the most frequent source, and a reason."""
        failures = [episode.invalid for episode in self._invalid if episode.invalid is not None]
        components = Counter(failure.component for failure in failures)

        causes = []
        for component, count in components.most_common():
            component_failures = [failure for failure in failures if failure.component == component]
            # Name the most frequent source and its most frequent reason, because the first ones may
            # be rare.
            failure_sources = Counter(failure.failure_source for failure in component_failures)
            failure_source, times = failure_sources.most_common(1)[0]

            reasons = Counter(
                failure.reason
                for failure in component_failures
                if failure.failure_source == failure_source
            )
            reason, _ = reasons.most_common(1)[0]
            named = f" ({failure_source} in {times})" if failure_source else ""
            causes.append(f"{component} in {count}{named}, such as: {reason}")

        ended = f"infrastructure failures ended {len(self._invalid)} of {self._episodes} episodes ({limit})"
        advice = (
            "These episodes were not trained on. Fix the cause, then continue a training run "
            "with --resume"
        )
        return f"{ended}: {'; '.join(causes)}. {advice}"
