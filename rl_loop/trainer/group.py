"""The trainer ranks as Ray actors, driven as one object."""

import os
import socket
from threading import Lock
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from megatron_gptoss.packing import Sample
from megatron_gptoss.trainer import StepStatistics
from megatron_gptoss.user_error import UserError
from rl_loop.cluster.placement import (
    TRAINER_RANK,
    has_placement,
    master_address,
    outlive_sigterm,
    placement_options,
)
from rl_loop.data.rollout_batch import RlUpdates, TokenEstimates
from rl_loop.engines.backend import WeightSender
from rl_loop.logs import with_logging
from rl_loop.trainer.rank_start import check_local_ranks, start_limit, wait_for_processes
from rl_loop.trainer.settings import TrainerSettings
from rl_loop.trainer.worker import TrainerWorker


class RankDied(UserError, RuntimeError):
    """The process of a trainer rank is gone; the message names rank, host and what
    Ray knows of the reason."""


class TrainerProcess(TrainerWorker):
    """A rank that answers as soon as its process runs; ``start``, which is collective, makes a
    TrainerWorker of it."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def start(self) -> None:
        super().__init__(*self._arguments)


class TrainerGroup:
    """All ranks do the same thing at the same time; what rank 0 returns is the result."""

    def __init__(self, settings: TrainerSettings) -> None:
        """Start the ranks' processes; ``ready`` waits for them."""
        world = settings.parallel.world_size
        cores = os.cpu_count() or 1
        has_gpus = ray.cluster_resources().get("GPU", 0) >= world
        if not has_gpus and not has_placement():
            check_local_ranks(world, cores)

        actor_class = ray.remote(with_logging(TrainerProcess))
        master, port = master_address()
        threads = max(1, cores // world)
        self._ranks: list[Any] = []
        for rank in range(world):
            actor = actor_class.options(
                num_cpus=0,
                num_gpus=1 if has_gpus else 0,
                **placement_options(TRAINER_RANK, rank),
            )
            self._ranks.append(actor.remote(settings, rank, master, port, threads))

        self._processes = ["a node not yet known"] * world
        self._asking = Lock()
        self._start_limit = start_limit(world, cores)

        # All at once, so that they load their weights while the rollouts start.
        self._started = [rank.__ray_call__.remote(_process) for rank in self._ranks]
        self._loaded = [rank.start.remote() for rank in self._ranks]

    def ready(self) -> None:
        """Wait until every rank has its weights; raises what went wrong in one."""
        wait_for_processes(self._started, self._start_limit)
        self._processes = self._join(self._started)
        self._join(self._loaded)

    def _all(self, method: str, *arguments: Any) -> Any:
        # What is asked is collective: every rank must hear two threads in the same order.
        with self._asking:
            calls = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        return self._join(calls)[0]

    def _join(self, calls: list[Any]) -> list[Any]:
        """Return all results, or raise the error of the rank that failed first.

        A death is the reason of its neighbours' errors: it is told even if
        one of them was faster."""
        failures: dict[int, Exception] = {}
        waiting = list(calls)
        # After a first failure wait a little longer: a death may explain it.
        while waiting:
            ended, waiting = ray.wait(waiting, num_returns=1, timeout=2 if failures else None)
            if not ended:
                break
            try:
                ray.get(ended[0])
            except (RayActorError, RayTaskError) as failure:
                failures[calls.index(ended[0])] = failure
        if not failures:
            return ray.get(calls)

        for rank, error in failures.items():
            if isinstance(error, RayActorError) and not error.actor_init_failed:
                raise RankDied(
                    f"trainer rank {rank} on {self._processes[rank]} died: {_reason(error)}"
                ) from error
        rank, error = next(iter(failures.items()))
        error.add_note(f"first on trainer rank {rank} on {self._processes[rank]}")
        raise error

    def sft_step(self, samples: list[Sample], step: int) -> StepStatistics:
        return self._all("sft_step", ray.put(samples), step)

    def compute_values_and_reference_log_probs(self, samples: list[Sample]) -> TokenEstimates:
        return self._all("compute_values_and_reference_log_probs", ray.put(samples))

    def rl_step(self, samples: list[Sample], step: int) -> RlUpdates:
        return self._all("rl_step", ray.put(samples), step)

    def score(self, samples: list[Sample], temperature: float | None = None) -> list[list[float]]:
        return self._all("score", ray.put(samples), temperature)

    def route_agreement(self) -> dict[str, float]:
        return self._all("route_agreement")

    def greedy_tokens(self, samples: list[Sample]) -> list[list[int]]:
        return self._all("greedy_tokens", ray.put(samples))

    def weights(self) -> dict[str, torch.Tensor]:
        return self._all("weights")

    def send_weights(self, sender: WeightSender) -> None:
        self._all("send_weights", sender)

    def save(self, step: int, state: dict[str, Any], block: bool) -> None:
        self._all("save", step, state, block)

    def resume(self) -> dict[str, Any] | None:
        return self._all("resume")

    def close(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)


def _process(worker: TrainerWorker) -> str:
    outlive_sigterm(worker)
    return f"{socket.gethostname()} (pid {os.getpid()})"


def _reason(error: RayActorError) -> str:
    """Ray's last sentence about a death; what comes before repeats class, pid and address."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "exit type" in line or "node" in line.lower()), lines[0])
