"""Settings of a trainer from a shipped configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.config.training import TrainingConfig

MODEL = GptOssModelConfig(num_layers=2, num_experts=8)
LIMIT = 64


def build_settings(ranks: int, mini_batches: int = 1, **training: Any) -> Any:
    """Return the part of TrainerConfig that data distribution reads."""
    return SimpleNamespace(
        model=MODEL,
        training=TrainingConfig(max_tokens_per_micro_batch=LIMIT, **training),
        parallel=SimpleNamespace(data=ranks, micro_batch_multiple=1),
        objective=AlgorithmConfig(mini_batches=mini_batches),
    )
