"""Samples and losses for tests of the algorithms' formulas."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from converters.hf_directory import write_hf_directory
from converters.names import hf_shapes
from converters.random_weights import random_hf_weights
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.packing import PackedBatch, build_batch
from megatron_gptoss.samples import TrainingSamples
from rl_loop.algorithms.choices import CispoLoss, GaeAdvantage, GspoLoss, PpoLoss
from rl_loop.algorithms.config import AlgorithmConfig, CriticConfig, KlConfig


def samples(lengths: tuple[int, ...] = (5, 9, 3, 6), seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)

    def row(n: int) -> list[float]:
        return torch.randn(n, generator=generator).tolist()

    def below_zero(n: int) -> list[float]:
        return [-abs(x) for x in row(n)]

    return [
        {
            "token_ids": list(range(n)),
            "loss_mask": [0, 0] + [1] * (n - 2),
            "advantages": [row(1)[0]] * n,
            "rollout_log_probs": below_zero(n),
            "old_log_probs": below_zero(n),
            "reference_log_probs": below_zero(n),
            "values": row(n),
            "returns": row(n),
            "staleness": [max(0, i % 3 - 1) for i in range(n)],
            "is_off_policy": [i % 3 == 0 for i in range(n)],
        }
        for n in lengths
    ]


def build_sample_batch(
    everyone: list[dict[str, Any]], part: list[int] | None = None, align: int = 1
) -> PackedBatch:
    """Return one micro-batch of some of the samples, by default of all."""
    return build_batch(TrainingSamples.join(everyone), part, align)


def loss_tokens(everyone: list[dict[str, Any]]) -> torch.Tensor:
    return torch.from_numpy(TrainingSamples.join(everyone).loss_tokens)


def in_fp64(batch: PackedBatch) -> PackedBatch:
    columns = {f.name: getattr(batch, f.name) for f in fields(batch)}
    floats = {
        k: v.double() for k, v in columns.items() if torch.is_tensor(v) and v.is_floating_point()
    }
    return replace(batch, **floats)


CONFIGS = {
    "ppo": AlgorithmConfig(
        mini_batches=2,
        policy_loss=PpoLoss(dual_clip=3.0),
        max_staleness=1,
        kl=KlConfig(),
        entropy_bonus=0.01,
    ),
    "gspo": AlgorithmConfig(
        mini_batches=2, policy_loss=GspoLoss(), aggregation="seq-mean-token-mean"
    ),
    "cispo": AlgorithmConfig(
        mini_batches=2, policy_loss=CispoLoss(), aggregation="seq-mean-token-sum-norm"
    ),
    "sequence mis": AlgorithmConfig.model_validate(
        {
            "mini_batches": 2,
            "correction": {
                "weight": "sequence_mis",
                "bounds": (0.01, 100.0),
                "geometric_bounds": (0.2, 4.0),
                "k3_limit": 9.0,
                "veto": 1e-4,
                "off_policy_limit": 1e-4,
            },
        }
    ),
    "critic": AlgorithmConfig(advantage=GaeAdvantage(), critic=CriticConfig()),
}


def save_teacher(directory: Path, model: ModelConfig, seed: int) -> Path:
    """Write a teacher with random weights whose distributions are far from uniform."""
    weights = random_hf_weights(model, seed)
    names = hf_shapes(model)
    tensors = ((name, weights(name) * (8 if name == "lm_head.weight" else 1)) for name in names)
    write_hf_directory(directory, model, tensors)
    return directory
