"""Failures that the policy cannot cause: of the engine, the sandbox, a tool's server, a checker,
the environment.

An infrastructure failure is never a reward. What failed is tried again a few times; an episode
that cannot go on is *invalid*: it enters no baseline, no gradient and no evaluation, and is
counted under ``rollout/invalid/COMPONENT`` and ``rollout/invalid/COMPONENT/CULPRIT``.

A policy must not be able to cause one, because breaking things would be a way out of a task that
goes badly. What it does cause, an endless tool call for instance, ends with a reward. A failure is
one of the infrastructure only on evidence: a counter of the kernel, or a question of our own that
fails too."""

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from megatron_gptoss.user_error import UserError

if TYPE_CHECKING:
    from rl_loop.data.trajectory import Trajectory, TrajectoryGroup

COMPONENTS = ("engine", "sandbox", "tool", "checker", "environment")
"""What can fail: the names under which invalid episodes are counted."""


class InfrastructureFailure(RuntimeError):
    """Something failed that the policy cannot cause.

    Environments raise it where they know; any other exception of a tool or a checker counts as
    one."""

    def __init__(self, component: str, reason: str, culprit: str = "") -> None:
        """``component``: one of COMPONENTS. ``reason``: what failed and how, for people.
        ``culprit``: what of the component it was, in words that are the same every time."""
        super().__init__(component, reason, culprit)
        self.component = component
        self.reason = reason
        self.culprit = culprit

    def __str__(self) -> str:
        return f"{self.component}: {self.reason}"


class EngineFault(InfrastructureFailure):
    """An engine or one of its servers misbehaved; the message names request and server."""

    def __init__(self, request_id: str, what: str, server: str = "") -> None:
        where = f"{server}: " if server else ""
        super().__init__("engine", f"request {request_id}: {where}{what}", server)
        # pickle calls the class with ``args``: without this it would pass a component and a
        # reason.
        self.args = (request_id, what, server)


class InfrastructureOutage(UserError, RuntimeError):
    """So many episodes were invalid that the run ends; the message names the culprit."""


def root_cause(error: BaseException) -> BaseException:
    """Return what an actor raised where Ray passes it on, whose own message is a traceback."""
    # Without Ray there are no actors, and its exceptions need not be imported.
    ray: Any = sys.modules.get("ray.exceptions")
    if ray is None:
        return error

    while (
        isinstance(error, ray.RayTaskError)
        and isinstance(error.cause, BaseException)
        and error.cause != error
    ):
        error = error.cause
    return error


def describe(error: BaseException) -> str:
    """Describe an exception in one line: the class of its cause, and its message if it has one."""
    error = root_cause(error)
    name = type(error).__name__
    first_line = str(error).split("\n")[0][:500]
    return f"{name}: {first_line}" if first_line else name


MAX_STREAK = 64
"""Invalid episodes in sequence that end a run at once, before a step has enough for a share."""


class InfrastructureBreaker:
    """Ends a run whose infrastructure is broken, though a few episodes may work.

    One breaker watches the episodes of one call that runs groups, usually one step."""

    def __init__(self, max_share: float, max_streak: int | None) -> None:
        """Start with no episodes.

        Args:
            max_share: largest share of all episodes that may be invalid.
            max_streak: number of invalid episodes in sequence, in the order in which they end,
                that breaks at once. None for any number.
        """
        self._max_share = max_share
        self._max_streak = max_streak
        self._episodes = 0
        self._streak = 0
        self._invalid: list[Trajectory] = []

    @classmethod
    def with_streak(cls, max_share: float) -> Self:
        """Return a breaker that ``MAX_STREAK`` invalid episodes in sequence break at once."""
        return cls(max_share, MAX_STREAK)

    def observe(self, group: "TrajectoryGroup") -> None:
        """Count the episodes of a group.

        Raises InfrastructureOutage when the streak is too long."""
        self._episodes += len(group.trajectories) + len(group.invalid)
        self._invalid += group.invalid

        # One valid episode shows that infrastructure still works.
        if group.trajectories:
            self._streak = 0
        else:
            self._streak += len(group.invalid)
        if self._max_streak is not None and self._streak >= self._max_streak:
            limit = f"{self._streak} in a row, and {self._max_streak} end a run"
            raise InfrastructureOutage(self._message(limit))

    def check_share(self) -> None:
        """Raise InfrastructureOutage if too many of all episodes were invalid."""
        if len(self._invalid) > self._max_share * self._episodes:
            raise InfrastructureOutage(
                self._message(f"rollout.max_invalid_share is {self._max_share:g}")
            )

    def _message(self, limit: str) -> str:
        """Say what failed how often, which of it most often, and why."""
        failures = [episode.invalid for episode in self._invalid if episode.invalid is not None]
        components = Counter(failure.component for failure in failures)

        causes = []
        for component, count in components.most_common():
            of_component = [failure for failure in failures if failure.component == component]
            culprits = Counter(failure.culprit for failure in of_component)
            culprit, times = culprits.most_common(1)[0]

            reasons = Counter(
                failure.reason for failure in of_component if failure.culprit == culprit
            )
            reason, _ = reasons.most_common(1)[0]
            named = f" ({culprit} in {times})" if culprit else ""
            causes.append(f"{component} in {count}{named}, such as: {reason}")

        ended = f"infrastructure failures ended {len(self._invalid)} of {self._episodes} episodes ({limit})"
        advice = "Nothing was learned from them. Mend it; a training run then goes on with --resume"
        return f"{ended}: {'; '.join(causes)}. {advice}"
