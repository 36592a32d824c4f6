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
from rl_loop.cluster.actor_deaths import ACTOR_DEATHS, process_died
from rl_loop.cluster.placement import (
    TRAINER_RANK,
    has_placement,
    ignore_sigterm,
    master_address,
    placement_options,
    ranks_are_here,
)
from rl_loop.cluster.ray_session import local_directory
from rl_loop.config.partial_configs import TrainerConfig
from rl_loop.logs import with_logging
from rl_loop.trainer.rank_start import check_local_ranks, start_limit, wait_for_processes
from rl_loop.trainer.rank_state import RankPosition

if TYPE_CHECKING:
    from rl_loop.trainer.worker import TrainerWorker


class RankDiedError(UserError, RuntimeError):
    """The process of a trainer rank died. The message names rank, host and Ray's reason."""


class TrainerProcess:
    """Process of a rank. It answers as soon as it runs.

    ``start``, which is collective, creates the rank's TrainerWorker in the process.
    """

    worker: "TrainerWorker"
    """The rank, after ``start``."""

    def __init__(self, serves_tenants: bool, *arguments: Any) -> None:
        """Store the ``arguments`` of the worker. Its class is TenantWorker if it serves tenants."""
        # Imported here, because the driver reads this file, too. Megatron's import takes over 1 s.
        from rl_loop.trainer.tenant_worker import TenantWorker
        from rl_loop.trainer.worker import TrainerWorker

        # The model is built later, in ``start``: until then this process can report that it runs.
        worker_class = TenantWorker if serves_tenants else TrainerWorker
        self._make_worker = partial(worker_class, *arguments)

    def start(self) -> RankPosition:
        self.worker = self._make_worker()
        return self.worker.position()

    def call(self, method: str, returns_result: bool, *arguments: Any) -> Any:
        """Call a method of the worker. Return its result only if ``returns_result``.

        Results that all ranks know are sent to the driver once.
        """
        result = getattr(self.worker, method)(*arguments)
        return result if returns_result else None

    def call_and_store(self, method: str, returns_result: bool) -> tuple[None, Any]:
        """Call a method and return two values, which Ray stores as separate objects.

        The first one shows that the call has ended. The second one is the result.
        """
        return None, self.call(method, returns_result)


class RayRanks:
    """One process for each rank, on this machine or on the nodes of ``gptoss launch``."""

    def __init__(self, settings: TrainerConfig, *, serves_tenants: bool = False) -> None:
        """Start the processes. ``ready`` waits for them.

        Args:
            settings: settings of all ranks.
            serves_tenants: whether each rank is a TenantWorker.
        """
        world = settings.parallel.world_size
        cores = os.cpu_count() or 1
        # All ranks have a GPU or none has, because they share one process group.
        has_gpus = ray.cluster_resources().get("GPU", 0) >= world
        if not has_gpus and not has_placement():
            check_local_ranks(world, cores)

        actor_class = ray.remote(with_logging(TrainerProcess))
        master, port = master_address()
        self._store_file: Path | None = None
        # Only this user can read the file, while every user of the machine can connect to a port.
        if ranks_are_here(world):
            self._store_file = local_directory() / f"ranks-{uuid.uuid4().hex}"
        # Ranks on one machine share its cores. By default torch uses all of them in every process.
        threads = max(1, cores // world)
        self.actors: list[Any] = []
        for rank in range(world):
            actor = actor_class.options(
                # With a core for each, Ray would not start more ranks than there are cores.
                num_cpus=0,
                num_gpus=1 if has_gpus else 0,
                **placement_options(TRAINER_RANK, rank),
            )
            self.actors.append(
                actor.remote(
                    serves_tenants, settings, rank, master, port, threads, self._store_file
                )
            )

        self._processes = ["a node not yet known"] * world
        self._asking = Lock()
        self._start_limit = start_limit(world, cores)

        # All ranks start at once, so that they load their weights while the rollouts start.
        # An actor's calls run in order. The first one is short, so it shows that the process runs.
        self._started = [rank.__ray_call__.remote(_process) for rank in self.actors]
        self._loaded = [rank.start.remote() for rank in self.actors]

    def ready(self) -> list[RankPosition]:
        """Wait until every rank has its weights, and return their positions.

        An exception of a rank is raised here.
        """
        # It only waits. The errors of ranks are raised when their results are read.
        wait_for_processes(self._started, self._start_limit)
        self._processes = self._join(self._started)
        return self._join(self._loaded)

    def store(self, value: Any) -> Any:
        """Store a value where ranks read it without a copy. Methods receive the value itself."""
        return ray.put(value)

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], result_ranks: Sequence[int]
    ) -> list[Any]:
        """Call a method on every rank.

        Args:
            method: name of a TrainerWorker method.
            arguments: arguments for each rank.
            result_ranks: ranks whose results are sent to the driver.

        Returns:
            Results of the ranks ``result_ranks``.
        """
        # The calls are collective, so every rank must receive those of two threads in the same
        # order.
        with self._asking:
            calls = [
                actor.call.remote(method, rank in result_ranks, *arguments[rank])
                for rank, actor in enumerate(self.actors)
            ]
        results = self._join(calls)
        return [results[rank] for rank in result_ranks]

    def call_and_store(self, method: str) -> Callable[[], Any]:
        """Begin to call a method on every rank.

        Returns:
            Function that waits for all ranks and returns the reference to rank 0's result. The
            result stays in the store, where other processes read it. It does not pass through this
            process.
        """
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
        # Killed, because a rank may wait in a collective call for a rank that has died.
        for actor in self.actors:
            ray.kill(actor)
        if self._store_file is not None:
            self._store_file.unlink(missing_ok=True)

    def _join(self, calls: list[Any]) -> list[Any]:
        """Return all results, or raise the error of the rank that failed first.

        A rank's death has priority over errors that arrive before it.
        """
        results: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        waiting = list(calls)
        # After a first failure wait a little longer, because a death may explain it.
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

        # The death of a rank causes the errors of the other ranks.
        for rank, error in failures.items():
            if process_died(error):
                raise RankDiedError(
                    f"trainer rank {rank} on {self._processes[rank]} died: {_reason(error)}"
                ) from error
        # Later errors of other ranks usually follow from the first one.
        rank, error = next(iter(failures.items()))
        error.add_note(f"first on trainer rank {rank} on {self._processes[rank]}")
        raise error


def _process(actor: TrainerProcess) -> str:
    ignore_sigterm(actor)
    return f"{socket.gethostname()} (pid {os.getpid()})"


def _reason(error: Exception) -> str:
    """Return Ray's last sentence about a death. Earlier ones repeat class, pid and address."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "exit type" in line or "node" in line.lower()), lines[0])
