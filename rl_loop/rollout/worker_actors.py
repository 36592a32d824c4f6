"""The Ray actors of a pool's rollout workers. An actor that dies is replaced."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any

import ray

from rl_loop.cluster.actor_deaths import ACTOR_DEATHS, ActorDeath, RecentDeaths
from rl_loop.cluster.placement import (
    ROLLOUT_WORKER,
    check_node,
    ignore_sigterm,
    placement_options,
)
from rl_loop.config.partial_configs import EpisodesConfig
from rl_loop.infrastructure import describe
from rl_loop.logs import with_logging
from rl_loop.rollout.worker import RolloutWorker

CONTROL_CALLS = 8
"""Concurrent calls of a worker in addition to its groups, so that a weight sync need not wait."""

RESTART_SECONDS = 3600.0
"""Period in seconds within which MAX_RESTARTS counts."""

PLACE_SECONDS = 5.0
"""Interval in seconds of the check that the node of a starting worker is alive."""

WORKER_CLOSE_SECONDS = 10.0
"""Time in seconds for workers to end their sandboxes and engines before they are killed."""

logger = logging.getLogger(__name__)


class PoolClosedError(Exception):
    """The pool was closed while its thread waited for a worker."""


class WorkerActors:
    """The actors, by index. Several threads may call them."""

    MAX_RESTARTS = 10
    """Maximum deaths of workers within RESTART_SECONDS. More have a cause that a restart does not
    remove."""

    def __init__(
        self,
        config: EpisodesConfig,
        engine_factory: Callable[..., Any],
        worker_class: type[RolloutWorker],
    ) -> None:
        """Create the actors, which start in the background.

        Args:
            config: configuration of the run.
            engine_factory: creates the engine of a worker.
            worker_class: class of the workers.
        """
        self._config = config
        self._engine_factory = engine_factory
        self._worker_class = worker_class
        # Workers with a thread per core each would slow each other down.
        self._threads = max(1, (os.cpu_count() or 1) // config.rollout.worker_count)

        # One thread at a time changes the workers or their weights. Other threads see a replacement
        # only after it has the current weights.
        self._lock = RLock()
        self.deaths = RecentDeaths(RESTART_SECONDS)
        self.last_sync: tuple[Any, ...] | None = None
        """Method and arguments that give a replacement's engine the current weights or their
        version."""
        self._replacement: Any = None

        # Workers that have not answered yet are killed on close without waiting.
        self._has_started = False
        self._is_closed = False
        self._workers = [self._create(index) for index in range(config.rollout.worker_count)]

    def __len__(self) -> int:
        return len(self._workers)

    def __getitem__(self, index: int) -> Any:
        return self._workers[index]

    def start(self) -> None:
        """Wait until every worker's engine and sandbox run. An exception of one is raised here."""
        ray.get([worker.start.remote() for worker in self._workers])
        self._has_started = True

    def _create(self, index: int) -> Any:
        """Start the actor of a rollout worker."""
        actor_class: Any = ray.remote(with_logging(self._worker_class))
        actor = actor_class.options(
            # Workers are placed by custom resources, so Ray reserves no CPUs for them.
            num_cpus=0,
            max_concurrency=self._config.rollout.max_concurrent_tasks + CONTROL_CALLS,
            **placement_options(ROLLOUT_WORKER, index),
        )
        worker = actor.remote(self._config, self._engine_factory, self._threads)
        # The first call, so that Slurm's signal does not end a worker that is starting.
        worker.__ray_call__.remote(ignore_sigterm)
        return worker

    def call(self, index: int, method: str, *arguments: Any) -> Any:
        """Call a method of one worker. If the worker is dead, replace it and call the replacement."""
        while True:
            worker = self._workers[index]
            try:
                return ray.get(getattr(worker, method).remote(*arguments))
            except ACTOR_DEATHS as death:
                self.replace(index, worker, death)

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all workers at the same time, and return the results in their order.

        Dead workers are replaced, and their replacements are called.
        """
        workers = list(self._workers)
        references = [getattr(worker, method).remote(*arguments) for worker in workers]

        results = []
        for index, reference in enumerate(references):
            try:
                results.append(ray.get(reference))
            except ACTOR_DEATHS as death:
                self.replace(index, workers[index], death)
                # Call only the replacement again, because other workers have answered or still run.
                results.append(self.call(index, method, *arguments))
        return results

    def call_each(self, method: str, inputs: Sequence[Any], *arguments: Any) -> list[Any]:
        """Call a method for every input at the same time, each on one of the workers.

        Dead workers are replaced, and their calls are repeated.
        """
        workers = list(self._workers)
        references = [
            getattr(workers[i % len(workers)], method).remote(value, *arguments)
            for i, value in enumerate(inputs)
        ]
        results = []
        for i, reference in enumerate(references):
            index = i % len(workers)
            try:
                results.append(ray.get(reference))
            except ACTOR_DEATHS as death:
                self.replace(index, workers[index], death)
                results.append(self.call(index, method, inputs[i], *arguments))
        return results

    def replace(self, index: int, dead: Any, death: ActorDeath) -> None:
        """Replace a dead worker, and give the new one the current weights.

        Does nothing if the other thread has replaced the worker already.
        """
        with self._lock:
            # A loop, because a replacement may die while it starts.
            while self._workers[index] is dead:
                if self._is_closed:
                    raise PoolClosedError
                self._count_death(death)

                logger.warning("rollout worker %d died; replacing it: %s", index, describe(death))
                try:
                    self._workers[index] = self._start_replacement(index)
                except ACTOR_DEATHS as again:
                    death = again

    def _count_death(self, death: ActorDeath) -> None:
        """Raise RuntimeError if too many workers have died in a short time."""
        deaths = self.deaths.add(time.monotonic())
        if deaths > self.MAX_RESTARTS:
            raise RuntimeError(
                f"rollout workers died {deaths} times within {self.deaths.seconds:.0f} s, the "
                f"last with: {death}. If memory was exhausted, lower rollout.workers, or "
                "rollout.engine.max_batch_size of embedded engines"
            ) from death

    def _start_replacement(self, index: int) -> Any:
        """Return a new worker with the current weights.

        Raises:
            ActorDeath: the worker died. It is one of ACTOR_DEATHS.
            NodeLostError: the node of the worker has died.
        """
        self._replacement = self._create(index)
        start = self._replacement.start.remote()
        # If the node has died, Ray would wait for another node with its resources without end.
        while not ray.wait([start], timeout=PLACE_SECONDS)[0]:
            check_node(ROLLOUT_WORKER, index)
        ray.get(start)
        # Load weights before other threads see the worker, because episodes with initial weights
        # would mix policies.
        if self.last_sync is not None:
            method, *arguments = self.last_sync
            ray.get(getattr(self._replacement, method).remote(*arguments))
        return self._replacement

    def sync(self, method: str, *arguments: Any) -> None:
        """Call a method of all workers, and of every later worker before its first use."""
        with self._lock:
            # Set first, so that the replacement of a worker that dies during the calls gets these
            # weights.
            self.last_sync = (method, *arguments)
            self.call_all(method, *arguments)

    def close(self) -> None:
        """End all workers, and a replacement that is starting."""
        self._is_closed = True
        # A worker that is still starting would answer only after its imports.
        if self._has_started:
            closing = [worker.close.remote() for worker in self._workers]
            ray.wait(closing, num_returns=len(closing), timeout=WORKER_CLOSE_SECONDS)
        for worker in self._workers:
            ray.kill(worker)

        # Another thread may wait for the replacement of a dead worker.
        if self._replacement is not None:
            ray.kill(self._replacement)
