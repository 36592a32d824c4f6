"""Losses over packed micro-batches, with the metrics that belong to them: weighted sums over tokens, whose weights
follow from counts of the *global* mini-batch, so how it is cut into micro-batches and ranks changes nothing."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_gptoss.packing import GRAFTED, PackedBatch, Sample
from megatron_gptoss.trainer import LossFunction, LossOutput
from rl_loop.algorithms import policy_loss
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.correction import mismatch_sums, rollout_correction
from rl_loop.algorithms.sequences import Sequences, sample_weights


def sft_objective(loss_tokens: int) -> LossFunction:
    """Cross-entropy in nats per loss token. ``loss_tokens``: of the global batch."""

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch) -> LossOutput:
        on = batch.loss_mask > 0
        total = -torch.where(on, log_probs, 0.0).sum()
        return LossOutput(total / loss_tokens, {"loss": total, "tokens": on.sum()})

    return loss


def policy_objective(
    config: AlgorithmConfig, mini_batch: Sequence[Sample], max_tokens: int = 1, group: dist.ProcessGroup | None = None
) -> LossFunction:
    """The policy loss with correction, KL penalty and entropy bonus.

    ``mini_batch``: all samples of the optimizer step, on all ranks; ``max_tokens``: the longest possible sample;
    ``group``: context-parallel ranks. Where the batch has no old log-probs the importance ratio is exactly 1."""
    sample_weight = _token_weights(config, mini_batch, max_tokens)

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch) -> LossOutput:
        on, sequences = batch.loss_mask > 0, _sequences(batch, len(mini_batch), group)
        weight = sequences.spread(sample_weight.to(log_probs.device))
        old = batch.old_log_probs
        # with the engine's log-probs as old ones, the trainer's at the time of sampling are best known by the new ones
        trainer = log_probs.detach() if old is None or config.old_log_probs_from == "rollout" else old
        comparable, stale = on, torch.zeros_like(on)
        if batch.staleness is not None:
            comparable, stale = on & (batch.staleness != GRAFTED), batch.staleness > config.max_staleness
        log_rho = torch.where(comparable, trainer - batch.rollout_log_probs, 0.0)
        moved = None if old is None else old - log_probs.detach()
        correction = rollout_correction(config.correction, log_rho, on, sequences, batch.advantages, moved)
        policy = _policy_loss(config, log_probs, batch, on, sequences)
        dropped = correction.dropped | {"stale": stale}
        terms = torch.where(stale, 0.0, correction.weights) * policy.loss - config.entropy_bonus * entropy
        sums, maxima = mismatch_sums(trainer, batch.rollout_log_probs, comparable, sequences)
        if batch.reference_log_probs is not None:
            estimator = config.kl.estimator if config.kl else "k3"
            kl = policy_loss.kl_estimate(log_probs, batch.reference_log_probs, estimator)
            sums["kl_reference"] = torch.where(on, kl.detach(), 0.0).sum()
            if config.kl and config.kl.place == "loss":
                terms = terms + config.kl.coefficient * kl
        total = torch.where(on, terms * weight, 0.0).sum()
        sums |= {f"correction/dropped_{reason}": (tokens & on).sum() for reason, tokens in dropped.items()}
        sums |= {
            "loss": total,
            "tokens": on.sum(),
            "comparable": comparable.sum(),
            "entropy": torch.where(on, entropy, 0.0).sum(),
            "clip_fraction": (policy.clipped & on).sum(),
            "ratio/mean": torch.where(on, policy.ratio, 0.0).sum(),
            "correction/weight": torch.where(on, correction.weights, 0.0).sum(),
            "correction/truncated": (on & (log_rho.exp() > config.correction.cap)).sum(),
        }
        maxima["ratio/deviation_max"] = torch.where(on, (policy.ratio - 1).abs(), 0.0).max()
        return LossOutput(total, sums, maxima)

    return loss


def value_objective(config: AlgorithmConfig, mini_batch: Sequence[Sample], max_tokens: int = 1) -> LossFunction:
    """The critic's clipped squared error; arguments as above."""
    clip = config.critic.value_clip if config.critic else 0.5
    sample_weight = _token_weights(config, mini_batch, max_tokens)

    def loss(values: torch.Tensor, batch: PackedBatch) -> LossOutput:
        if batch.values is None or batch.returns is None:
            raise ValueError("the critic's batch has no values and returns")
        on = batch.loss_mask > 0
        weight = _sequences(batch, len(mini_batch)).spread(sample_weight.to(values.device))
        each, clipped = policy_loss.value_loss(values, batch.values, batch.returns, clip)
        error = (batch.returns - values.detach()).square()
        total = torch.where(on, each * weight, 0.0).sum()
        columns = {"error": error, "returns": batch.returns, "returns_square": batch.returns.square()}
        sums = {name: torch.where(on, column, 0.0).sum() for name, column in columns.items()}
        return LossOutput(total, sums | {"loss": total, "tokens": on.sum(), "clipped": (clipped & on).sum()})

    return loss


def _policy_loss(
    config: AlgorithmConfig, log_probs: torch.Tensor, batch: PackedBatch, on: torch.Tensor, sequences: Sequences
) -> policy_loss.PolicyLoss:
    given, clip = (log_probs, batch.old_log_probs, batch.advantages), (config.clip_low, config.clip_high)
    if config.policy_loss == "ppo":
        return policy_loss.ppo_loss(*given, *clip, config.dual_clip)
    if config.policy_loss == "gspo":
        return policy_loss.gspo_loss(*given, on, sequences, *clip)
    if config.policy_loss == "cispo":
        return policy_loss.cispo_loss(*given, *clip)
    return policy_loss.reinforce_loss(log_probs, batch.advantages)


def _token_weights(config: AlgorithmConfig, mini_batch: Sequence[Sample], max_tokens: int) -> torch.Tensor:
    tokens = torch.tensor([sum(sample.loss_mask[1:]) for sample in mini_batch])
    return sample_weights(tokens, config.aggregation, max_tokens)


def _sequences(batch: PackedBatch, count: int, group: dist.ProcessGroup | None = None) -> Sequences:
    return Sequences(batch.sample_ids.clamp(min=0), count, group)
