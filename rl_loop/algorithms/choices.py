"""Typed sections for losses and the advantage: ``{type: NAME, ...}``, or a plain NAME.

Each type has the keys and the defaults of one function. No other place has defaults, so a loss has
the same bounds however it is chosen. Needs neither torch nor Ray.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from megatron_gptoss.config import StrictModel
from rl_loop.algorithms.registry import ADVANTAGES, POLICY_LOSSES, SHAPING_TERMS, check_function
from rl_loop.registry import TAG


class FunctionChoice(StrictModel):
    """Function with keyword arguments."""

    type: str
    """NAME of a registered function, or MODULE:FUNCTION."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the function."""
        return self.model_dump(exclude={"type"})


# ---- policy losses


class PpoLoss(FunctionChoice):
    """Clipped ratio of every token (PPO, with separate bounds as in DAPO)."""

    type: Literal["ppo"] = "ppo"
    """Name of the loss."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """Lower bound of the importance ratio is 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """Upper bound of the importance ratio is 1 + clip_high. DAPO uses 0.28."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the loss for negative advantages, as a multiple of the advantage. null for none."""


class GspoLoss(FunctionChoice):
    """One clipped ratio per sequence (GSPO, arXiv 2507.18071)."""

    type: Literal["gspo"] = "gspo"
    """Name of the loss."""
    clip_low: float = Field(3e-4, ge=0, le=1)
    """Lower bound of the sequence's ratio is 1 - clip_low."""
    clip_high: float = Field(4e-4, ge=0)
    """Upper bound of the sequence's ratio is 1 + clip_high."""


class CispoLoss(FunctionChoice):
    """The clipped ratio as a constant weight (CISPO, arXiv 2506.13585)."""

    type: Literal["cispo"] = "cispo"
    """Name of the loss."""
    clip_low: float = Field(1.0, ge=0, le=1)
    """Lower bound of the weight is 1 - clip_low. The default sets no lower bound."""
    clip_high: float = Field(0.28, ge=0)
    """Upper bound of the weight is 1 + clip_high."""


class ReinforceLoss(FunctionChoice):
    """Log-probs weighted by advantages, without a ratio (Williams, 1992)."""

    type: Literal["reinforce"] = "reinforce"
    """Name of the loss."""


class CustomLoss(FunctionChoice):
    """A loss from outside the project."""

    type: str
    """MODULE:FUNCTION. The function takes ``rl_loop.algorithms.policy_loss.LossInputs``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_function(POLICY_LOSSES, self.type, self.options)
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        return self.options


# ---- advantages


class GrpoAdvantage(FunctionChoice):
    """(R - mean) / std of the group (GRPO, arXiv 2402.03300)."""

    type: Literal["grpo"] = "grpo"
    """Name of the advantage."""


class DrGrpoAdvantage(FunctionChoice):
    """R - mean of the group (Dr. GRPO, arXiv 2503.20783)."""

    type: Literal["dr_grpo"] = "dr_grpo"
    """Name of the advantage."""


class RlooAdvantage(FunctionChoice):
    """R - mean of the group's other samples (RLOO, arXiv 2402.14740)."""

    type: Literal["rloo"] = "rloo"
    """Name of the advantage."""


class GdpoAdvantage(FunctionChoice):
    """Every reward part normalized separately, and the batch whitened (GDPO, arXiv 2601.05242)."""

    type: Literal["gdpo"] = "gdpo"
    """Name of the advantage."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward part. At least one is required. A part that an episode does not have
    counts as 0."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.reward_weights:
            raise ValueError(
                "advantage gdpo has no reward weights. Set algorithm.advantage.reward_weights, "
                "such as {correct: 1.0}"
            )
        return self


class ReinforceAdvantage(FunctionChoice):
    """R - mean of the batch (Williams, 1992)."""

    type: Literal["reinforce"] = "reinforce"
    """Name of the advantage."""


class GaeAdvantage(FunctionChoice):
    """Generalized advantage estimation with a value model (arXiv 1506.02438)."""

    type: Literal["gae"] = "gae"
    """Name of the advantage."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per sampled token."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Trade-off between returns (1) and the critic's estimates (0)."""


class NoAdvantage(FunctionChoice):
    """0 for every sample, so that only ``algorithm.distillation`` trains the policy."""

    type: Literal["none"] = "none"
    """Name of the advantage."""


class CustomAdvantage(FunctionChoice):
    """An advantage from outside the project."""

    type: str
    """MODULE:FUNCTION. The function takes ``rl_loop.algorithms.advantages.BatchRewards``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Reward parts that the function gets, with their weights. A part that an episode does not have
    counts as 0."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_function(ADVANTAGES, self.type, self.options)
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        return self.options


# ---- reward shaping


class ShapingTerm(StrictModel):
    """Term that is added to the reward of every episode."""

    type: str
    """relative_length: for correct episodes, the tokens of the task's shortest correct episode
    divided by the own tokens, and 0 for wrong ones. part: the reward part ``options.name``. Or
    MODULE:FUNCTION, which takes the episodes of a task (``rl_loop.data.trajectory.Trajectory``) and
    returns one number per episode."""
    weight: float = 1.0
    """Factor of the term. With gdpo, the term is an additional reward part with this weight."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_function(SHAPING_TERMS, self.type, self.options)
        return self


# ---- losses of supervised fine-tuning


class CrossEntropyLoss(StrictModel):
    """Negative log-prob of every token in the loss."""

    type: Literal["cross_entropy"] = "cross_entropy"
    """Name of the loss."""


class DistillationLoss(StrictModel):
    """KL divergence from a frozen teacher's distribution at every token (arXiv 1503.02531)."""

    type: Literal["distillation"] = "distillation"
    """Name of the loss."""
    teacher: Path
    """Hugging Face directory of the teacher, of any family, with the vocabulary of ``model``. Every
    trainer rank holds a part of it."""
    top_k: int = Field(64, gt=0)
    """Number of the teacher's most likely tokens that are compared one by one. All other tokens are
    compared by their total probability."""
    all_tokens: bool = True
    """Train on every token, because the teacher has a distribution for each. false: only on the
    tokens of the assistant."""


# ---- on-policy distillation


class SampledTokenDistillation(StrictModel):
    """Advantage of every sampled token: log pi_teacher - log pi of this token."""

    type: Literal["sampled_token"] = "sampled_token"
    """Name of the loss."""


class DivergenceLoss(StrictModel):
    """Divergence of the policy's and the teacher's distributions at every sampled token."""

    top_k: int = Field(64, gt=0)
    """Number of the teacher's most likely tokens that are compared one by one. All other tokens are
    compared by their total probability. ``model.vocab_size`` compares the whole distributions."""


class ReverseKlDistillation(DivergenceLoss):
    """KL(policy || teacher), whose gradient sampled_token estimates (arXiv 2306.13649)."""

    type: Literal["reverse_kl"] = "reverse_kl"
    """Name of the loss."""


class ForwardKlDistillation(DivergenceLoss):
    """KL(teacher || policy), the divergence of ``gptoss sft`` (arXiv 1503.02531)."""

    type: Literal["forward_kl"] = "forward_kl"
    """Name of the loss."""


class JsdDistillation(DivergenceLoss):
    """Generalized Jensen-Shannon divergence (arXiv 2306.13649)."""

    type: Literal["jsd"] = "jsd"
    """Name of the loss."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Share of the teacher in the mixture with which teacher and policy are compared."""


# ---- the unions


def as_section(value: Any) -> Any:
    """Return {type: NAME} for a plain NAME, and other values unchanged."""
    return {"type": value} if isinstance(value, str) else value


def _choose_tag(value: Any, known: object, default: str) -> str:
    """Return the tag of the union's member that ``value``, raw or an instance, belongs to."""
    # A section without a type has the default type, so that one override can change a bound.
    name = (
        value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
    )
    # Every other name belongs to the member for custom functions, whose check reports it.
    is_known = isinstance(name, str) and name in known  # type: ignore[operator]
    return f"{TAG}{name}" if is_known else f"{TAG}custom"


def _loss_tag(value: Any) -> str:
    return _choose_tag(value, POLICY_LOSSES, "ppo")


def _advantage_tag(value: Any) -> str:
    return _choose_tag(value, ADVANTAGES, "grpo")


def _supervised_tag(value: Any) -> str:
    return _choose_tag(value, ("cross_entropy", "distillation"), "cross_entropy")


def _distillation_tag(value: Any) -> str:
    names = ("sampled_token", "reverse_kl", "forward_kl", "jsd")
    return _choose_tag(value, names, "sampled_token")


# MODULE:FUNCTION is no literal by which pydantic could choose, so a function returns the tag.
AnyPolicyLoss = Annotated[
    Annotated[PpoLoss, Tag(f"{TAG}ppo")]
    | Annotated[GspoLoss, Tag(f"{TAG}gspo")]
    | Annotated[CispoLoss, Tag(f"{TAG}cispo")]
    | Annotated[ReinforceLoss, Tag(f"{TAG}reinforce")]
    | Annotated[CustomLoss, Tag(f"{TAG}custom")],
    Discriminator(_loss_tag),
    BeforeValidator(as_section),
]
"""The type of ``algorithm.policy_loss``."""

AnyAdvantage = Annotated[
    Annotated[GrpoAdvantage, Tag(f"{TAG}grpo")]
    | Annotated[DrGrpoAdvantage, Tag(f"{TAG}dr_grpo")]
    | Annotated[RlooAdvantage, Tag(f"{TAG}rloo")]
    | Annotated[GdpoAdvantage, Tag(f"{TAG}gdpo")]
    | Annotated[ReinforceAdvantage, Tag(f"{TAG}reinforce")]
    | Annotated[GaeAdvantage, Tag(f"{TAG}gae")]
    | Annotated[NoAdvantage, Tag(f"{TAG}none")]
    | Annotated[CustomAdvantage, Tag(f"{TAG}custom")],
    Discriminator(_advantage_tag),
    BeforeValidator(as_section),
]
"""The type of ``algorithm.advantage``."""

AnySupervisedLoss = Annotated[
    Annotated[CrossEntropyLoss, Tag(f"{TAG}cross_entropy")]
    | Annotated[DistillationLoss, Tag(f"{TAG}distillation")],
    Discriminator(_supervised_tag),
    BeforeValidator(as_section),
]
"""The type of ``loss`` in supervised fine-tuning."""

AnyDistillationLoss = Annotated[
    Annotated[SampledTokenDistillation, Tag(f"{TAG}sampled_token")]
    | Annotated[ReverseKlDistillation, Tag(f"{TAG}reverse_kl")]
    | Annotated[ForwardKlDistillation, Tag(f"{TAG}forward_kl")]
    | Annotated[JsdDistillation, Tag(f"{TAG}jsd")],
    Discriminator(_distillation_tag),
    BeforeValidator(as_section),
]
"""The type of ``algorithm.distillation.loss``."""

CHOICES = ("algorithm.policy_loss", "algorithm.advantage", "algorithm.distillation.loss", "loss")
"""Configuration keys of sections with a type, which accept a plain NAME."""
