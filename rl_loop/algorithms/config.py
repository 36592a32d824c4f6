"""Algorithm of a run. Every choice is one key, and inconsistent choices are refused.

``configs/algorithm`` has the combinations of published methods. Importing it needs neither torch
nor Ray.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from megatron_gptoss.config import OptimizerConfig, StrictModel
from rl_loop.algorithms.choices import (
    AnyAdvantage,
    AnyDistillationLoss,
    AnyPolicyLoss,
    CustomAdvantage,
    DivergenceLoss,
    GdpoAdvantage,
    GrpoAdvantage,
    PpoLoss,
    SampledTokenDistillation,
    ShapingTerm,
    as_section,
)

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "gdpo")
"""Advantages that compare a sample with the other samples of its task."""


class CorrectionConfig(StrictModel):
    """Correction of the mismatch between the engine's and the trainer's policy.

    rho is always pi_trainer / pi_rollout per token.
    """

    weight: Literal["none", "token_tis", "sequence_tis", "sequence_mis", "icepop"] = "token_tis"
    """Weight of a token's loss. token_tis: min(rho, cap). sequence_tis: min(product of rho over the
    sequence, cap). sequence_mis: as sequence_tis, and 0 outside bounds. icepop: rho, and 0 outside
    bounds."""
    cap: float = Field(2.0, gt=0)
    """Maximum weight of token_tis, sequence_tis and sequence_mis."""
    bounds: tuple[float, float] | None = None
    """Allowed ratios of sequence_mis (null: 0.5 to 2) and icepop (null: 0.5 to 5)."""
    geometric_bounds: tuple[float, float] | None = None
    """Keep a sequence if exp(mean log rho) is within. Usual: 0.999 and 1.001. Here and below, sums
    and means leave out tokens older than max_staleness, and spliced tokens, which the engine did
    not sample in this context."""
    k3_limit: float | None = Field(None, gt=0)
    """Keep a sequence if the mean of rho - 1 - log rho is at most this. Usual: 0.01."""
    veto: float | None = Field(None, gt=0, lt=1)
    """Drop a sequence with any rho below this. Usual: 1e-4."""
    off_policy_limit: float | None = Field(None, gt=0)
    """Drop a sequence of negative advantage if the mean of log(pi_old / pi) exceeds this (OPSM).
    Usual: 1e-4."""

    @property
    def active(self) -> bool:
        """True if a weight or a rejection uses rho."""
        return self.weight != "none" or any((self.geometric_bounds, self.k3_limit, self.veto))

    @property
    def rejects(self) -> bool:
        """True if a weight or a rejection that uses rho can drop tokens."""
        by_weight = self.weight in ("sequence_mis", "icepop")
        return by_weight or any((self.geometric_bounds, self.k3_limit, self.veto))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.bounds and self.weight not in ("sequence_mis", "icepop"):
            raise ValueError(
                "bounds apply only to the weights sequence_mis and icepop, but "
                f"correction.weight is {self.weight}. Remove correction.bounds, or change the "
                "weight"
            )

        for name in ("bounds", "geometric_bounds"):
            bounds = getattr(self, name)
            # Bounds without 1 would drop exactly the tokens on which both policies agree.
            if bounds and not 0 <= bounds[0] <= 1 <= bounds[1]:
                raise ValueError(
                    f"{name} must contain 1, the ratio of equal policies (got {bounds}). Change "
                    f"correction.{name}"
                )
        return self


class KlConfig(StrictModel):
    """Penalty on the distance to a frozen reference policy, which has the initial weights."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence. With d = log pi - log pi_reference, k1 is d, k2 is d^2 / 2
    and k3 is exp(-d) - 1 + d (Schulman, "Approximating KL divergence")."""
    apply_to: Literal["loss", "reward"] = "loss"
    """loss: add the penalty to the loss. reward: subtract it from the reward of every sampled
    token, with the engine's log-probs as pi."""
    coefficient: float = Field(1e-3, gt=0)
    """Factor of the penalty."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.apply_to == "loss" and self.estimator == "k1":
            raise ValueError(
                "kl.estimator=k1 has no effect in the loss, because its gradient does not "
                "depend on the reference policy. Use k2 or k3, or set kl.apply_to=reward"
            )
        return self


class DistillationConfig(StrictModel):
    """On-policy distillation: a teacher scores every token that the policy samples.

    Sources: Agarwal et al., arXiv 2306.13649; Thinking Machines, "On-Policy Distillation".
    """

    teacher: Path | None = None
    """Hugging Face directory of the teacher, of any family, with the vocabulary of ``model``. Every
    trainer rank holds a part of it. The teacher chooses its own experts. It scores the episodes of
    all sources that ``teachers`` does not name."""
    teachers: dict[str, Path | None] = Field(default_factory=dict)
    """Teachers of some sources: {name in ``tasks.sources``: directory}. null for a source that
    learns from rewards alone."""
    loss: AnyDistillationLoss = SampledTokenDistillation()
    """Comparison with the teacher. sampled_token: add log pi_teacher - log pi to the advantage of
    each sampled token. log pi is the engine's log-prob. reverse_kl, forward_kl, jsd: add the
    divergence of the distributions at each sampled token to the loss. A plain NAME is short for
    ``{type: NAME}``."""
    coefficient: float = Field(1.0, gt=0)
    """Factor of the comparison. An advantage is added after whitening."""

    @property
    def divergence(self) -> DivergenceLoss | None:
        """Value of ``loss``, if it compares distributions."""
        return self.loss if isinstance(self.loss, DivergenceLoss) else None

    def of_source(self, source: str) -> Path | None:
        """Return the teacher of a task source. None if it has none."""
        return self.teachers.get(source, self.teacher)


class CriticConfig(StrictModel):
    """Value model of GAE: the policy's architecture and layout, with a scalar head."""

    lr: float = Field(2e-6, gt=0)
    """Constant learning rate, usually twice the policy's. Other settings are those of
    ``optimizer``."""
    warmup_steps: int = Field(20, ge=0)
    """Steps at the start in which only the critic is trained. The policy's learning-rate schedule
    begins after them."""
    value_clip: float = Field(0.5, gt=0)
    """Clip range: a change of a value by more than this in a step does not reduce the loss."""

    def optimizer(self, policy: OptimizerConfig) -> OptimizerConfig:
        """Return the settings of the critic's AdamW, given those of the policy's."""
        return policy.model_copy(update={"lr": self.lr, "warmup_steps": 0, "schedule": "constant"})


class AlgorithmConfig(StrictModel):
    """Advantages, policy loss, and corrections of off-policy data."""

    advantage: AnyAdvantage = GrpoAdvantage()
    """Baseline of a sample: its group (grpo, dr_grpo, rloo; gdpo for several rewards), the
    mean of the batch (reinforce), a value model (gae), or MODULE:FUNCTION. none: 0, for
    distillation without rewards. A plain NAME is short for ``{type: NAME}``."""
    standard_deviation: Literal["sample", "population"] = "sample"
    """Divisor of a sum of squares in grpo, gdpo and whitening: n - 1 (sample: verl, TRL, slime,
    OpenRLHF) or n (population). With population, advantages are 15% larger at 4 samples per task,
    7% at 8."""
    whiten_advantages: Literal["tokens", "samples"] | None = None
    """Scale the advantages of the batch to mean 0 and standard deviation 1 over all sampled tokens
    (verl, slime, OpenRLHF) or over all samples (TRL). Over tokens, long episodes count more, and
    groups of equal rewards are moved away from 0. null: samples with gdpo, as in its paper, and no
    whitening otherwise."""
    critic: CriticConfig | None = None
    """Value model of gae. null for all other advantages."""
    policy_loss: AnyPolicyLoss = PpoLoss()
    """Loss per token. ppo: clipped ratio per token. gspo: clipped ratio per sequence. cispo:
    clipped ratio as constant weight. reinforce: no ratio. Or MODULE:FUNCTION. A plain NAME is short
    for ``{type: NAME}`` with the defaults of that loss."""
    aggregation: Aggregation = "token-mean"
    """Reduction of token losses to one number, always over the whole mini-batch. token-mean: DAPO.
    seq-mean-token-mean: GRPO and GSPO. seq-mean-token-sum-norm: Dr. GRPO, sums divided by
    rollout.max_episode_tokens. The mean is over episodes: the sequences of an agent that branches count as
    one."""
    mini_batches: int = Field(1, gt=0)
    """Optimizer steps per batch of episodes. 1 is on-policy if max_staleness is 0."""
    old_log_probs: Literal["auto", "detach", "forward", "rollout"] = "auto"
    """Denominator of the importance ratio. detach: the new log-probs, detached, so that the ratio
    is exactly 1. forward: log-probs of a forward pass before the first update. rollout: log-probs
    of the engine, which put mismatch and staleness into the ratio. auto: detach if mini_batches is
    1 and max_staleness is 0, else forward."""
    kl: KlConfig | None = None
    """KL penalty. null for no reference policy."""
    distillation: DistillationConfig | None = None
    """Distance to a teacher as an additional advantage or loss of every token. null for no
    teacher."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus in the loss."""
    correction: CorrectionConfig = CorrectionConfig()
    """Correction of the mismatch between engine and trainer."""
    max_staleness: int = Field(0, ge=0)
    """Maximum staleness of a token, in weight versions, when it is trained on. Episodes start at most this
    many steps before their update. 0: generation and training alternate. 1: the episodes of a step
    are generated while the trainer updates on the previous step. Higher values help if a few long
    episodes delay every step, as shown by ``seconds/rollout``."""
    routing_replay: Literal["none", "R2", "R3"] = "none"
    """Experts that the trainer uses. none: its router's choice. R2: experts of its forward pass for
    the old log-probs. R3: the engine's experts."""
    dynamic_sampling_rounds: int = Field(1, gt=0)
    """Maximum number of sampled groups, as a multiple of rollout.tasks_per_step. Above 1 (DAPO),
    groups whose compared rewards are all equal are replaced by groups of new tasks."""
    overlong_buffer_tokens: int | None = Field(None, gt=0)
    """Number of tokens before the longest response over which the length penalty grows from 0 to
    overlong_penalty (DAPO). null for no penalty. A response is all sampled tokens, without prompt
    and tool outputs. The longest response is the minimum of rollout.max_sampled_tokens, max_episode_tokens
    and max_turns x max_sampled_tokens_per_turn. If a prompt leaves fewer tokens in
    rollout.max_episode_tokens, they are the longest response, and the buffer is the same share of it."""
    overlong_penalty: float = Field(1.0, gt=0)
    """Maximum length penalty. With gdpo the penalty is an additional reward part with this
    weight."""

    shaping: dict[str, Annotated[ShapingTerm, BeforeValidator(as_section)]] = Field(
        default_factory=dict
    )
    """Terms that are added to the rewards before advantages are computed, by a name of your choice.
    Recorded rewards and the filter of dynamic sampling do not contain them. A plain type is short
    for ``{type: TYPE}``."""

    @property
    def old_log_probs_from(self) -> str:
        """Value of ``old_log_probs`` with auto resolved."""
        if self.old_log_probs != "auto":
            return self.old_log_probs
        # Only then does every token come from the weights that the update starts from.
        on_policy = self.mini_batches == 1 and self.max_staleness == 0
        return "detach" if on_policy else "forward"

    @property
    def estimates(self) -> tuple[str, ...]:
        """Columns that advantages and losses need from other models than the policy."""
        columns = {
            "values": self.critic is not None,
            "reference_log_probs": self.kl is not None,
            "teacher_log_probs": self.compares_sampled_tokens,
        }
        return tuple(name for name, is_needed in columns.items() if is_needed)

    @property
    def compares_sampled_tokens(self) -> bool:
        """True if a teacher's log-probs of the sampled tokens are advantages."""
        return self.distillation is not None and self.distillation.divergence is None

    @property
    def divergence(self) -> DivergenceLoss | None:
        """Divergence from a teacher in the loss. None if there is none."""
        return None if self.distillation is None else self.distillation.divergence

    @property
    def whitens_over(self) -> str | None:
        """Value of ``whiten_advantages`` with the advantage's default. None without whitening."""
        # The sum of normalized parts grows with their number, so the paper whitens the batch.
        if self.whiten_advantages is None and self.advantage.type == "gdpo":
            return "samples"
        return self.whiten_advantages

    @property
    def advantage_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the advantage estimator."""
        # Only these two divide by a standard deviation.
        if isinstance(self.advantage, GrpoAdvantage | GdpoAdvantage):
            return {"standard_deviation": self.standard_deviation}
        if isinstance(self.advantage, CustomAdvantage):
            return self.advantage.arguments
        return {}

    @property
    def used_reward_parts(self) -> set[str]:
        """Names of the reward parts that the advantage or shaping uses."""
        shaped = {term.options["name"] for term in self.shaping.values() if term.type == "part"}
        return shaped | set(self.reward_weights)

    @property
    def reward_weights(self) -> dict[str, float]:
        """Weights of the reward parts that the advantage uses. Empty if it uses total rewards."""
        if isinstance(self.advantage, GdpoAdvantage | CustomAdvantage):
            return self.advantage.reward_weights
        return {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_advantage()
        self._check_unrewarded()
        self._check_whitening()
        self._check_old_log_probs()
        self._check_policy_loss()
        return self

    def _check_advantage(self) -> None:
        is_custom = isinstance(self.advantage, CustomAdvantage)

        if self.advantage.type == "gae" and not self.critic:
            raise ValueError("advantage gae needs a value model. Set algorithm.critic")
        if self.critic and self.advantage.type != "gae":
            raise ValueError(
                f"advantage {self.advantage.type} does not use a critic. Set "
                "algorithm.critic=null, or use advantage gae"
            )

        if self.advantage.type == "gdpo" and self.kl and self.kl.apply_to == "reward":
            raise ValueError(
                "kl.apply_to=reward does not work with advantage gdpo: division by each reward's "
                "standard deviation would cancel kl.coefficient. Set kl.apply_to=loss, as in the "
                "paper"
            )

        # Only the author of a custom estimator knows if it learns from groups of equal rewards.
        if (
            self.dynamic_sampling_rounds > 1
            and self.advantage.type not in GROUP_ADVANTAGES
            and not is_custom
        ):
            raise ValueError(
                f"dynamic_sampling_rounds ({self.dynamic_sampling_rounds}) drops groups of equal "
                f"rewards, but advantage {self.advantage.type} learns from them, because it "
                "compares with other tasks or a value model. Set dynamic_sampling_rounds=1, or "
                "use a group-relative advantage"
            )

    def _check_unrewarded(self) -> None:
        """Refuse advantage none without a teacher, and settings of rewards that it ignores."""
        if self.advantage.type != "none":
            return
        if self.distillation is None:
            raise ValueError(
                "advantage none ignores the rewards, so nothing would be learned. Set "
                "algorithm.distillation, or another advantage"
            )
        ignored = {
            "overlong_buffer_tokens": self.overlong_buffer_tokens is not None,
            "shaping": bool(self.shaping),
            "kl.apply_to=reward": self.kl is not None and self.kl.apply_to == "reward",
            "whiten_advantages": self.whiten_advantages is not None,
        }
        for name, is_set in ignored.items():
            if is_set:
                raise ValueError(
                    f"{name} changes advantages of rewards, but advantage none has none. Leave it "
                    "out, or use another advantage"
                )

    def _check_whitening(self) -> None:
        if self.whiten_advantages == "samples" and self.advantage.type == "gae":
            raise ValueError(
                "whiten_advantages=samples needs one advantage per sample, but advantage gae "
                "has one per token. Set whiten_advantages=tokens"
            )

    def _check_old_log_probs(self) -> None:
        source = self.old_log_probs_from
        if source == "detach":
            self._check_ratio_of_one()

        # Only a ratio or a correction takes the staleness of a token into account.
        if source == "forward" and self.max_staleness > 0 and not self.correction.active:
            raise ValueError(
                f"max_staleness ({self.max_staleness}) with old_log_probs=forward ignores the "
                "change of the policy since tokens were sampled. Set a correction, or use "
                "old_log_probs=rollout"
            )
        if source == "rollout" and self.correction.active:
            raise ValueError(
                "old_log_probs=rollout already includes the mismatch in the ratio, and a "
                "correction would count it twice. Set correction.weight=none and its rejections "
                "to null"
            )
        if source != "forward" and self.routing_replay == "R2":
            raise ValueError(
                "routing_replay=R2 replays the routes of the forward pass for old log-probs, "
                f"but old_log_probs={source} has no such pass. Use old_log_probs=forward, or "
                "routing_replay=R3"
            )

    def _check_ratio_of_one(self) -> None:
        """Refuse settings that ``old_log_probs: detach`` would make silently wrong."""
        # The old log-probs are the trainer's log-probs of the update's forward pass. They are
        # correct only while the trainer has the weights that sampled the tokens. From the second
        # mini-batch on the weights have changed, but clipping would see a ratio of 1.
        if self.mini_batches > 1:
            raise ValueError(
                f"old_log_probs=detach sets the ratio to 1 in all {self.mini_batches} "
                "mini-batches, but only the first is on-policy. Use old_log_probs=forward, or "
                "mini_batches=1"
            )

        # Tokens of earlier weights have the same problem.
        if self.max_staleness > 0:
            raise ValueError(
                "old_log_probs=detach treats stale tokens as on-policy, and max_staleness is "
                f"{self.max_staleness}. Use old_log_probs=rollout, or forward with a correction"
            )

        # Refuse a limit that no sequence can exceed, because it would have no effect.
        if self.correction.off_policy_limit:
            raise ValueError(
                "correction.off_policy_limit has no effect with old_log_probs=detach, because "
                "pi_old / pi is 1. Set it to null, or use old_log_probs=forward"
            )

        # Rejections compare the trainer's log-probs with the engine's. With detach, the trainer's
        # are known only in the policy's update, which follows the critic's update.
        if self.critic and self.correction.rejects:
            raise ValueError(
                "a correction that rejects tokens also applies to the critic, but with "
                "old_log_probs=detach the critic learns before the trainer's log-probs are "
                "known. Set old_log_probs=forward"
            )

    def _check_policy_loss(self) -> None:
        needless = self.old_log_probs_from == "forward" and not self.correction.active
        if self.policy_loss.type == "reinforce" and needless:
            raise ValueError(
                "policy_loss=reinforce has no ratio, so a forward pass for old_log_probs would "
                "have no effect. Set old_log_probs=auto and mini_batches=1"
            )
