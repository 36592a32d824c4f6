"""Scores of a text under weights of the local server that replaces SGLang."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from tests.support.rl_loop.sglang_protocol import (
    digest,
    log_prob,
    prefix_state,
)

ROOT = Path(__file__).parents[4]
MODEL = GptOssModelConfig(
    num_layers=2, num_experts=2, experts_per_token=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
    num_key_value_heads=2, head_size=16, vocab_size=640, max_length=1024,
)  # fmt: skip
TEXT = list(range(20, 60))


def scores_under(weights: dict[str, torch.Tensor]) -> list[float]:
    state, scores = prefix_state(TEXT[:1], digest(weights)), []
    for token in TEXT[1:]:
        state = prefix_state([token], "", state)
        scores.append(log_prob(state))
    return scores
