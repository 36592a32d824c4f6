"""Rollout workers as Ray actors, and a pool that loses no episode when one of them dies."""

import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError

from rl_loop.cluster.placement import ROLLOUT_WORKER, outlive_sigterm, place_of
from rl_loop.config.run import RunConfig
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.engines.sglang.fleet import SglangFleet, WeightSource
from rl_loop.environments import Task
from rl_loop.infrastructure import InfrastructureBreaker, describe
from rl_loop.rollout.worker import RolloutWorker
from rl_loop.tasks.task_file import TaskFileError
from rl_loop.tracking.logs import with_logging
from rl_loop.tracking.metric_sinks import RolloutCounters

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupRequest:
    """Episodes of one task to run. One seed per sample: the same request gives the same episodes on any worker."""

    task: Task
    seeds: tuple[int, ...]
    temperature: float
    purify: bool = False
    """Whether ``rollout.purification`` applies, which only episodes to train on have: an evaluation measures the
    policy, not the policy and its retries."""


class RolloutsAbandoned(Exception):
    """The caller no longer wants the episodes that were asked for."""


class RolloutPool:
    """``config.rollout.workers`` workers; a dead one is replaced and its work redone."""

    MAX_RESTARTS = 10
    """Per pool; more deaths mean something that a restart does not mend."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._threads = max(1, (os.cpu_count() or 1) // config.rollout.workers)
        self._weights: tuple[Any, int] | None = None
        self._restarts = 0
        self._counters = RolloutCounters()
        self._fleet = SglangFleet(config) if config.rollout.engine == "sglang" else None
        self._workers = [self._start(index) for index in range(config.rollout.workers)]

    def _start(self, index: int) -> Any:
        actor = ray.remote(with_logging(RolloutWorker))
        servers = self._fleet.actors if self._fleet else None
        concurrency = self._config.rollout.max_batch_size * 4
        options = {"num_cpus": 0, "max_concurrency": concurrency, **place_of(ROLLOUT_WORKER, index)}
        worker: Any = actor.options(**options).remote(self._config, self._threads, servers)
        worker.__ray_call__.remote(outlive_sigterm)
        return worker

    def ready(self) -> None:
        """Wait until every worker's engine and sandbox run; raises what went wrong in one."""
        if self._fleet:
            self._fleet.ready()
        ray.get([worker.start.remote() for worker in self._workers])

    def sync_weights(self, weights: dict[str, torch.Tensor] | WeightSource, version: int) -> None:
        """Give all engines the policy under a version number: tensors by Hugging Face name, or who sends them.

        A source must keep what it has sent until the next call: servers that were restarted get it again."""
        if self._fleet:
            self._fleet.sync(weights, version)
            weights = {}
        self._weights = (ray.put(weights), version)
        for index in range(len(self._workers)):
            self._call(index, "sync_weights", *self._weights)

    def compare_weights(self) -> None:
        """Raises WeightMismatch naming a tensor that a server holds otherwise than the trainer."""
        if self._fleet:
            self._fleet.compare()

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        """Log-probs of ``token_ids[1:]`` from every engine; servers know only temperature 1."""
        if self._fleet:
            return self._fleet.score(token_ids, temperature)
        return [self._call(index, "score", token_ids, temperature) for index in range(len(self._workers))]

    def run(
        self, requests: Sequence[GroupRequest], abandon: Callable[[], bool] = lambda: False
    ) -> list[TrajectoryGroup]:
        """Run all episodes; groups come back in the order of ``requests``, those that infrastructure failures ended set
        apart. ``abandon`` is asked every second; if it says so, RolloutsAbandoned is raised. Raises
        InfrastructureOutage if too many episodes failed, and TaskFileError if no task can be run."""
        rollout = self._config.rollout
        breaker = InfrastructureBreaker(rollout.max_invalid_share, rollout.max_invalid_streak)
        results: dict[int, TrajectoryGroup] = {}
        waiting = deque(enumerate(requests))
        running: dict[Any, tuple[int, int]] = {}  # object reference -> (request, worker)
        # every worker gets its even share at once: an engine is fastest with a full batch
        for index in itertools.cycle(range(len(self._workers))):
            if not waiting:
                break
            number, request = waiting.popleft()
            running[self._submit(index, request)] = (number, index)
        while running:
            ended, _ = ray.wait(list(running), num_returns=1, timeout=1)
            if abandon():
                raise RolloutsAbandoned
            if self._fleet:
                self._fleet.heal()
            if not ended:
                continue
            reference = ended[0]
            number, index = running.pop(reference)
            try:
                results[number] = ray.get(reference)
                self._counters.count(index, results[number])
                breaker.observe(results[number])
            except RayActorError as death:
                lost = [number] + [n for n, i in running.values() if i == index]
                running = {ref: (n, i) for ref, (n, i) in running.items() if i != index}
                self._replace(index, death)
                for n in lost:
                    running[self._submit(index, requests[n])] = (n, index)
        breaker.check_share()
        groups = [results[number] for number in range(len(requests))]
        if groups and all(group.skipped is not None for group in groups):
            raise TaskFileError(f"no task of {len(groups)} can be run: {groups[0].skipped}")
        return groups

    def _submit(self, index: int, request: GroupRequest) -> Any:
        return self._workers[index].run_group.remote(
            request.task, request.seeds, request.temperature, purify=request.purify
        )

    def _call(self, index: int, method: str, *arguments: Any) -> Any:
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
                    "memory, lower rollout.max_batch_size or rollout.workers"
                ) from death
            logger.warning("rollout worker %d died and is replaced: %s", index, describe(death))
            self._workers[index] = self._start(index)
            try:
                ray.get(self._workers[index].start.remote())
                if self._weights is not None:
                    ray.get(self._workers[index].sync_weights.remote(*self._weights))
                return
            except RayActorError as again:
                death = again

    def engine_settings(self, names: Sequence[str]) -> dict[str, Any]:
        """What an engine says of itself, as far as it knows the names."""
        if self._fleet:
            return self._fleet.settings(names)
        return {"engine": "transformers, embedded", "dtype": self._config.dtype}

    def sleep(self) -> None:
        """No episodes until the next weight sync: servers on the trainer's GPUs give it their memory."""
        if self._fleet:
            self._fleet.sleep()

    def source_changing_to(self, version: int) -> AbstractContextManager[None]:
        """While the source of the last sync learns, servers that were restarted wait; afterwards it has ``version``."""
        return self._fleet.source_changing_to(version) if self._fleet else nullcontext()

    def close(self) -> None:
        for worker in self._workers:
            with suppress(RayActorError, GetTimeoutError):
                ray.get(worker.close.remote(), timeout=10)
            ray.kill(worker)
        if self._fleet:
            self._fleet.close()
