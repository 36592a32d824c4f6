"""The trainer's ranks as Ray actors."""

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayTaskError

from megatron_gptoss.user_error import UserError
from rl_loop.cluster.actor_deaths import ACTOR_DEATHS, died_by_itself
from rl_loop.cluster.placement import (
    TRAINER_RANK,
    has_placement,
    master_address,
    outlive_sigterm,
    placement_options,
    ranks_are_here,
)
from rl_loop.cluster.ray_session import local_directory
from rl_loop.config.parts import TrainerConfig
from rl_loop.logs import with_logging
from rl_loop.trainer.rank_answers import RankPlace
from rl_loop.trainer.rank_start import check_local_ranks, start_limit, wait_for_processes

if TYPE_CHECKING:
    from rl_loop.trainer.worker import TrainerWorker


class RankDied(UserError, RuntimeError):
    """The process of a trainer rank is gone; the message names rank, host and what
    Ray knows of the reason."""


class TrainerProcess:
    """The process of a rank, which answers as soon as it runs; ``start``, which is collective, makes
    the rank's TrainerWorker in it."""

    worker: "TrainerWorker"
    """The rank, once ``start`` has returned."""

    def __init__(self, *arguments: Any) -> None:
        """``arguments``: of the TrainerWorker."""
        # Not at the top: the driver reads this file too, and Megatron takes it over a second.
        from rl_loop.trainer.worker import TrainerWorker

        self._make_worker = partial(TrainerWorker, *arguments)

    def start(self) -> RankPlace:
        self.worker = self._make_worker()
        return self.worker.place()

    def call(self, method: str, is_asked: bool, *arguments: Any) -> Any:
        """Call a method of the worker. Its result goes to the driver only if ``is_asked``: what all
        ranks know is sent once."""
        result = getattr(self.worker, method)(*arguments)
        return result if is_asked else None

    def call_and_store(self, method: str, is_asked: bool) -> tuple[None, Any]:
        """Call a method and return two things, of which Ray makes objects: the first says that it
        has ended, the second is its result."""
        return None, self.call(method, is_asked)


class RayRanks:
    """One process for each rank, on this machine or where ``gptoss launch`` planned it."""

    def __init__(self, settings: TrainerConfig) -> None:
        """Start the processes; ``ready`` waits for them."""
        world = settings.parallel.world_size
        cores = os.cpu_count() or 1
        has_gpus = ray.cluster_resources().get("GPU", 0) >= world
        if not has_gpus and not has_placement():
            check_local_ranks(world, cores)

        actor_class = ray.remote(with_logging(TrainerProcess))
        master, port = master_address()
        self._store_file: Path | None = None
        if ranks_are_here(world):
            self._store_file = local_directory() / f"ranks-{uuid.uuid4().hex}"
        threads = max(1, cores // world)
        self.actors: list[Any] = []
        for rank in range(world):
            actor = actor_class.options(
                num_cpus=0,
                num_gpus=1 if has_gpus else 0,
                **placement_options(TRAINER_RANK, rank),
            )
            self.actors.append(
                actor.remote(settings, rank, master, port, threads, self._store_file)
            )

        self._processes = ["a node not yet known"] * world
        self._asking = Lock()
        self._start_limit = start_limit(world, cores)

        # All at once, so that they load their weights while the rollouts start.
        self._started = [rank.__ray_call__.remote(_process) for rank in self.actors]
        self._loaded = [rank.start.remote() for rank in self.actors]

    def ready(self) -> list[RankPlace]:
        """Wait until every rank has its weights, and return where each stands; raises what went
        wrong in one."""
        wait_for_processes(self._started, self._start_limit)
        self._processes = self._join(self._started)
        return self._join(self._loaded)

    def store(self, value: Any) -> Any:
        """Put a value where ranks read it without a copy; a method gets what was put there."""
        return ray.put(value)

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], asked: Sequence[int]
    ) -> list[Any]:
        """Call a method on every rank with its own arguments, and return what the ranks ``asked``
        returned; of the others nothing is sent."""
        # What is asked is collective: every rank must hear two threads in the same order.
        with self._asking:
            calls = [
                actor.call.remote(method, rank in asked, *arguments[rank])
                for rank, actor in enumerate(self.actors)
            ]
        results = self._join(calls)
        return [results[rank] for rank in asked]

    def call_and_store(self, method: str) -> Callable[[], Any]:
        """Begin to call a method on every rank. What is returned waits for them, and returns the
        reference to rank 0's result: it stays in the store, where other processes read it, and
        does not pass through this one."""
        ended = []
        results = []
        with self._asking:
            for rank, actor in enumerate(self.actors):
                call = actor.call_and_store.options(num_returns=2)
                has_ended, result = call.remote(method, rank == 0)
                ended.append(has_ended)
                results.append(result)

        def stored() -> Any:
            self._join(ended)
            return results[0]

        return stored

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        if self._store_file is not None:
            self._store_file.unlink(missing_ok=True)

    def _join(self, calls: list[Any]) -> list[Any]:
        """Return all results, or raise the error of the rank that failed first.

        A death is the reason of its neighbours' errors: it is told even if
        one of them was faster."""
        results: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        waiting = list(calls)
        # After a first failure wait a little longer: a death may explain it.
        while waiting:
            ended, waiting = ray.wait(waiting, num_returns=1, timeout=2 if failures else None)
            if not ended:
                break
            rank = calls.index(ended[0])
            try:
                results[rank] = ray.get(ended[0])
            except (*ACTOR_DEATHS, RayTaskError) as failure:
                failures[rank] = failure
        if not failures:
            return [results[rank] for rank in range(len(calls))]

        for rank, error in failures.items():
            if died_by_itself(error):
                raise RankDied(
                    f"trainer rank {rank} on {self._processes[rank]} died: {_reason(error)}"
                ) from error
        rank, error = next(iter(failures.items()))
        error.add_note(f"first on trainer rank {rank} on {self._processes[rank]}")
        raise error


def _process(actor: TrainerProcess) -> str:
    outlive_sigterm(actor)
    return f"{socket.gethostname()} (pid {os.getpid()})"


def _reason(error: Exception) -> str:
    """Ray's last sentence about a death; what comes before repeats class, pid and address."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "exit type" in line or "node" in line.lower()), lines[0])
