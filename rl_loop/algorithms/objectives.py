"""Losses over packed micro-batches, with the metrics that belong to them: weighted sums over tokens, whose weights
follow from counts of the *global* mini-batch, so how it is cut into micro-batches and ranks changes nothing.

A token that is left out (outside the loss mask, stale, or dropped by rollout correction) has no gradient from any term
and no influence on the gradient of another, whatever its log-prob says. It still counts in the denominators, which are
known before anything is computed, unless it is outside the loss mask."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_gptoss.packing import GRAFTED, PackedBatch, Sample
from megatron_gptoss.trainer import LossFunction, LossOutput
from rl_loop.algorithms import policy_loss
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.correction import Correction, mismatch_sums, rollout_correction
from rl_loop.algorithms.sequences import Sequences, sample_weights


def sft_objective(loss_tokens: int) -> LossFunction:
    """Cross-entropy in nats per loss token. ``loss_tokens``: of the global batch."""

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch) -> LossOutput:
        on = batch.loss_mask > 0
        total = -torch.where(on, log_probs, 0.0).sum()
        return LossOutput(total / loss_tokens, {"loss": total, "tokens": on.sum()})

    return loss


@dataclass(frozen=True)
class TokenRoles:
    """What each token of a micro-batch may do, bool [tokens] each."""

    sampled: torch.Tensor  # in the loss mask: what the policy sampled, of episodes that are not excluded
    stale: torch.Tensor  # sampled more weight versions ago than the algorithm takes
    fresh: torch.Tensor  # sampled and not stale
    comparable: torch.Tensor  # fresh, and sampled by the engine where it stands now: not grafted


def token_roles(batch: PackedBatch, max_staleness: int) -> TokenRoles:
    """Read the roles of tokens from the loss mask and staleness of a micro-batch."""
    sampled = batch.loss_mask > 0
    if batch.staleness is None:
        return TokenRoles(sampled, torch.zeros_like(sampled), sampled, sampled)

    stale = sampled & (batch.staleness > max_staleness)
    fresh = sampled & ~stale
    return TokenRoles(sampled, stale, fresh, fresh & (batch.staleness != GRAFTED))


def policy_objective(
    config: AlgorithmConfig, mini_batch: Sequence[Sample], max_tokens: int = 1, group: dist.ProcessGroup | None = None
) -> LossFunction:
    """The policy loss with correction, KL penalty and entropy bonus.

    ``mini_batch``: all samples of the optimizer step, on all ranks; ``max_tokens``: the longest possible sample;
    ``group``: context-parallel ranks. Where the batch has no old log-probs the importance ratio is exactly 1."""
    sample_weight = _token_weights(config, mini_batch, max_tokens)

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch) -> LossOutput:
        roles = token_roles(batch, config.max_staleness)
        sequences = _sequences(batch, len(mini_batch), group)
        weight = sequences.spread(sample_weight.to(log_probs.device))

        old = batch.old_log_probs
        # with the engine's log-probs as old ones, the trainer's at the time of sampling are best known by the new ones
        trainer = log_probs.detach() if old is None or config.old_log_probs_from == "rollout" else old
        moved = None if old is None else old - log_probs.detach()
        log_rho = trainer - batch.rollout_log_probs
        correction = rollout_correction(
            config.correction, log_rho, roles.comparable, sequences, batch.advantages, moved, moved_mask=roles.fresh
        )
        learns = roles.fresh & correction.keeps

        policy = _policy_loss(config, log_probs, batch, learns, sequences)
        terms = correction.weights * policy.loss - config.entropy_bonus * _only(learns, entropy)
        if config.kl and config.kl.place == "loss" and batch.reference_log_probs is not None:
            reference = _only(learns, batch.reference_log_probs)
            kl = policy_loss.kl_estimate(_only(learns, log_probs), reference, config.kl.estimator)
            terms = terms + config.kl.coefficient * kl
        total = _only(learns, terms * weight).sum()

        # metrics are of all sampled tokens, also of those that are left out
        sums, maxima = mismatch_sums(trainer, batch.rollout_log_probs, roles.comparable, sequences)
        sampled = roles.sampled
        if batch.reference_log_probs is not None:
            estimator = config.kl.estimator if config.kl else "k3"
            kl = policy_loss.kl_estimate(log_probs.detach(), batch.reference_log_probs, estimator)
            sums["kl_reference"] = _only(sampled, kl).sum()
        for reason, tokens in (correction.dropped | {"stale": roles.stale}).items():
            sums[f"correction/dropped_{reason}"] = (tokens & sampled).sum()
        truncated = roles.comparable & (policy_loss.bounded_exp(log_rho) > config.correction.cap)
        sums |= {
            "loss": total,
            "tokens": sampled.sum(),
            "comparable": roles.comparable.sum(),
            "entropy": _only(sampled, entropy).sum(),
            "clip_fraction": (policy.clipped & learns).sum(),
            "ratio/mean": _only(sampled, policy.ratio).sum(),
            "correction/weight": _only(roles.fresh, correction.weights).sum(),
            "correction/truncated": truncated.sum(),
        }
        maxima["ratio/deviation_max"] = _only(learns, (policy.ratio - 1).abs()).max()
        return LossOutput(total, sums, maxima)

    return loss


def value_objective(
    config: AlgorithmConfig, mini_batch: Sequence[Sample], max_tokens: int = 1, group: dist.ProcessGroup | None = None
) -> LossFunction:
    """The critic's clipped squared error; arguments as above.

    What the policy leaves out as stale, or rollout correction drops before the update, the critic leaves out too.
    OPSM is no part of that: it looks at how far the update of the policy has gone."""
    clip = config.critic.value_clip if config.critic else 0.5
    sample_weight = _token_weights(config, mini_batch, max_tokens)

    def loss(values: torch.Tensor, batch: PackedBatch) -> LossOutput:
        if batch.values is None or batch.returns is None:
            raise ValueError("the critic's batch has no values and returns")
        roles = token_roles(batch, config.max_staleness)
        sequences = _sequences(batch, len(mini_batch), group)
        weight = sequences.spread(sample_weight.to(values.device))
        learns = roles.fresh
        if config.correction.rejects and batch.old_log_probs is not None:
            learns = learns & _correction_before_update(config, batch, roles, sequences).keeps

        old, returns = _only(learns, batch.values), _only(learns, batch.returns)
        each, clipped = policy_loss.value_loss(_only(learns, values), old, returns, clip)
        total = _only(learns, each * weight).sum()

        sampled = roles.sampled
        error = (batch.returns - values.detach()).square()
        columns = {"error": error, "returns": batch.returns, "returns_square": batch.returns.square()}
        sums = {name: _only(sampled, column).sum() for name, column in columns.items()}
        return LossOutput(total, sums | {"loss": total, "tokens": sampled.sum(), "clipped": (clipped & learns).sum()})

    return loss


def _correction_before_update(
    config: AlgorithmConfig, batch: PackedBatch, roles: TokenRoles, sequences: Sequences
) -> Correction:
    """What rollout correction says of the trainer's log-probs from before the update."""
    assert batch.old_log_probs is not None
    log_rho = batch.old_log_probs - batch.rollout_log_probs
    return rollout_correction(config.correction, log_rho, roles.comparable, sequences, batch.advantages)


def _policy_loss(
    config: AlgorithmConfig, log_probs: torch.Tensor, batch: PackedBatch, learns: torch.Tensor, sequences: Sequences
) -> policy_loss.PolicyLoss:
    """The configured loss; tokens that do not learn go in as zeros.

    Masking the result would not do: in a backward pass 0 x NaN is NaN."""
    new = _only(learns, log_probs)
    old = None if batch.old_log_probs is None else _only(learns, batch.old_log_probs)
    advantages = _only(learns, batch.advantages)
    bounds = (config.clip_low, config.clip_high)
    if config.policy_loss == "ppo":
        return policy_loss.ppo_loss(new, old, advantages, *bounds, config.dual_clip)
    if config.policy_loss == "gspo":
        return policy_loss.gspo_loss(new, old, advantages, learns, sequences, *bounds)
    if config.policy_loss == "cispo":
        return policy_loss.cispo_loss(new, old, advantages, *bounds)
    if config.policy_loss == "reinforce":
        return policy_loss.reinforce_loss(new, advantages)
    raise ValueError(f"unknown policy loss {config.policy_loss!r}")


def _only(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``values`` [tokens] where ``mask`` is true, and 0 elsewhere, without a gradient there."""
    return torch.where(mask, values, 0.0)


def _token_weights(config: AlgorithmConfig, mini_batch: Sequence[Sample], max_tokens: int) -> torch.Tensor:
    tokens = torch.tensor([sum(sample.loss_mask[1:]) for sample in mini_batch])
    return sample_weights(tokens, config.aggregation, max_tokens)


def _sequences(batch: PackedBatch, count: int, group: dist.ProcessGroup | None = None) -> Sequences:
    return Sequences(batch.sample_ids.clamp(min=0), count, group)
