"""Losses over packed micro-batches, normalised over the whole batch, with the metrics that belong to them.

Every objective is a sum over tokens divided by the number of loss tokens of the *global* batch ("token mean"), so how
the batch is cut into micro-batches and ranks does not change it.
"""

from __future__ import annotations

import torch

from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.trainer import LossFunction, LossOutput
from rl_loop.algorithms.mismatch import mismatch_sums
from rl_loop.algorithms.policy_loss import ppo_loss
from rl_loop.config import AlgorithmConfig


def sft_objective(loss_tokens: int) -> LossFunction:
    """Cross-entropy in nats per loss token. ``loss_tokens``: of the global batch."""

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch) -> LossOutput:
        on = batch.loss_mask > 0
        total = -torch.where(on, log_probs, 0.0).sum()
        return LossOutput(total / loss_tokens, {"loss": total, "tokens": on.sum()})

    return loss


def policy_objective(config: AlgorithmConfig, loss_tokens: int) -> LossFunction:
    """The PPO surrogate. On-policy (the batch has no old log-probs) the importance ratio is exactly 1."""

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch) -> LossOutput:
        on = batch.loss_mask > 0
        policy = ppo_loss(
            log_probs, batch.old_log_probs, batch.advantages, config.clip_low, config.clip_high, config.dual_clip
        )
        total = torch.where(on, policy.loss, 0.0).sum()
        sums, maxima = mismatch_sums(log_probs, batch.rollout_log_probs, batch.loss_mask)
        sums |= {
            "loss": total,
            "tokens": on.sum(),
            "entropy": torch.where(on, entropy, 0.0).sum(),
            "clipped": (policy.clipped & on).sum(),
            "ratio": torch.where(on, policy.ratio, 0.0).sum(),
        }
        maxima["ratio_deviation"] = torch.where(on, (policy.ratio - 1).abs(), 0.0).max()
        return LossOutput(total / loss_tokens, sums, maxima)

    return loss
