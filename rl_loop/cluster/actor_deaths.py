"""Exceptions of Ray for an actor whose process has died, and a count of recent deaths."""

from collections import deque

from ray.exceptions import OutOfMemoryError, RayActorError

ACTOR_DEATHS = (RayActorError, OutOfMemoryError)
"""What ``ray.get`` raises for an actor that has died. The second is raised for those that Ray's
memory monitor has killed, and is no RayActorError."""

type ActorDeath = RayActorError | OutOfMemoryError


def died_by_itself(error: Exception) -> bool:
    """Whether an actor's process died, rather than that its constructor raised an error."""
    if isinstance(error, RayActorError):
        return not error.actor_init_failed
    return isinstance(error, OutOfMemoryError)


class RecentDeaths:
    """Counts deaths within a period. A run of weeks may lose a process now and then."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: length of the period."""
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
