"""Sections for training, tracking, evaluation, demonstrations and ablations."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from megatron_gptoss.config import StrictModel
from megatron_gptoss.prefix_tree import PrefixSharing


class TrainingConfig(StrictModel):
    """Length of a run, micro-batches and checkpoints."""

    steps: int = Field(100, gt=0)
    """Number of training steps."""
    max_tokens_per_micro_batch: int = Field(16384, gt=0)
    """Maximum packed tokens in one forward and backward pass. It bounds activation memory."""
    share_prefixes: Literal["off", "prompts", "all"] = "off"
    """Compute equal tokens at the beginning of sequences once per micro-batch. ``prompts``: the
    tokens before the first one in the loss. ``all``: these and later ones. Log-probs and gradients
    are those of whole sequences. Samples of a task stay in one mini-batch. Faster if sequences
    have long prefixes in common: 6.0x fewer tokens for 16 samples of 1,000 tokens after a prompt of
    8,000."""
    min_shared: int = Field(64, gt=0)
    """Shortest run of equal tokens to share. Only with ``share_prefixes``."""
    deterministic: bool = False
    """Use torch's deterministic algorithms in the trainer. Two updates of equal sequences then have
    equal bits. An operation without a deterministic algorithm logs a warning."""
    checkpoint_every: int = Field(20, gt=0)
    """Number of steps between checkpoints. The last step is always saved."""
    keep_checkpoints: int = Field(2, gt=0)
    """Number of checkpoints to keep. Older ones are deleted."""
    keep_adapters: bool = False
    """Keep the adapters of every checkpoint in ``runs/NAME/adapters``, in PEFT's format, after the
    checkpoint is deleted. Only with ``adapter``. 2 bytes per trained parameter in bf16, 1/7 of a
    checkpoint."""

    @property
    def prefix_sharing(self) -> PrefixSharing | None:
        """Tokens that sequences share. None if they share none."""
        if self.share_prefixes == "off":
            return None
        return PrefixSharing(self.min_shared, prompts_only=self.share_prefixes == "prompts")

    @field_validator("share_prefixes", mode="before")
    @classmethod
    def _read_off(cls, value: object) -> object:
        # YAML reads `off` as false.
        return "off" if value is False else value

    @model_validator(mode="after")
    def _check_min_shared(self) -> Self:
        is_default = self.min_shared == type(self).model_fields["min_shared"].default
        if self.share_prefixes == "off" and not is_default:
            raise ValueError(
                f"training.min_shared ({self.min_shared}) has no effect while "
                "training.share_prefixes is off. Leave it out, or set share_prefixes to prompts or "
                "all"
            )
        return self


SFT_EPISODES = 8
"""Default of ``tracking.episodes`` in SFT, whose conversations are already on disk as data."""


class TrackingConfig(StrictModel):
    """Records of a run in addition to its metrics."""

    episodes: Literal["all"] | Annotated[int, Field(ge=0)] = "all"
    """Number of whole episodes to record per step and split in ``runs/NAME/episodes``, evenly
    spread over the tasks, or all. 5 to 12 bytes per token. Lower it only if the disk is too
    small. In ``gptoss sft``, the conversations of a step, by default 8."""
    tags: list[str] = Field(default_factory=list)
    """Words by which ``gptoss view`` finds and groups runs, such as [baseline, long-context]. They
    are also tags of Weights & Biases."""


class EvaluationConfig(StrictModel):
    """Settings of ``gptoss eval``."""

    samples_per_task: int = Field(1, gt=0)
    """Episodes of each held-out task. avg@k, pass@k and maj@k are computed for k = 2, 4, ... up to
    this number."""
    endpoint: str | None = None
    """URL of an OpenAI-compatible server whose completions return token ids, such as
    http://host:8000/v1. null for the run's engine."""
    endpoint_model: str = "default"
    """Name of the model at the endpoint."""
    max_concurrent_episodes: int = Field(64, gt=0)
    """Maximum concurrent episodes with an endpoint."""


class DemonstrationConfig(BaseModel):
    """Mixture of demonstrations."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    correct_fraction: float = Field(0.5, ge=0, le=1)
    """Share of demonstrations that solve their task. The others contain errors and mostly fail,
    which leaves a margin for RL."""
    history: Literal["append", "harmony"] = "append"
    """Rendering of conversations with several user turns. ``append``: one sample per episode, in
    which later turns see all earlier tokens as sampled, as in a rollout. ``harmony``: one sample
    per user turn, which sees earlier turns as the released models do, without their analysis and
    with <|end|> in place of <|return|>."""


SinkPart = Literal["engine_sinks", "trainer_sinks", "sink_backward", "sink_gradient"]
"""Parts of attention's sinks that an ablation can leave out."""


class AblationConfig(StrictModel):
    """Injected faults, for experiments that measure their effect.

    To train a model, leave all keys at their defaults.
    """

    freeze: tuple[Literal["attention", "experts"], ...] = ()
    """Parts that are not trained. attention: with its sinks and norm. experts: with their router
    and norm."""
    without: tuple[SinkPart, ...] = ()
    """Parts of attention's sinks to leave out. engine_sinks, trainer_sinks: the sinks of this side.
    sink_backward: the sinks in the trainer's backward pass, as in kernels for attention without
    sinks. sink_gradient: the gradient of the sinks."""
    engine_noise: float = Field(0.0, ge=0)
    """Standard deviation of noise on the engine's weights, relative to theirs. Every weight sync
    draws new noise."""
    router_noise: float = Field(0.0, ge=0)
    """Standard deviation of noise on the trainer's router logits, as of kernels whose sums have no
    fixed order."""

    @property
    def changes_engine_weights(self) -> bool:
        """True if engines get other weights than the trainer has."""
        return "engine_sinks" in self.without or self.engine_noise > 0
