"""Pool of rollout workers, which repeats the work of workers that die.

Two threads use a pool. The driver's thread admits groups, syncs weights and trains. The pool's
thread assigns groups to workers, detects their end or death, and lets the backend recover engines.
Therefore episodes continue while the driver waits for the trainer.
"""

import heapq
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from threading import Condition, Lock, Thread
from typing import Any

import ray
import torch

from converters.mxfp4_tensors import Digests
from rl_loop.cluster.actor_deaths import ACTOR_DEATHS
from rl_loop.config.partial_configs import EpisodesConfig
from rl_loop.data.stored_routes import StoredRoutes
from rl_loop.data.tensor_bytes import StoredTensors, TensorBytes
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.engines.backend import RolloutBackend
from rl_loop.rollout.group_stream import AdmittedGroup, GroupRequest, GroupStream, run_groups
from rl_loop.rollout.worker import RolloutWorker, with_routes
from rl_loop.rollout.worker_actors import CONTROL_CALLS, WORKER_CLOSE_SECONDS, WorkerActors
from rl_loop.tracking.prometheus_metrics import RolloutCounters
from rl_loop.weight_sync.source import WeightSource

WAIT_SECONDS = 0.05
"""Time in seconds for which the pool's thread waits for groups to end before it assigns new
ones."""

RECOVERY_SECONDS = 1.0
"""Interval in seconds at which the backend recovers engines while groups run."""

logger = logging.getLogger(__name__)


@dataclass(order=True)
class WaitingGroup:
    """Group without a worker, because it is new or its worker died.

    Groups are assigned in the order of their admission, also after a worker's death.
    """

    turn: int
    admitted: AdmittedGroup = field(compare=False)


@dataclass(frozen=True)
class GroupAssignment:
    """Group that a worker runs."""

    waiting: WaitingGroup
    """The group before its assignment."""
    index: int
    """Index of the worker."""
    worker: Any
    """Actor of the worker. After its death another actor has its index."""
    routes: list[Any]
    """References to the routes of the group's episodes. Empty without routes."""


class RolloutPool:
    """The engines of a run and the workers that run episodes with them.

    A dead worker is replaced, and its work is repeated.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        config: EpisodesConfig,
        alter_weights: Callable[[WeightSource, int], WeightSource] | None = None,
        worker_class: type[RolloutWorker] = RolloutWorker,
    ) -> None:
        """Create the workers, which start in the background.

        Args:
            backend: the engines.
            config: configuration of the run.
            alter_weights: injects faults into the weights of a version before the engines get them.
                None for no faults.
            worker_class: class of the workers.
        """
        self.backend = backend
        self._alter_weights = alter_weights
        self._config = config
        self._counters = RolloutCounters()

        # Groups without a worker, in the order of admission. The condition guards them.
        self._changed = Condition()
        self._waiting: list[WaitingGroup] = []
        self._turns = count()
        self._streams: list[GroupStream] = []
        self._failure: BaseException | None = None

        # Only the pool's thread uses these: the running groups, by the reference to their result.
        self._running: dict[Any, GroupAssignment] = {}
        self._recovered_at = 0.0

        # One thread at a time uses the backend.
        self._backend_lock = Lock()
        self._may_recover = True

        self._is_closed = False
        self._workers = WorkerActors(config, backend.engine_factory(), worker_class)
        self._thread = Thread(target=self._run_thread, name="rollouts", daemon=True)

    # -- workers ----------------------------------------------------------------------------------

    def ready(self) -> None:
        """Wait until every worker's engine and sandbox run. An exception of one is raised here."""
        self.backend.start(self)
        self._workers.start()
        self._thread.start()

    # -- episodes ---------------------------------------------------------------------------------

    def stream(self) -> GroupStream:
        """Return a stream of groups that these workers run."""
        stream = GroupStream(self._admit)
        with self._changed:
            self._streams = [known for known in self._streams if not known.is_closed]
            self._streams.append(stream)
            # The thread has ended, so no later message would reach this stream.
            if self._failure is not None:
                stream.deliver(self._failure)
        return stream

    def run(
        self, requests: Sequence[GroupRequest], abandon: Callable[[], bool] = lambda: False
    ) -> list[TrajectoryGroup]:
        """Run all episodes and wait for them, as ``run_groups`` does."""
        return run_groups(self, requests, self._config.rollout, abandon)

    def _admit(self, admitted: AdmittedGroup) -> None:
        with self._changed:
            heapq.heappush(self._waiting, WaitingGroup(next(self._turns), admitted))
            self._changed.notify()

    # -- the pool's thread ------------------------------------------------------------------------

    def _run_thread(self) -> None:
        """Assign groups and collect results until the pool is closed."""
        try:
            while not self._is_closed:
                self._assign_groups()
                self._await_groups()
                self._recover_engines()
        except Exception as error:
            # No caller joins this thread, so deliver the error to every stream.
            if not self._is_closed:
                self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        """Raise ``error`` in all current and later streams."""
        with self._changed:
            self._failure = error
            for stream in self._streams:
                stream.deliver(error)

    def _assign_groups(self) -> None:
        """Assign waiting groups to the workers with the fewest groups."""
        loads = [0] * len(self._workers)
        for assignment in self._running.values():
            loads[assignment.index] += 1

        while True:
            index = loads.index(min(loads))
            if loads[index] == self._config.rollout.max_concurrent_tasks:
                return
            with self._changed:
                if not self._waiting:
                    return
                waiting = heapq.heappop(self._waiting)
            # No caller waits for this group.
            if waiting.admitted.stream.is_closed:
                continue
            self._submit(waiting, index)
            loads[index] += 1

    def _submit(self, waiting: WaitingGroup, index: int) -> None:
        """Start a group on a worker and add it to the running groups."""
        worker = self._workers[index]
        request = waiting.admitted.request
        arguments = (request.task, request.seeds, request.temperature)
        if request.with_routes and self._config.rollout.routed_experts:
            # Routes are separate objects, which belong to this process but stay on the worker's
            # node. They survive the worker and are freed with the last reference.
            run_group = worker.run_group_and_store_routes.options(
                num_returns=1 + len(request.seeds)
            )
            reference, *routes = run_group.remote(*arguments, purify=request.purify)
        else:
            reference = worker.run_group.remote(*arguments, purify=request.purify)
            routes = []
        self._running[reference] = GroupAssignment(waiting, index, worker, routes)

    def _await_groups(self) -> None:
        """Wait briefly for a group to end, or for the first group to be admitted."""
        if not self._running:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed, RECOVERY_SECONDS)
            return

        # One at a time, so that a dead worker is detected before the others have finished.
        ended, _ = ray.wait(list(self._running), num_returns=1, timeout=WAIT_SECONDS)
        for reference in ended:
            self._end(reference, self._running.pop(reference))

    def _end(self, reference: Any, assignment: GroupAssignment) -> None:
        """Deliver a group that has ended to its stream. If its worker died, let it run again."""
        admitted = assignment.waiting.admitted
        try:
            group = ray.get(reference)
        except ACTOR_DEATHS as death:
            self._workers.replace(assignment.index, assignment.worker, death)
            with self._changed:
                heapq.heappush(self._waiting, assignment.waiting)
            return
        except Exception as error:
            # A fault of the agent loop or of an environment, which another worker would repeat.
            admitted.fail(error)
            return

        # Counted only here, so that episodes of a dead worker, which run again, do not count twice.
        self._counters.count(assignment.index, group)
        admitted.end(_with_references(group, assignment.routes))

    def _recover_engines(self) -> None:
        """Let the backend recover engines, about once per second while groups run."""
        if not self._running or time.monotonic() < self._recovered_at + RECOVERY_SECONDS:
            return
        # The driver uses the backend. Try again in the next round.
        if not self._backend_lock.acquire(blocking=False):
            return
        try:
            if self._may_recover:
                self.backend.recover_engines()
        finally:
            self._recovered_at = time.monotonic()
            self._backend_lock.release()

    # -- engines ----------------------------------------------------------------------------------

    def sync_weights(self, source: WeightSource, version: int) -> None:
        """Give all engines the policy's weights, see ``RolloutBackend.sync_weights``.

        Running groups continue with the new weights.
        """
        if self._alter_weights is not None:
            source = self._alter_weights(source, version)
        with self._backend_lock:
            self.backend.sync_weights(source, version)
            self._may_recover = True

    def prepare_sync(self, source: WeightSource) -> None:
        """Begin the next ``sync_weights`` from the same source as far as it needs no engine.

        The source must have the new weights.
        """
        # Altered weights are computed from the tensors in ``sync_weights``.
        if self._alter_weights is None:
            with self._backend_lock:
                self.backend.prepare_sync(source)

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load these weights into the engines of the workers. For backends."""
        if isinstance(weights, StoredTensors):
            # Workers read the object that a trainer's rank has stored, without a copy in this
            # process.
            reference = weights.stored
        else:
            # Stored once. With the tensors as an argument Ray would store them for every worker.
            reference = ray.put(TensorBytes.of(weights))
        self._workers.sync("load_weights", reference, version)

    def set_min_version(self, version: int) -> None:
        """Make the workers' clients reject tokens of weights before ``version``. For backends."""
        self._workers.sync("set_min_version", version)

    def engine_scores(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        """Return the log-probs of ``token_ids[1:]`` from every worker's engine. For backends."""
        return self._workers.call_all("score", token_ids, temperature)

    def engine_rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        """Return the rounding error of every worker's engine. For backends."""
        return self._workers.call_all("rounding_error", token_ids)

    def engine_digests(self) -> list[Digests]:
        """Return digests of the quantized experts in every worker's engine. For backends."""
        return [self._workers.call(index, "mxfp4_digests") for index in range(len(self._workers))]

    @property
    def scores_during_rollouts(self) -> bool:
        """True if engines can score while episodes run, see ``RolloutBackend``."""
        return self.backend.scores_during_rollouts

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        """Return the log-probs of ``token_ids[1:]``, in nats, from every engine."""
        with self._backend_lock:
            return self.backend.score(token_ids, temperature)

    def score_each(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Return the log-probs of ``ids[1:]``, in nats, of every sequence from one of the engines."""
        scores: list[list[float]] = []
        # A worker accepts this many calls at a time.
        at_a_time = CONTROL_CALLS * len(self._workers)
        for first in range(0, len(sequences), at_a_time):
            scores += self._workers.call_each("score", sequences[first : first + at_a_time], 1.0)
        return scores

    def rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        """Return the effect of rounding on the log-probs of ``score`` in every engine.

        The unit is nats per token. None for engines that cannot measure it.
        """
        with self._backend_lock:
            return self.backend.rounding_errors(token_ids)

    def mxfp4_digests(self) -> list[Digests]:
        """Return digests of the quantized experts in each engine. Empty if they are unknown."""
        return self.backend.mxfp4_digests()

    def compare_weights(self) -> None:
        """Raise an error if a tensor of an engine differs from the trainer's. It names the tensor.

        Backends that cannot compare do nothing.
        """
        with self._backend_lock:
            self.backend.compare_weights()

    def engine_settings(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the named settings as reported by an engine. Unknown names are left out."""
        with self._backend_lock:
            return self.backend.engine_settings(names)

    def pause(self) -> None:
        """Free the memory of colocated servers until the next weight sync.

        Does nothing for embedded engines and for servers with their own GPUs.
        """
        with self._backend_lock:
            self.backend.pause()

    @contextmanager
    def updating_weights(self, version: int) -> Iterator[None]:
        """Block recovery while the source of the last sync updates its weights to ``version``.

        Recovery stays blocked until the next sync. A recovered engine would have newer weights than
        the others, so the versions within an episode that leaves it could decrease.
        """
        with self._backend_lock:
            self._may_recover = False
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
            self._workers.close()
            if self._thread.is_alive():
                self._thread.join(WORKER_CLOSE_SECONDS)
        finally:
            self.backend.close()


def _with_references(group: TrajectoryGroup, routes: Sequence[Any]) -> TrajectoryGroup:
    """Return a group whose stored routes have their references."""
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
