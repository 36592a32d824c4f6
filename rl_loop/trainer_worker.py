"""One trainer rank: everything that touches Megatron. A plain class; ``trainer_group`` makes Ray actors of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from converters.hf_directory import HfDirectory
from converters.live import export_hf_weights, load_hf_weights
from converters.random_weights import random_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.checkpoint import latest_checkpoint, load_checkpoint, load_model_weights, save_checkpoint
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import PackedBatch, Sample, pack, unpack
from megatron_gptoss.trainer import (
    LossFunction,
    PolicyTrainer,
    StepStatistics,
    alignment,
    data_parallel_slice,
    learning_rate_at,
)
from rl_loop.algorithms.objectives import policy_objective, sft_objective
from rl_loop.config import AlgorithmConfig, RunConfig


class TrainerWorker:
    """Every method is collective: the driver calls it on all ranks with the same arguments."""

    def __init__(self, config: RunConfig, rank: int, master: str, port: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.config = config
        distributed.initialize(config.parallel, rank, master, port)
        self.model = build_model(config.model, config.parallel, getattr(torch, config.dtype))
        self._load_initial_weights()
        self.trainer = PolicyTrainer(self.model, config.optimizer)

    def _load_initial_weights(self) -> None:
        source = self.config.initial_weights
        if source is None:
            get = random_hf_weights(self.config.model, self.config.seed)
            load_hf_weights(self.model, self.config.model, get)
        elif (source / "config.json").exists():
            directory = HfDirectory(source)
            load_hf_weights(self.model, self.config.model, directory.get)
        else:
            checkpoints = source / "checkpoints"
            load_model_weights(latest_checkpoint(checkpoints) or source, self.model)

    # -- training -----------------------------------------------------------------------------------------------------

    def sft_step(self, samples: list[Sample], step: int) -> StepStatistics:
        """One optimizer step on demonstrations."""
        return self._update(samples, sft_objective(_loss_tokens(samples)), step)

    def rl_step(self, samples: list[Sample], algorithm: AlgorithmConfig, step: int) -> list[StepStatistics]:
        """``algorithm.mini_batches`` optimizer steps on one batch of episodes; one means no second forward pass."""
        count = algorithm.mini_batches
        if count > 1:
            old = self.score(samples)
            samples = [replace(sample, old_log_probs=old[i]) for i, sample in enumerate(samples)]
        statistics = []
        for part in range(count):
            mini_batch = samples[part::count]
            objective = policy_objective(algorithm, _loss_tokens(mini_batch))
            statistics.append(self._update(mini_batch, objective, step))
        return statistics

    def _update(self, samples: list[Sample], objective: LossFunction, step: int) -> StepStatistics:
        rate = learning_rate_at(step, self.config.optimizer, self.config.training.steps)
        return self.trainer.train_step(self._batches(samples), objective, rate, self.config.rollout.temperature)

    def _batches(self, samples: list[Sample]) -> Sequence[PackedBatch]:
        parallel = self.config.parallel
        limit = self.config.training.max_tokens_per_micro_batch
        return data_parallel_slice(pack(samples, limit, parallel.data, alignment()))

    def score(self, samples: list[Sample], temperature: float | None = None) -> list[list[float]]:
        """Per sample the log-prob of each of its tokens, 0.0 for the first; in the order of ``samples``."""
        batches = self._batches(samples)
        values = self.trainer.score(batches, temperature or self.config.rollout.temperature)
        return self._in_order(values, batches, len(samples))

    def most_likely(self, samples: list[Sample]) -> list[list[int]]:
        """Per sample the token that greedy decoding would have put in each place, 0 for the first."""
        batches = self._batches(samples)
        chosen = self._in_order(self.trainer.most_likely(batches), batches, len(samples))
        return [[int(token) for token in row] for row in chosen]

    @staticmethod
    def _in_order(values: list[torch.Tensor], batches: Sequence[PackedBatch], count: int) -> list[list[float]]:
        own: dict[int, list[float]] = {}
        for row, batch in zip(values, batches, strict=True):
            own |= unpack(row, batch)
        everyone: list[dict[int, list[float]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, own)
        merged = {sample_id: row for part in everyone for sample_id, row in part.items()}
        return [merged[i] for i in range(count)]

    # -- weights and checkpoints --------------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor] | None:
        """All weights by Hugging Face name on rank 0, None elsewhere."""
        named = {name: tensor.detach().clone() for name, tensor in export_hf_weights(self.model, self.config.model)}
        return named if dist.get_rank() == 0 else None

    def save(self, step: int, state: dict[str, Any]) -> str:
        root = self.config.directory / "checkpoints"
        return str(save_checkpoint(root, self.trainer, step, state, self.config.training.keep_checkpoints))

    def resume(self) -> dict[str, Any] | None:
        """Load the newest checkpoint of the run; None if there is none."""
        path = latest_checkpoint(self.config.directory / "checkpoints")
        return load_checkpoint(path, self.trainer) if path is not None else None


def _loss_tokens(samples: list[Sample]) -> int:
    tokens = sum(sum(sample.loss_mask[1:]) for sample in samples)
    if tokens == 0:
        raise ValueError(f"none of the {len(samples)} samples has a token to learn from")
    return tokens
