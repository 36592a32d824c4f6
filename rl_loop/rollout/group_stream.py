"""Streams of episode groups: groups are admitted one by one, run elsewhere, and taken as they end.

A runner of groups returns streams: RolloutPool with Ray's workers, or a single process. Every
caller has a separate stream, so it receives only its groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, Self

from rl_loop.config.rollout import RolloutConfig
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.environments import Task
from rl_loop.infrastructure import CircuitBreaker
from rl_loop.tasks.task_file import TaskFileError

OnEnded = Callable[[int, int], None]
"""Receives the number of ended episodes and the number of requested episodes."""

POLL_SECONDS = 1.0
"""Interval in seconds at which ``take`` calls ``abandon``."""


@dataclass(frozen=True)
class GroupRequest:
    """Episodes of one task to run, with one seed per sample.

    The same request gives the same episodes on any worker.
    """

    task: Task
    seeds: tuple[int, ...]
    temperature: float
    purify: bool = False
    """True to apply ``rollout.purification``. Only for training, because an evaluation measures
    the policy without retries."""
    with_routes: bool = False
    """True to return the experts that the engine chose, if ``rollout.routed_experts`` is set.
    They are stored for the trainer, and are larger than the rest of an episode."""


@dataclass(frozen=True)
class EndedGroup:
    """A group whose episodes have all ended."""

    number: int
    """Number given on admission."""
    group: TrajectoryGroup


class RolloutsAbandoned(Exception):  # noqa: N818 - control flow, not an error
    """The caller does not need the requested episodes."""


class GroupStream:
    """Groups of one caller.

    One thread admits and takes groups, and they end in any thread. As a context, the stream is
    closed at the end, and groups that have not ended are dropped.
    """

    def __init__(self, begin: Callable[["AdmittedGroup"], None]) -> None:
        """Store the function that starts groups.

        Args:
            begin: starts a group and returns at once. Later ``end`` or ``fail`` of the group is
                called.
        """
        self._begin = begin
        self._ended: SimpleQueue[EndedGroup | BaseException] = SimpleQueue()
        self.is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def admit(self, number: int, request: GroupRequest) -> None:
        """Begin a group. ``EndedGroup.number`` will be ``number``."""
        self._begin(AdmittedGroup(number, request, self))

    def take(self, abandon: Callable[[], bool] = lambda: False) -> EndedGroup:
        """Wait for the next group that ends, and return it.

        An exception that prevents groups from running is raised here.

        Args:
            abandon: called every second. If it returns True, the wait ends.

        Raises:
            RolloutsAbandoned: ``abandon`` returned True, or the stream was closed.
        """
        # Wait with a timeout, because no message arrives when a reason to abandon occurs.
        while True:
            if abandon():
                raise RolloutsAbandoned
            try:
                outcome = self._ended.get(timeout=POLL_SECONDS)
            except Empty:
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

    def close(self) -> None:
        """Drop all groups. A waiting ``take`` raises RolloutsAbandoned."""
        # The message wakes a thread that waits in ``take``. The flag alone would not.
        self.is_closed = True
        self._ended.put(RolloutsAbandoned())

    def deliver(self, outcome: EndedGroup | BaseException) -> None:
        """Pass a group, or an exception that prevents groups from running, to ``take``."""
        self._ended.put(outcome)


@dataclass(frozen=True, eq=False)
class AdmittedGroup:
    """Group between its admission and its end."""

    number: int
    request: GroupRequest
    stream: GroupStream

    def end(self, group: TrajectoryGroup) -> None:
        """Deliver the group after all its episodes have ended."""
        self.stream.deliver(EndedGroup(self.number, group))

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in the stream's ``take``."""
        self.stream.deliver(error)


class GroupRunner(Protocol):
    """Runs episodes: a RolloutPool."""

    def stream(self) -> GroupStream: ...


def run_groups(
    runner: GroupRunner,
    requests: Sequence[GroupRequest],
    rollout: RolloutConfig,
    abandon: Callable[[], bool] = lambda: False,
    on_ended: OnEnded = lambda ended, total: None,
) -> list[TrajectoryGroup]:
    """Run all episodes and wait for them.

    Args:
        runner: runs the groups.
        requests: groups to run.
        rollout: limits for invalid episodes.
        abandon: called every second. If it returns True, the wait ends.
        on_ended: called after every group that ends.

    Returns:
        The groups in the order of ``requests``. Episodes that infrastructure failures ended are
        separate in them.

    Raises:
        RolloutsAbandoned: ``abandon`` returned True.
        InfrastructureOutageError: too many episodes failed.
        TaskFileError: no task can be run.
    """
    streak = CircuitBreaker.with_streak(rollout.max_invalid_fraction)
    results: dict[int, TrajectoryGroup] = {}
    total = sum(len(request.seeds) for request in requests)
    episodes_ended = 0

    with runner.stream() as stream:
        # All at once, so that the runner can balance them over its workers.
        for number, request in enumerate(requests):
            stream.admit(number, request)
        while len(results) < len(requests):
            ended = stream.take(abandon)
            streak.observe(ended.group)
            results[ended.number] = ended.group
            episodes_ended += len(requests[ended.number].seeds)
            on_ended(episodes_ended, total)

    # Groups end in any order. Callers match results and requests by position.
    groups = [results[number] for number in range(len(requests))]
    check_groups(groups, rollout)
    return groups


def check_groups(groups: Sequence[TrajectoryGroup], rollout: RolloutConfig) -> None:
    """Check that enough episodes are valid.

    Raises:
        InfrastructureOutageError: infrastructure failures ended too many of the episodes.
        TaskFileError: none of the tasks can be run.
    """
    # Check the share over all episodes, because one short outage may have ended the first ones.
    breaker = CircuitBreaker(rollout.max_invalid_fraction, max_streak=None)
    for group in groups:
        breaker.observe(group)
    breaker.check_fraction()

    if groups and all(group.skipped is not None for group in groups):
        raise TaskFileError(f"none of the {len(groups)} tasks can be run: {groups[0].skipped}")
