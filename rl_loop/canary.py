"""The canary: after every weight sync, engine and trainer must give one known text the same log-probs.

A transposed square weight, a missing bias, a sink that did not arrive or a tensor of the previous version passes every
check of names and shapes and shows up here at once."""

from megatron_gptoss.packing import Sample
from megatron_gptoss.user_error import UserError
from rl_loop.config.run import RlConfig
from rl_loop.rollout.pool import RolloutPool
from rl_loop.trainer.group import TrainerGroup

TOLERANCES = {"float32": 1e-3, "bfloat16": 2e-2}
"""Where the configuration does not say: nats per token."""


class CanaryError(UserError, RuntimeError):
    """Engine and trainer disagree right after a weight sync."""


def check_canary(
    trainer: TrainerGroup, rollouts: RolloutPool, token_ids: list[int], config: RlConfig, version: int
) -> float:
    """The largest mean |log-prob difference| over the workers, in nats. Above the tolerance raises WeightMismatch
    naming the first tensor that a server holds otherwise, or CanaryError."""
    expected = trainer.score([Sample(token_ids, [0] + [1] * (len(token_ids) - 1))], 1.0)[0][1:]
    worst, tolerance = 0.0, config.canary_tolerance or TOLERANCES[config.dtype]
    for worker, scored in enumerate(rollouts.score(token_ids, 1.0)):
        gap = sum(abs(a - b) for a, b in zip(scored, expected, strict=True)) / len(expected)
        worst = max(worst, gap)
        if not gap <= tolerance:  # also true for NaN
            rollouts.compare_weights()
            raise CanaryError(
                f"after syncing weights {version}, rollout worker {worker} and the trainer differ by {gap:.2e} nats "
                f"per token on the canary prompt (canary_tolerance {tolerance:.0e}): they do not compute "
                "the same model. Nothing was trained on this version; the last checkpoint is good."
            )
    return worst
