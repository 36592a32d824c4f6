"""Losses over packed micro-batches, with their metrics.

Losses are weighted sums over tokens. The weights follow from counts of the *global* mini-batch, so
its division into micro-batches and ranks changes nothing.

A token that is left out (outside the loss mask, too old, or dropped by rollout correction) has no
gradient from any term. It does not affect the gradient of another token, even if its log-prob is
NaN. The denominators are known before the computation, so they include such tokens, except for
tokens outside the loss mask.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.step_results import LossFunction, LossOutput
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.correction import Correction, mismatch_sums, rollout_correction
from rl_loop.algorithms.distillation import forward_kl, masked_divergence, teacher_divergence
from rl_loop.algorithms.policy_loss import (
    LossInputs,
    PolicyLoss,
    bounded_exp,
    bounded_expm1,
    kl_estimate,
    value_loss,
    zero_outside,
)
from rl_loop.algorithms.registry import POLICY_LOSSES
from rl_loop.algorithms.sequences import SequenceIndex, sample_weights

STALENESS_CLASSES = ("fresh", "stale")
"""Prefixes of the metrics of fresh and of stale tokens.

Fresh tokens were sampled with the current weights, stale tokens with earlier weights.
"""

LOSS_METRICS = "policy_loss/"
"""Prefix of the metrics that a policy loss returns in ``PolicyLoss.sums``."""

RETURNED_VALUES = ("trainer_log_probs", "entropy")
"""Per-token results of ``policy_objective``, in nats: the log-probs of the mismatch metrics, and
the entropy of the distribution in the update."""


def sft_objective(loss_tokens: int) -> LossFunction:
    """Return the mean cross-entropy in nats. ``loss_tokens`` counts those of the global batch."""

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch) -> LossOutput:
        in_loss = batch.loss_mask
        # Selected, not multiplied, because 0 times an infinite log-prob is NaN.
        total = -torch.where(in_loss, log_probs, 0.0).sum()
        # The gradient is of the mean over the global batch. The metric is divided when all ranks
        # are known.
        return LossOutput(total / loss_tokens, {"loss": total, "tokens": in_loss.sum()})

    return loss


def distillation_objective(loss_tokens: int) -> LossFunction:
    """Return the mean KL(teacher || policy) in nats, at the tokens in the loss.

    ``loss_tokens`` counts those of the global batch. The batches have the teacher's columns.
    """

    def loss(
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
        batch: PackedBatch,
        teacher_token_log_probs: torch.Tensor,
    ) -> LossOutput:
        in_loss = batch.loss_mask
        teacher = batch.column("teacher_top_log_probs")
        total = masked_divergence(forward_kl, teacher_token_log_probs, teacher, in_loss).sum()
        sums = {
            "loss": total,
            "tokens": in_loss.sum(),
            "distillation/teacher_mass": zero_outside(in_loss, teacher.exp().sum(-1)).sum(),
            "distillation/cross_entropy": -zero_outside(in_loss, log_probs.detach()).sum(),
        }
        return LossOutput(total / loss_tokens, sums)

    return loss


# ---- the policy


def policy_objective(
    config: AlgorithmConfig,
    loss_tokens: torch.Tensor,
    max_tokens: int = 1,
    group: dist.ProcessGroup | None = None,
    episodes: torch.Tensor | None = None,
) -> LossFunction:
    """Return the policy loss with correction, KL penalty and entropy bonus.

    The loss also returns RETURNED_VALUES of every token. Without old log-probs in the batch the
    importance ratio is exactly 1.

    Args:
        config: the algorithm.
        loss_tokens: int64 [samples], labels in the loss for every sample of the optimizer step, on
            all ranks.
        max_tokens: length of the longest possible sample.
        group: context-parallel ranks.
        episodes: int64 [samples], each sample's episode index. None if each sample is an
            episode.
    """
    # Computed once from counts of all ranks, so that micro-batches need no communication.
    sample_weight = sample_weights(loss_tokens, config.aggregation, max_tokens, episodes)

    def loss(
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
        batch: PackedBatch,
        teacher_token_log_probs: torch.Tensor | None = None,
    ) -> LossOutput:
        masks = token_masks(batch, config.max_staleness)
        sequences = _sequences(batch, len(loss_tokens), group)
        # The counts are on the CPU, and the tokens of a micro-batch are on the device of the rank.
        weight = sequences.to_tokens(sample_weight.to(log_probs.device))

        trainer_log_probs = _trainer_log_probs(config, log_probs, batch)
        correction = _correct(config, log_probs, trainer_log_probs, batch, masks, sequences)
        trained = masks.recent & correction.keeps

        # Left-out tokens enter every term as zeros, so that their NaN does not reach a gradient.
        policy = _policy_loss(config, log_probs, batch, trained, sequences)
        terms = correction.weights * policy.loss - config.entropy_bonus * zero_outside(
            trained, entropy
        )
        if config.kl and config.kl.apply_to == "loss" and batch.reference_log_probs is not None:
            reference = zero_outside(trained, batch.reference_log_probs)
            kl = kl_estimate(zero_outside(trained, log_probs), reference, config.kl.estimator)
            terms = terms + config.kl.coefficient * kl
        distillation: dict[str, torch.Tensor] = {}
        if config.distillation is not None and config.divergence is not None:
            assert teacher_token_log_probs is not None
            # Spliced tokens have no divergence, as they have no advantage of the teacher.
            compared = masks.comparable
            if batch.has_teacher is not None:
                compared = compared & batch.has_teacher
            distance, distillation = teacher_divergence(
                config.divergence,
                teacher_token_log_probs,
                batch.column("teacher_top_log_probs"),
                compared & trained,
                compared,
            )
            terms = terms + config.distillation.coefficient * distance
        # The weights do not depend on ``trained``, because the denominators are fixed before
        # correction drops tokens.
        total = zero_outside(trained, terms * weight).sum()

        # Metrics cover all sampled tokens, including those that are left out.
        rollout_log_probs = batch.column("rollout_log_probs")
        sums, maxima = mismatch_sums(
            trainer_log_probs, rollout_log_probs, masks.comparable, sequences
        )
        sums |= _policy_sums(config, log_probs, entropy, batch, masks, policy, trained)
        sums |= _correction_sums(config, correction, trainer_log_probs, batch, masks)
        sums |= distillation
        if config.max_staleness > 0:
            sums |= _sums_by_staleness(trainer_log_probs, policy.ratio, batch, masks)
        sums["loss"] = total
        maxima["ratio/deviation_max"] = zero_outside(trained, (policy.ratio - 1).abs()).max()
        token_values = {"trainer_log_probs": trainer_log_probs, "entropy": entropy.detach()}
        return LossOutput(total, sums, maxima, token_values)

    return loss


@dataclass(frozen=True)
class TokenMasks:
    """Roles of a micro-batch's tokens, bool [tokens] each."""

    sampled: torch.Tensor
    """In the loss mask: sampled by the policy, in an episode that is not excluded."""
    too_old: torch.Tensor
    """Sampled, and older than ``max_staleness`` weight versions. The collector of rollouts admits no
    such tokens, so this is a second safeguard."""
    recent: torch.Tensor
    """Sampled, and at most ``max_staleness`` weight versions old."""
    comparable: torch.Tensor
    """Recent, and sampled by the engine in this context, that is, not spliced. For other tokens rho
    counts as 1. Weights and rejections of their whole sequence apply to them, too."""


def token_masks(batch: PackedBatch, max_staleness: int) -> TokenMasks:
    """Return the masks by role of a micro-batch's tokens."""
    sampled = batch.loss_mask
    too_old = torch.zeros_like(sampled)
    if batch.staleness is not None:
        too_old = sampled & (batch.staleness > max_staleness)
    recent = sampled & ~too_old

    comparable = recent
    if batch.is_off_policy is not None:
        comparable = recent & ~batch.is_off_policy
    return TokenMasks(sampled=sampled, too_old=too_old, recent=recent, comparable=comparable)


def _trainer_log_probs(
    config: AlgorithmConfig, log_probs: torch.Tensor, batch: PackedBatch
) -> torch.Tensor:
    """Return the trainer's log-probs of the tokens with the weights that sampled them, if known."""
    # With the engine's log-probs as old log-probs they are unknown. The new log-probs are the
    # closest values.
    if batch.old_log_probs is None or config.old_log_probs_from == "rollout":
        return log_probs.detach()
    return batch.old_log_probs


def _correct(
    config: AlgorithmConfig,
    log_probs: torch.Tensor,
    trainer_log_probs: torch.Tensor,
    batch: PackedBatch,
    masks: TokenMasks,
    sequences: SequenceIndex,
) -> Correction:
    """Apply rollout correction to the tokens of a micro-batch."""
    log_old_over_new = None
    if batch.old_log_probs is not None:
        # A rejection decides which tokens count. No gradient may flow through the decision.
        log_old_over_new = batch.old_log_probs - log_probs.detach()

    return rollout_correction(
        config.correction,
        log_rho=trainer_log_probs - batch.column("rollout_log_probs"),
        mask=masks.comparable,
        sequences=sequences,
        advantages=batch.column("advantages"),
        log_old_over_new=log_old_over_new,
        moved_mask=masks.recent,
    )


def _policy_loss(
    config: AlgorithmConfig,
    log_probs: torch.Tensor,
    batch: PackedBatch,
    trained: torch.Tensor,
    sequences: SequenceIndex,
) -> PolicyLoss:
    """Call the configured loss.

    Left-out tokens enter as zeros.

    Raises:
        ValueError: the loss does not return a loss per token, or a metric is not a scalar.
    """
    # Masking the result is not enough, because 0 x NaN is NaN in a backward pass.
    old_log_probs = None
    if batch.old_log_probs is not None:
        old_log_probs = zero_outside(trained, batch.old_log_probs)

    inputs = LossInputs(
        log_probs=zero_outside(trained, log_probs),
        old_log_probs=old_log_probs,
        advantages=zero_outside(trained, batch.column("advantages")),
        mask=trained,
        sequences=sequences,
        columns=batch.columns,
    )
    # Resolved in this process, because users' functions are not sent from the driver.
    policy_loss = POLICY_LOSSES.resolve(config.policy_loss.type)
    result = policy_loss(inputs, **config.policy_loss.arguments)

    # A scalar mean would be broadcast, and would silently give all tokens the same weight.
    name = f"algorithm.policy_loss {config.policy_loss.type}"
    if not isinstance(result, PolicyLoss):
        raise ValueError(f"{name} returned {type(result).__name__}, expected PolicyLoss")
    for field in ("loss", "ratio", "clipped"):
        shape = getattr(result, field).shape
        if shape != log_probs.shape:
            raise ValueError(
                f"{name} returned {field} {list(shape)}, expected {list(log_probs.shape)}"
            )
    if log_probs.requires_grad and not result.loss.requires_grad:
        raise ValueError(
            f"{name} returned a loss that has no gradient for log_probs. Compute the loss from "
            "the log_probs of its inputs"
        )
    for metric, total in result.sums.items():
        if not isinstance(total, torch.Tensor) or total.shape != ():
            shape = list(total.shape) if isinstance(total, torch.Tensor) else type(total).__name__
            raise ValueError(f"{name} returned sums[{metric!r}] {shape}, expected a scalar tensor")
    return PolicyLoss(
        loss=result.loss,
        ratio=result.ratio.detach(),
        clipped=result.clipped,
        sums={f"{LOSS_METRICS}{metric}": total.detach() for metric, total in result.sums.items()},
    )


def _policy_sums(
    config: AlgorithmConfig,
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    batch: PackedBatch,
    masks: TokenMasks,
    policy: PolicyLoss,
    trained: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return the sums of the policy's metrics."""
    sampled = masks.sampled
    # Divided by the number of sampled tokens later, so that all micro-batches count alike.
    sums = {
        "tokens": sampled.sum(),
        "comparable": masks.comparable.sum(),
        "entropy": zero_outside(sampled, entropy).sum(),
        "clip_fraction": (policy.clipped & trained).sum(),
        "ratio/mean": zero_outside(sampled, policy.ratio).sum(),
    } | policy.sums
    if batch.reference_log_probs is not None:
        estimator = config.kl.estimator if config.kl else "k3"
        kl = kl_estimate(log_probs.detach(), batch.reference_log_probs, estimator)
        sums["kl_reference"] = zero_outside(sampled, kl).sum()
    return sums


def _correction_sums(
    config: AlgorithmConfig,
    correction: Correction,
    trainer_log_probs: torch.Tensor,
    batch: PackedBatch,
    masks: TokenMasks,
) -> dict[str, torch.Tensor]:
    """Return the sums of the correction's metrics: weights and dropped tokens."""
    # Computed again, because the weights of the correction may be capped, or of whole sequences.
    rho = bounded_exp(trainer_log_probs - batch.column("rollout_log_probs"))
    sums = {
        "correction/weight": zero_outside(masks.recent, correction.weights).sum(),
        "correction/capped_fraction": (masks.comparable & (rho > config.correction.cap)).sum(),
        "correction/dropped_fraction/too_old": (masks.too_old & masks.sampled).sum(),
    }
    for reason, tokens in correction.dropped.items():
        sums[f"correction/dropped_fraction/{reason}"] = (tokens & masks.sampled).sum()
    return sums


def _sums_by_staleness(
    trainer_log_probs: torch.Tensor, ratio: torch.Tensor, batch: PackedBatch, masks: TokenMasks
) -> dict[str, torch.Tensor]:
    """Return sums of mismatch (k3), rho and importance ratio over the fresh and the stale tokens.

    Only comparable tokens count.
    """
    # Samples without the column are all fresh.
    is_stale = torch.zeros_like(masks.comparable)
    if batch.staleness is not None:
        is_stale = batch.staleness > 0

    log_rho = torch.where(
        masks.comparable, trainer_log_probs - batch.column("rollout_log_probs"), 0.0
    )
    rho = bounded_exp(log_rho)
    sums: dict[str, torch.Tensor] = {}
    # A mismatch that staleness causes is in stale tokens only. A mismatch with another cause is in
    # fresh tokens, too.
    for staleness, mask in zip(STALENESS_CLASSES, (~is_stale, is_stale), strict=True):
        mask = masks.comparable & mask
        sums |= {
            f"{staleness}/tokens": mask.sum(),
            f"{staleness}/kl_k3": zero_outside(mask, bounded_expm1(log_rho) - log_rho).sum(),
            f"{staleness}/weight": zero_outside(mask, rho).sum(),
            f"{staleness}/weight_square": zero_outside(mask, rho.square()).sum(),
            f"{staleness}/ratio": zero_outside(mask, ratio).sum(),
        }
    return sums


# ---- the critic


def value_objective(
    config: AlgorithmConfig,
    loss_tokens: torch.Tensor,
    max_tokens: int = 1,
    group: dist.ProcessGroup | None = None,
    episodes: torch.Tensor | None = None,
) -> LossFunction:
    """Return the critic's clipped squared error.

    Arguments are those of ``policy_objective``: ``loss_tokens`` int64 [samples] and ``episodes``
    int64 [samples].

    Tokens that are too old, or dropped by rollout correction before the update, are left out, as
    in the policy loss. OPSM is not applied, because it depends on the update of the policy.
    """
    value_clip = config.critic.value_clip if config.critic else 0.5
    sample_weight = sample_weights(loss_tokens, config.aggregation, max_tokens, episodes)

    def loss(values: torch.Tensor, batch: PackedBatch) -> LossOutput:
        # Values and returns from before the update. ``values`` are those of this forward pass.
        batch_values, batch_returns = batch.column("values"), batch.column("returns")
        masks = token_masks(batch, config.max_staleness)
        sequences = _sequences(batch, len(loss_tokens), group)
        weight = sequences.to_tokens(sample_weight.to(values.device))

        # Without old log-probs the trainer's log-probs are unknown. The configuration refuses this.
        trained = masks.recent
        if config.correction.rejects and batch.old_log_probs is not None:
            trained = trained & _correction_before_update(config, batch, masks, sequences).keeps

        old_values = zero_outside(trained, batch_values)
        returns = zero_outside(trained, batch_returns)
        token_losses, clipped = value_loss(
            zero_outside(trained, values), old_values, returns, clip=value_clip
        )
        total = zero_outside(trained, token_losses * weight).sum()

        # Sums instead of means, so that ranks and micro-batches can be added.
        error = (batch_returns - values.detach()).square()
        sums = {
            "error": zero_outside(masks.sampled, error).sum(),
            "returns": zero_outside(masks.sampled, batch_returns).sum(),
            "returns_square": zero_outside(masks.sampled, batch_returns.square()).sum(),
            "loss": total,
            "tokens": masks.sampled.sum(),
            "clipped": (clipped & trained).sum(),
        }
        return LossOutput(total, sums)

    return loss


def _correction_before_update(
    config: AlgorithmConfig, batch: PackedBatch, masks: TokenMasks, sequences: SequenceIndex
) -> Correction:
    """Return the correction by the trainer's log-probs from before the update."""
    assert batch.old_log_probs is not None
    return rollout_correction(
        config.correction,
        log_rho=batch.old_log_probs - batch.column("rollout_log_probs"),
        mask=masks.comparable,
        sequences=sequences,
        advantages=batch.column("advantages"),
    )


# ---- both


def _sequences(batch: PackedBatch, count: int, group: dist.ProcessGroup | None) -> SequenceIndex:
    """Return the sequence of each token in a micro-batch."""
    # Padding has sample id -1, which would index from the end. No mask includes padding.
    return SequenceIndex(batch.sample_ids.clamp(min=0), count, group)
