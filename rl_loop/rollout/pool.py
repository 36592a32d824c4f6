"""Rollout workers as Ray actors, and a pool that loses no episode when one of them dies.

Two threads use a pool. The driver's admits groups, syncs weights and trains; the pool's own gives
groups to workers, notices when they end or die, and lets the backend heal. So episodes go on while
the driver waits for the trainer."""

import heapq
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from threading import Condition, Lock, RLock, Thread
from typing import Any

import ray
import torch

from converters.mxfp4_tensors import Digests
from rl_loop.cluster.actor_deaths import ACTOR_DEATHS, ActorDeath, RecentDeaths
from rl_loop.cluster.placement import (
    ROLLOUT_WORKER,
    check_place,
    outlive_sigterm,
    placement_options,
)
from rl_loop.config.parts import EpisodesConfig
from rl_loop.data.stored_routes import StoredRoutes
from rl_loop.data.tensor_bytes import StoredTensors, TensorBytes
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.engines.backend import RolloutBackend
from rl_loop.infrastructure import describe
from rl_loop.logs import with_logging
from rl_loop.rollout.group_stream import AdmittedGroup, GroupRequest, GroupStream, run_groups
from rl_loop.rollout.worker import RolloutWorker, with_routes
from rl_loop.tracking.metric_sinks import RolloutCounters
from rl_loop.weight_sync.source import WeightSource

WAIT_SECONDS = 0.05
"""How long the pool's thread waits for groups to end before it looks for new ones."""

HEAL_SECONDS = 1.0
"""How often the backend is asked to heal while groups run."""

CONTROL_CALLS = 8
"""Calls that a worker takes besides its groups: a weight sync must not wait for an episode."""

RESTART_SECONDS = 3600.0
"""Period within which MAX_RESTARTS counts."""

PLACE_SECONDS = 5.0
"""How often it is asked whether a worker that does not start still has a place."""

CLOSE_SECONDS = 10.0
"""What workers have to end their sandboxes and engines before they are killed."""

logger = logging.getLogger(__name__)


@dataclass(order=True)
class WaitingGroup:
    """A group that is not yet, or no longer, with a worker. The first to be asked for is the first
    to be given out, also after its worker died."""

    turn: int
    admitted: AdmittedGroup = field(compare=False)


@dataclass(frozen=True)
class Assignment:
    """A group that a worker is at work on."""

    waiting: WaitingGroup
    """What it was before."""
    index: int
    """The worker's."""
    worker: Any
    """The actor itself: after its death another one has its index."""
    routes: list[Any]
    """References to the routes of the group's episodes, if they come along."""


class PoolClosed(Exception):
    """The pool was closed while its thread waited for a worker."""


class RolloutPool:
    """The engines of a run and the workers that run episodes with them.

    A dead worker is replaced and its work redone."""

    MAX_RESTARTS = 10
    """Deaths of workers within RESTART_SECONDS; more have a cause that a restart does not remove."""

    def __init__(
        self,
        backend: RolloutBackend,
        config: EpisodesConfig,
        alter_weights: Callable[[WeightSource, int], WeightSource] | None = None,
        worker_class: type[RolloutWorker] = RolloutWorker,
    ) -> None:
        """``alter_weights``: what experiments do to the weights of a version on
        their way to the engines. ``worker_class``: what runs the episodes."""
        self.backend = backend
        self._alter_weights = alter_weights
        self._config = config
        self._worker_class = worker_class
        self._threads = max(1, (os.cpu_count() or 1) // config.rollout.workers)
        self._engine_factory = backend.engine_factory()
        self._counters = RolloutCounters()

        # Groups that no worker has yet, first in, first out. The condition guards them.
        self._changed = Condition()
        self._waiting: list[WaitingGroup] = []
        self._turns = count()
        self._streams: list[GroupStream] = []
        self._failure: BaseException | None = None

        # Of the pool's thread alone: what runs, by the reference to its result.
        self._running: dict[Any, Assignment] = {}
        self._healed_at = 0.0

        # One thread at a time asks something of the backend.
        self._using_backend = Lock()
        self._may_heal = True

        # One thread at a time changes which workers there are, or which weights they have. A
        # successor is shown to others when it has the current weights.
        self._changing_workers = RLock()
        self._deaths = RecentDeaths(RESTART_SECONDS)
        self._last_sync: tuple[Any, ...] | None = None
        """Method and arguments by which a successor's engine gets the current weights or their
        version."""
        self._successor: Any = None

        # Workers that have not answered yet are killed on close instead of being waited for.
        self._has_started = False
        self._is_closed = False
        self._workers = [self._create_worker(index) for index in range(config.rollout.workers)]
        self._thread = Thread(target=self._run_thread, name="rollouts", daemon=True)

    # -- workers ----------------------------------------------------------------------------------

    def _create_worker(self, index: int) -> Any:
        actor_class: Any = ray.remote(with_logging(self._worker_class))
        actor = actor_class.options(
            # Workers are placed by resources of our own; Ray counts no CPUs of theirs.
            num_cpus=0,
            max_concurrency=self._config.rollout.concurrent_tasks + CONTROL_CALLS,
            **placement_options(ROLLOUT_WORKER, index),
        )
        worker = actor.remote(self._config, self._engine_factory, self._threads)
        worker.__ray_call__.remote(outlive_sigterm)
        return worker

    def ready(self) -> None:
        """Wait until every worker's engine and sandbox run; raises what went wrong in one."""
        self.backend.start(self)
        ray.get([worker.start.remote() for worker in self._workers])
        self._has_started = True
        self._thread.start()

    def _call(self, index: int, method: str, *arguments: Any) -> Any:
        """Call a method of one worker; a dead worker is replaced, and its successor asked."""
        while True:
            worker = self._workers[index]
            try:
                return ray.get(getattr(worker, method).remote(*arguments))
            except ACTOR_DEATHS as death:
                self._replace(index, worker, death)

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all workers at the same time, and return the answers in their order; a
        dead worker is replaced, and its successor asked."""
        workers = list(self._workers)
        references = [getattr(worker, method).remote(*arguments) for worker in workers]

        answers = []
        for index, reference in enumerate(references):
            try:
                answers.append(ray.get(reference))
            except ACTOR_DEATHS as death:
                self._replace(index, workers[index], death)
                # The others have answered or go on meanwhile: only the successor is asked again.
                answers.append(self._call(index, method, *arguments))
        return answers

    def _replace(self, index: int, dead: Any, death: ActorDeath) -> None:
        """Start another worker in place of a dead one and bring it to the current weights, unless
        the other thread has done so already."""
        with self._changing_workers:
            # A loop, because a successor may die while it starts.
            while self._workers[index] is dead:
                if self._is_closed:
                    raise PoolClosed
                self._count_death(death)

                logger.warning("rollout worker %d died and is replaced: %s", index, describe(death))
                try:
                    self._workers[index] = self._start_successor(index)
                except ACTOR_DEATHS as again:
                    death = again

    def _count_death(self, death: ActorDeath) -> None:
        """Raise RuntimeError if too many workers have died in a short time."""
        deaths = self._deaths.add(time.monotonic())
        if deaths > self.MAX_RESTARTS:
            raise RuntimeError(
                f"rollout workers died {deaths} times within {self._deaths.seconds:.0f} s, the last with: {death}. "
                "If the machine is out of memory, lower rollout.workers, or rollout.engine.max_batch_size of embedded "
                "engines"
            ) from death

    def _start_successor(self, index: int) -> Any:
        """Return a new worker that has the current weights. Raises one of ACTOR_DEATHS if it dies,
        and PlaceLost if the node where it belongs has died."""
        self._successor = self._create_worker(index)
        start = self._successor.start.remote()
        # Where the node has died, Ray would wait for another one with its resources for ever.
        while not ray.wait([start], timeout=PLACE_SECONDS)[0]:
            check_place(ROLLOUT_WORKER, index)
        ray.get(start)
        # Before anybody sees it: a worker that gave out episodes with initial weights would mix
        # policies.
        if self._last_sync is not None:
            method, *arguments = self._last_sync
            ray.get(getattr(self._successor, method).remote(*arguments))
        return self._successor

    # -- episodes ---------------------------------------------------------------------------------

    def stream(self) -> GroupStream:
        """Return a stream of groups that these workers run."""
        stream = GroupStream(self._admit)
        with self._changed:
            self._streams = [known for known in self._streams if not known.is_closed]
            self._streams.append(stream)
            if self._failure is not None:
                stream.deliver(self._failure)
        return stream

    def run(
        self, requests: Sequence[GroupRequest], abandon: Callable[[], bool] = lambda: False
    ) -> list[TrajectoryGroup]:
        """Run all episodes and wait for them; see ``run_groups``."""
        return run_groups(self, requests, self._config.rollout, abandon)

    def _admit(self, admitted: AdmittedGroup) -> None:
        with self._changed:
            heapq.heappush(self._waiting, WaitingGroup(next(self._turns), admitted))
            self._changed.notify()

    # -- the pool's thread ------------------------------------------------------------------------

    def _run_thread(self) -> None:
        try:
            while not self._is_closed:
                self._give_out()
                self._await_groups()
                self._heal()
        except Exception as error:
            # Nobody waits for this thread: whoever waits for groups gets to hear of it.
            if not self._is_closed:
                self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        """Raise ``error`` wherever groups are waited for, now or later."""
        with self._changed:
            self._failure = error
            for stream in self._streams:
                stream.deliver(error)

    def _give_out(self) -> None:
        """Give waiting groups to the workers that have least to do."""
        loads = [0] * len(self._workers)
        for assignment in self._running.values():
            loads[assignment.index] += 1

        while True:
            index = loads.index(min(loads))
            if loads[index] == self._config.rollout.concurrent_tasks:
                return
            with self._changed:
                if not self._waiting:
                    return
                waiting = heapq.heappop(self._waiting)
            if waiting.admitted.stream.is_closed:
                continue
            self._submit(waiting, index)
            loads[index] += 1

    def _submit(self, waiting: WaitingGroup, index: int) -> None:
        """Give a group to a worker and add it to those that are running."""
        worker = self._workers[index]
        request = waiting.admitted.request
        arguments = (request.task, request.seeds, request.temperature)
        if request.with_routes and self._config.rollout.routed_experts:
            # As objects of their own, which belong to this process but stay where they are: they
            # survive the worker and are freed with the last reference.
            run_group = worker.run_group_and_store_routes.options(
                num_returns=1 + len(request.seeds)
            )
            reference, *routes = run_group.remote(*arguments, purify=request.purify)
        else:
            reference = worker.run_group.remote(*arguments, purify=request.purify)
            routes = []
        self._running[reference] = Assignment(waiting, index, worker, routes)

    def _await_groups(self) -> None:
        """Wait a little for a group to end, or for the first to be admitted."""
        if not self._running:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed, HEAL_SECONDS)
            return

        # One at a time, so that a dead worker is noticed before the others have finished.
        ended, _ = ray.wait(list(self._running), num_returns=1, timeout=WAIT_SECONDS)
        for reference in ended:
            self._end(reference, self._running.pop(reference))

    def _end(self, reference: Any, assignment: Assignment) -> None:
        """Hand a group that has ended to its stream. One whose worker died begins again."""
        admitted = assignment.waiting.admitted
        try:
            group = ray.get(reference)
        except ACTOR_DEATHS as death:
            self._replace(assignment.index, assignment.worker, death)
            with self._changed:
                heapq.heappush(self._waiting, assignment.waiting)
            return
        except Exception as error:  # a mistake in the agent loop or an environment
            admitted.fail(error)
            return

        self._counters.count(assignment.index, group)
        admitted.end(_with_references(group, assignment.routes))

    def _heal(self) -> None:
        """Let the backend heal, about once a second while groups run."""
        if not self._running or time.monotonic() < self._healed_at + HEAL_SECONDS:
            return
        # The driver is at the backend: the next time will do.
        if not self._using_backend.acquire(blocking=False):
            return
        try:
            if self._may_heal:
                self.backend.heal()
        finally:
            self._healed_at = time.monotonic()
            self._using_backend.release()

    # -- engines ----------------------------------------------------------------------------------

    def sync_weights(self, source: WeightSource, version: int) -> None:
        """Give all engines the policy's weights; see ``RolloutBackend.sync_weights``.

        Groups that run go on with them from where they are."""
        if self._alter_weights is not None:
            source = self._alter_weights(source, version)
        with self._using_backend:
            self.backend.sync_weights(source, version)
            self._may_heal = True

    def prepare_sync(self, source: WeightSource) -> None:
        """Begin the next ``sync_weights`` from the same source, which has new weights now, as far
        as that needs no engine."""
        # What alters weights has to see them.
        if self._alter_weights is None:
            with self._using_backend:
                self.backend.prepare_sync(source)

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Give the engines in the workers these weights. Backends call it."""
        if isinstance(weights, StoredTensors):
            # Workers read what a trainer's rank has stored: no copy is made on the way.
            reference = weights.stored
        else:
            reference = ray.put(TensorBytes.of(weights))
        self._sync_workers("load_weights", reference, version)

    def set_min_version(self, version: int) -> None:
        """Let the engines in the workers use only answers of weights ``version`` or later. Backends
        call it."""
        self._sync_workers("set_min_version", version)

    def _sync_workers(self, method: str, *arguments: Any) -> None:
        """Call a method of all workers, and of every later one before it is used."""
        with self._changing_workers:
            self._last_sync = (method, *arguments)
            self._call_all(method, *arguments)

    def engine_scores(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        """Return the log-probs of ``token_ids[1:]`` from the engine of every
        worker. Backends call it."""
        return self._call_all("score", token_ids, temperature)

    def engine_rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        """Return the rounding error of the engine of every worker. Backends call it."""
        return self._call_all("rounding_error", token_ids)

    def engine_digests(self) -> list[Digests]:
        """Return digests of the quantized experts that the engine of every worker holds. Backends
        call it."""
        return [self._call(index, "packed_digests") for index in range(len(self._workers))]

    @property
    def scores_beside_rollouts(self) -> bool:
        """See ``RolloutBackend``."""
        return self.backend.scores_beside_rollouts

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        """Return the log-probs of ``token_ids[1:]``, in nats, from every engine."""
        with self._using_backend:
            return self.backend.score(token_ids, temperature)

    def rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        """Return how far rounding moves the log-probs of ``score`` in every engine.

        Nats per token. None for engines that cannot measure it.
        """
        with self._using_backend:
            return self.backend.rounding_errors(token_ids)

    def packed_digests(self) -> list[Digests]:
        """Return digests of the quantized experts that each engine holds; empty if that cannot be
        told."""
        return self.backend.packed_digests()

    def compare_weights(self) -> None:
        """Raise an error that names a tensor which an engine holds otherwise than the trainer, if
        that can be told."""
        with self._using_backend:
            self.backend.compare_weights()

    def engine_settings(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what an engine says of itself, as far as it knows the names."""
        with self._using_backend:
            return self.backend.engine_settings(names)

    def pause(self) -> None:
        """Run no episodes until the next weight sync: engines on the trainer's
        GPUs free their memory."""
        with self._using_backend:
            self.backend.pause()

    @contextmanager
    def updating_weights(self, version: int) -> Iterator[None]:
        """Block healing while the source of the last sync updates its weights to ``version``, and
        until the next sync: one engine with newer weights than the others would let versions fall
        within an episode that leaves it."""
        with self._using_backend:
            self._may_heal = False
        with self.backend.updating_weights(version):
            yield

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop workers and engines. Calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._changed:
            self._changed.notify()
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

        # The thread may wait for one that is to take the place of another.
        if self._successor is not None:
            ray.kill(self._successor)
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)


def _with_references(group: TrajectoryGroup, routes: Sequence[Any]) -> TrajectoryGroup:
    """Return a group whose stored routes know where they are stored."""
    trajectories = list(group.trajectories)
    for i, trajectory in enumerate(trajectories):
        located = [
            replace(sequence.routed_experts, reference=routes[i])
            for sequence in trajectory.sequences
            if isinstance(sequence.routed_experts, StoredRoutes)
        ]
        if located:
            trajectories[i] = with_routes(trajectory, located)
    return replace(group, trajectories=trajectories)
