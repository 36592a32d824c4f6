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


SinkPart = Literal["engine_sinks", "trainer_sinks", "sink_backward", "sink_gradient"]
"""Parts of attention's sinks that an ablation can leave out."""


class AblationConfig(StrictModel):
    """Injected faults, for experiments that measure their effect. To train a model, leave all keys at
    their defaults."""

    freeze: tuple[Literal["attention", "experts"], ...] = ()
    """Parts that do not learn: attention with its sinks and norm, or the experts with
    their router and norm."""
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
