"""Rollout workers as Ray actors, and a pool that loses no episode when one of them dies."""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError

from converters.mxfp4_tensors import Digests
from rl_loop.cluster.placement import ROLLOUT_WORKER, outlive_sigterm, placement_options
from rl_loop.data.stored_routes import StoredRoutes
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.engines.backend import RolloutBackend, WeightSource
from rl_loop.environments import Task
from rl_loop.infrastructure import InfrastructureBreaker, describe
from rl_loop.logs import with_logging
from rl_loop.rollout.worker import RolloutWorker, WorkerSettings
from rl_loop.tasks.task_file import TaskFileError
from rl_loop.tracking.metric_sinks import RolloutCounters

POLL_SECONDS = 1.0
"""How often a caller is asked whether it still wants its episodes, and the backend to heal."""

CLOSE_SECONDS = 10.0
"""What workers have to end their sandboxes and engines before they are killed."""

logger = logging.getLogger(__name__)


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
class Assignment:
    """A request that a worker is at work on."""

    request: int
    """Its index."""
    worker: int
    """The worker's index."""
    routes: list[Any]
    """References to the routes of the group's episodes, if they come along."""


class RolloutsAbandoned(Exception):
    """The caller no longer wants the episodes that were asked for."""


class RolloutPool:
    """The engines of a run and the workers that run episodes with them.

    A dead worker is replaced and its work redone."""

    MAX_RESTARTS = 10
    """Per pool; more deaths mean something that a restart does not mend."""

    def __init__(
        self,
        backend: RolloutBackend,
        settings: WorkerSettings,
        alter_weights: Callable[[WeightSource, int], WeightSource] | None = None,
    ) -> None:
        """``alter_weights``: what experiments do to the weights of a version on
        their way to the engines."""
        self.backend = backend
        self._alter_weights = alter_weights
        self._settings = settings
        self._threads = max(1, (os.cpu_count() or 1) // settings.rollout.workers)
        self._engine_factory = backend.engine_factory()
        self._counters = RolloutCounters()
        self._restarts = 0

        # What a replaced worker's engine is brought to: a reference to the tensors, and their
        # version.
        self._weights: tuple[Any, int] | None = None

        # Workers that have not answered yet are killed on close instead of being waited for.
        self._has_started = False
        self._is_closed = False
        self._workers = [self._create_worker(index) for index in range(settings.rollout.workers)]

    # -- workers ----------------------------------------------------------------------------------

    def _create_worker(self, index: int) -> Any:
        actor_class: Any = ray.remote(with_logging(RolloutWorker))
        actor = actor_class.options(
            num_cpus=0,
            max_concurrency=self._settings.rollout.concurrent_tasks,
            **placement_options(ROLLOUT_WORKER, index),
        )
        worker = actor.remote(self._settings, self._engine_factory, self._threads)
        worker.__ray_call__.remote(outlive_sigterm)
        return worker

    def ready(self) -> None:
        """Wait until every worker's engine and sandbox run; raises what went wrong in one."""
        self.backend.start(self)
        ray.get([worker.start.remote() for worker in self._workers])
        self._has_started = True

    def _call(self, index: int, method: str, *arguments: Any) -> Any:
        """Call a method of one worker; a dead worker is replaced, and its successor asked."""
        while True:
            try:
                return ray.get(getattr(self._workers[index], method).remote(*arguments))
            except RayActorError as death:
                self._replace(index, death)

    def _replace(self, index: int, death: RayActorError) -> None:
        """Start another worker in place of a dead one and bring it to the current weights."""
        while True:
            self._restarts += 1
            if self._restarts > self.MAX_RESTARTS:
                raise RuntimeError(
                    f"rollout workers died {self._restarts} times, the last with: {death}. If the machine is out of "
                    "memory, lower rollout.workers, or rollout.engine.max_batch_size of embedded engines"
                ) from death
            logger.warning("rollout worker %d died and is replaced: %s", index, describe(death))
            self._workers[index] = self._create_worker(index)
            try:
                ray.get(self._workers[index].start.remote())
                if self._weights is not None:
                    ray.get(self._workers[index].sync_weights.remote(*self._weights))
                return
            except RayActorError as again:
                death = again

    # -- episodes ---------------------------------------------------------------------------------

    def run(
        self, requests: Sequence[GroupRequest], abandon: Callable[[], bool] = lambda: False
    ) -> list[TrajectoryGroup]:
        """Run all episodes. Groups come back in the order of ``requests``; episodes that
        infrastructure failures ended are set apart in them.

        ``abandon`` is asked every second; if it says so, RolloutsAbandoned is
        raised. Raises InfrastructureOutage if too many episodes failed, and
        TaskFileError if no task can be run."""
        rollout = self._settings.rollout
        breaker = InfrastructureBreaker(rollout.max_invalid_share, rollout.max_invalid_streak)
        results: dict[int, TrajectoryGroup] = {}

        # Every worker gets its even share at once: an engine is fastest with a full batch.
        running: dict[Any, Assignment] = {}
        for number, request in enumerate(requests):
            worker = number % len(self._workers)
            self._submit(number, request, worker, running)

        # One at a time, so that a dead worker is noticed before the others have finished.
        while running:
            finished, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
            if abandon():
                raise RolloutsAbandoned
            self.backend.heal()
            if not finished:
                continue

            assignment = running.pop(finished[0])
            try:
                group = ray.get(finished[0])
            except RayActorError as death:
                running = self._redo_work_of(assignment, running, requests, death)
                continue
            results[assignment.request] = _with_references(group, assignment.routes)
            self._counters.count(assignment.worker, group)
            breaker.observe(group)

        # The share counts over all episodes: the first few may all have met the same bad moment.
        breaker.check_share()
        groups = [results[number] for number in range(len(requests))]
        if groups and all(group.skipped is not None for group in groups):
            raise TaskFileError(f"no task of {len(groups)} can be run: {groups[0].skipped}")
        return groups

    def _redo_work_of(
        self,
        failed: Assignment,
        running: dict[Any, Assignment],
        requests: Sequence[GroupRequest],
        death: RayActorError,
    ) -> dict[Any, Assignment]:
        """Replace the worker of ``failed`` and give its successor all that it was at work on.
        Returns what is running then."""
        lost = [failed.request]
        still_running: dict[Any, Assignment] = {}
        for reference, assignment in running.items():
            if assignment.worker == failed.worker:
                lost.append(assignment.request)
            else:
                still_running[reference] = assignment

        self._replace(failed.worker, death)
        for number in lost:
            self._submit(number, requests[number], failed.worker, still_running)
        return still_running

    def _submit(
        self, number: int, request: GroupRequest, index: int, running: dict[Any, Assignment]
    ) -> None:
        """Give a request to a worker and add it to those that are running, by the reference to its
        group."""
        worker = self._workers[index]
        arguments = (request.task, request.seeds, request.temperature)
        if request.with_routes and self._settings.rollout.routed_experts:
            # As objects of their own, which belong to this process but stay where they are: they
            # survive the worker and are freed with the last reference.
            run_group = worker.run_group_and_store_routes.options(
                num_returns=1 + len(request.seeds)
            )
            reference, *routes = run_group.remote(*arguments, purify=request.purify)
        else:
            reference = worker.run_group.remote(*arguments, purify=request.purify)
            routes = []
        running[reference] = Assignment(number, index, routes)

    # -- engines ----------------------------------------------------------------------------------

    def sync_weights(self, source: WeightSource, version: int) -> None:
        """Give all engines the policy's weights; see ``RolloutBackend.sync_weights``."""
        if self._alter_weights is not None:
            source = self._alter_weights(source, version)
        self.backend.sync_weights(source, version)

    def load_weights(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Give the engines in the workers these weights. Backends call it."""
        self._weights = (ray.put(weights), version)
        for index in range(len(self._workers)):
            self._call(index, "sync_weights", *self._weights)

    def engine_scores(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        """Return the log-probs of ``token_ids[1:]`` from the engine of every
        worker. Backends call it."""
        return [
            self._call(index, "score", token_ids, temperature)
            for index in range(len(self._workers))
        ]

    def engine_digests(self) -> list[Digests]:
        """Return digests of the quantized experts that the engine of every worker holds. Backends
        call it."""
        return [self._call(index, "packed_digests") for index in range(len(self._workers))]

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        """Return the log-probs of ``token_ids[1:]``, in nats, from every engine."""
        return self.backend.score(token_ids, temperature)

    def packed_digests(self) -> list[Digests]:
        """Return digests of the quantized experts that each engine holds; empty if that cannot be
        told."""
        return self.backend.packed_digests()

    def compare_weights(self) -> None:
        """Raise an error that names a tensor which an engine holds otherwise than the trainer, if
        that can be told."""
        self.backend.compare_weights()

    def engine_settings(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what an engine says of itself, as far as it knows the names."""
        return self.backend.engine_settings(names)

    def pause(self) -> None:
        """Run no episodes until the next weight sync: engines on the trainer's
        GPUs free their memory."""
        self.backend.pause()

    def updating_weights(self, version: int) -> AbstractContextManager[None]:
        """Block healing while the source of the last sync updates its weights to ``version``."""
        return self.backend.updating_weights(version)

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop workers and engines. Calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._close_workers()
        finally:
            self.backend.close()

    def _close_workers(self) -> None:
        # A worker that is still starting would answer only when its imports are done.
        if self._has_started:
            closing = [worker.close.remote() for worker in self._workers]
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for worker in self._workers:
            ray.kill(worker)


def _with_references(group: TrajectoryGroup, routes: Sequence[Any]) -> TrajectoryGroup:
    """Return a group whose stored routes know where they are stored."""
    trajectories = list(group.trajectories)
    for i, trajectory in enumerate(trajectories):
        stored = trajectory.routed_experts
        if isinstance(stored, StoredRoutes):
            located = replace(stored, reference=routes[i])
            trajectories[i] = replace(trajectory, routed_experts=located)
    return replace(group, trajectories=trajectories)
