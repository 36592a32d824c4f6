"""Training, evaluation and demonstrations: the smaller sections of a configuration."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_gptoss.config import StrictModel


class TrainingConfig(StrictModel):
    """The length of a run and what happens along the way."""

    steps: int = Field(100, gt=0)
    """Training steps."""
    max_tokens_per_micro_batch: int = Field(16384, gt=0)
    """Packed tokens that one forward and backward pass takes at a time;
    bounds activation memory."""
    checkpoint_every: int = Field(20, gt=0)
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = Field(2, gt=0)
    """Older checkpoints are deleted."""
    keep_adapters: bool = False
    """Whether ``runs/NAME/adapters`` gets the adapters of every checkpoint, in PEFT's format, and
    keeps them when the checkpoint is deleted. Only with ``adapter``; two bytes a trained parameter
    in bf16, a seventh of a checkpoint."""


class TrackingConfig(StrictModel):
    """What a run records besides its metrics."""

    episodes: Literal["all"] | Annotated[int, Field(ge=0)] = "all"
    """Whole episodes recorded per step and split, in ``runs/NAME/episodes``: all, or so many,
    evenly spread over the tasks. 5 to 12 bytes per token; fewer only where the disk is too
    small."""


class EvaluationConfig(StrictModel):
    """How ``gptoss eval`` measures."""

    samples_per_task: int = Field(1, gt=0)
    """Episodes of each held-out task: what avg@k, pass@k and maj@k are computed from, for k = 2,
    4, ... up to it."""
    endpoint: str | None = None
    """An OpenAI-compatible server whose completions return token ids, such as http://host:8000/v1;
    null for our own."""
    endpoint_model: str = "default"
    """The model's name there."""
    concurrency: int = Field(64, gt=0)
    """Episodes at a time with an endpoint."""


class DemonstrationConfig(BaseModel):
    """The mixture of demonstrations."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    expert: float = Field(0.5, ge=0, le=1)
    """Share that solves its task; the others are faulty and mostly fail, which leaves RL something
    to do."""
    history: Literal["append", "harmony"] = "append"
    """Of conversations with several turns of the user. ``append``: one sample per episode, whose
    later turns see what a rollout's see: everything exactly as it was sampled. ``harmony``: one
    sample per turn of the user, which sees the turns before as the released models do, without
    their analysis and with <|end|> in place of <|return|>."""


class AblationConfig(StrictModel):
    """Faults on purpose, for experiments that show what they do. Leave everything at its default
    to train a model."""

    freeze: tuple[Literal["attention", "experts"], ...] = ()
    """Parts that do not learn: attention with its sinks and norm, or the experts with
    their router and norm."""
    sink_gradient: bool = True
    """Whether the sinks get a gradient in the trainer."""
    sink_backward: bool = True
    """Whether the backward pass of the trainer's attention has sinks, if the forward pass has;
    false is what comes of kernels that were made for attention without sinks."""
    trainer_sinks: bool = True
    """Whether the trainer's attention has sinks."""
    engine_sinks: bool = True
    """Whether the engine's attention has sinks."""
    engine_noise: float = Field(0.0, ge=0)
    """The engine's weights are off by this times their standard deviation,
    anew at every weight sync."""
    router_noise: float = Field(0.0, ge=0)
    """Standard deviation of noise on the trainer's router logits, as of kernels whose
    sums have no fixed order."""

    @property
    def changes_engine_weights(self) -> bool:
        """True if engines get other weights than the trainer has."""
        return not self.engine_sinks or self.engine_noise > 0
