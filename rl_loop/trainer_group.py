"""The trainer ranks as Ray actors, driven as one object."""

from __future__ import annotations

import os
import socket
from typing import Any

import ray
import torch

from megatron_gptoss.packing import Sample
from megatron_gptoss.trainer import StepStatistics
from rl_loop.config import AlgorithmConfig, RunConfig
from rl_loop.trainer_worker import TrainerWorker


class TrainerGroup:
    """All ranks do the same thing at the same time; what rank 0 returns is the result."""

    def __init__(self, config: RunConfig) -> None:
        world = config.parallel.world_size
        threads = max(1, (os.cpu_count() or 1) // world)
        actor = ray.remote(TrainerWorker)
        gpus = 1 if ray.cluster_resources().get("GPU", 0) >= world else 0
        port = _free_port()
        self._ranks: list[Any] = [
            actor.options(num_cpus=0, num_gpus=gpus).remote(config, rank, "127.0.0.1", port, threads)
            for rank in range(world)
        ]

    def ready(self) -> None:
        """Wait until every rank has its weights; raises what went wrong in one."""
        ray.get([rank.__ray_ready__.remote() for rank in self._ranks])

    def _all(self, method: str, *arguments: Any) -> Any:
        return ray.get([getattr(rank, method).remote(*arguments) for rank in self._ranks])[0]

    def sft_step(self, samples: list[Sample], step: int) -> StepStatistics:
        return self._all("sft_step", ray.put(samples), step)

    def rl_step(self, samples: list[Sample], algorithm: AlgorithmConfig, step: int) -> list[StepStatistics]:
        return self._all("rl_step", ray.put(samples), algorithm, step)

    def score(self, samples: list[Sample], temperature: float | None = None) -> list[list[float]]:
        return self._all("score", ray.put(samples), temperature)

    def most_likely(self, samples: list[Sample]) -> list[list[int]]:
        return self._all("most_likely", ray.put(samples))

    def weights(self) -> dict[str, torch.Tensor]:
        return self._all("weights")

    def save(self, step: int, state: dict[str, Any]) -> str:
        return self._all("save", step, state)

    def resume(self) -> dict[str, Any] | None:
        return self._all("resume")

    def close(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
