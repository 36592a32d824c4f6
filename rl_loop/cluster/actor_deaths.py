"""How Ray says that an actor's process is gone."""

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
