"""Exceptions of Ray for an actor whose process has died, and a count of recent deaths."""

from collections import deque

from ray.exceptions import OutOfMemoryError, RayActorError

ACTOR_DEATHS = (RayActorError, OutOfMemoryError)
"""Exceptions that ``ray.get`` raises for a dead actor.

Ray raises OutOfMemoryError, which is not a RayActorError, for actors that its memory monitor killed.
"""

type ActorDeath = RayActorError | OutOfMemoryError


def process_died(error: Exception) -> bool:
    """Return True if an actor's process died, False if its constructor raised an error."""
    # Ray raises the same class for both. A constructor that raised an error would raise it again.
    if isinstance(error, RayActorError):
        return not error.actor_init_failed
    return isinstance(error, OutOfMemoryError)


class RecentDeaths:
    """Number of deaths within a sliding period.

    A run of weeks may lose a process now and then, so a total would reach any limit.
    """

    def __init__(self, seconds: float) -> None:
        """Count deaths within the last ``seconds``."""
        self.seconds = seconds
        self._times: deque[float] = deque()

    def add(self, now: float) -> int:
        """Count a death at time ``now``, and return the number of those within the period."""
        self._times.append(now)
        while self._times[0] < now - self.seconds:
            self._times.popleft()
        return len(self)

    def __len__(self) -> int:
        """Return the number of deaths within the period that ended with the last one."""
        return len(self._times)
