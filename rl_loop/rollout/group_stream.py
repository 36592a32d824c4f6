"""Groups of episodes as a stream: they are admitted one by one, run somewhere else, and are taken
in the order in which they end.

Whatever runs groups gives out streams: RolloutPool with Ray's workers, or one process alone. Every
caller has a stream of its own, so nobody gets what another one has asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, Self

from rl_loop.config.rollout import RolloutConfig
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.environments import Task
from rl_loop.infrastructure import InfrastructureBreaker
from rl_loop.tasks.task_file import TaskFileError

OnEnded = Callable[[int, int], None]
"""Receives how many episodes have ended, and how many are waited for."""

POLL_SECONDS = 1.0
"""How often a caller is asked whether it still wants its episodes."""


@dataclass(frozen=True)
class GroupRequest:
    """Episodes of one task to run. One seed per sample: the same request gives the same
    episodes on any worker."""

    task: Task
    seeds: tuple[int, ...]
    temperature: float
    purify: bool = False
    """Whether ``rollout.purification`` applies, which only episodes to train on have: an
    evaluation measures the policy, not the policy and its retries."""
    with_routes: bool = False
    """Whether the experts that the engine chose come along, where ``rollout.routed_experts`` says
    so: they are stored for the trainer, and weigh more than all else of an episode."""


@dataclass(frozen=True)
class EndedGroup:
    """A group whose episodes have all ended."""

    number: int
    """As it was admitted."""
    group: TrajectoryGroup


class RolloutsAbandoned(Exception):
    """The caller no longer wants the episodes that were asked for."""


class GroupStream:
    """The groups of one caller. One thread admits and takes; groups end in any other.

    As a context, it is closed at the end: what has not ended then is of no interest any more."""

    def __init__(self, begin: Callable[["AdmittedGroup"], None]) -> None:
        """``begin`` starts a group and returns at once; ``end`` or ``fail`` of the group is
        called later."""
        self._begin = begin
        self._ended: SimpleQueue[EndedGroup | BaseException] = SimpleQueue()
        self.is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def admit(self, number: int, request: GroupRequest) -> None:
        """Begin a group. ``number`` is what it is called when it has ended."""
        self._begin(AdmittedGroup(number, request, self))

    def take(self, abandon: Callable[[], bool] = lambda: False) -> EndedGroup:
        """Wait for the next group that ends, and return it.

        ``abandon`` is asked every second; if it says so, RolloutsAbandoned is raised. Raises what
        kept groups from running."""
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
        """Forget all groups. A waiting ``take`` raises RolloutsAbandoned."""
        self.is_closed = True
        self._ended.put(RolloutsAbandoned())

    def deliver(self, outcome: EndedGroup | BaseException) -> None:
        """Hand a group, or what keeps groups from running, to whoever takes."""
        self._ended.put(outcome)


@dataclass(frozen=True, eq=False)
class AdmittedGroup:
    """A group on its way from its admission to its end."""

    number: int
    request: GroupRequest
    stream: GroupStream

    def end(self, group: TrajectoryGroup) -> None:
        """Note that all its episodes have ended."""
        self.stream.deliver(EndedGroup(self.number, group))

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` where the group is waited for."""
        self.stream.deliver(error)


class RunsGroups(Protocol):
    """Runs episodes: a RolloutPool."""

    def stream(self) -> GroupStream: ...


def run_groups(
    runner: RunsGroups,
    requests: Sequence[GroupRequest],
    rollout: RolloutConfig,
    abandon: Callable[[], bool] = lambda: False,
    on_ended: OnEnded = lambda ended, wanted: None,
) -> list[TrajectoryGroup]:
    """Run all episodes and wait for them. Groups come back in the order of ``requests``; episodes
    that infrastructure failures ended are set apart in them.

    ``abandon`` is asked every second; if it says so, RolloutsAbandoned is raised. ``on_ended`` is
    told of every group that ends. Raises
    InfrastructureOutage if too many episodes failed, and TaskFileError if no task can be run."""
    streak = InfrastructureBreaker.with_streak(rollout.max_invalid_share)
    results: dict[int, TrajectoryGroup] = {}
    wanted = sum(len(request.seeds) for request in requests)
    episodes_ended = 0

    with runner.stream() as stream:
        for number, request in enumerate(requests):
            stream.admit(number, request)
        while len(results) < len(requests):
            ended = stream.take(abandon)
            streak.observe(ended.group)
            results[ended.number] = ended.group
            episodes_ended += len(requests[ended.number].seeds)
            on_ended(episodes_ended, wanted)

    groups = [results[number] for number in range(len(requests))]
    check_groups(groups, rollout)
    return groups


def check_groups(groups: Sequence[TrajectoryGroup], rollout: RolloutConfig) -> None:
    """Raise InfrastructureOutage if infrastructure failures ended too many of these episodes, and
    TaskFileError if none of the tasks can be run."""
    # The share counts over all episodes: the first few may all have met the same bad moment.
    breaker = InfrastructureBreaker(rollout.max_invalid_share, max_streak=None)
    for group in groups:
        breaker.observe(group)
    breaker.check_share()

    if groups and all(group.skipped is not None for group in groups):
        raise TaskFileError(f"no task of {len(groups)} can be run: {groups[0].skipped}")
