"""What a loss function returns, and what an optimizer step returns. Plain data, which processes
without Megatron read, too."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class LossOutput:
    """What a loss function returns for one micro-batch."""

    loss: Tensor
    """A *sum* over the tokens of the micro-batch, already divided by whatever the loss is
    normalised with over the global batch, so that adding up micro-batches and ranks gives the
    loss."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Scalars that are summed over micro-batches and ranks, with the same names in every
    micro-batch."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Scalars of which the largest of all micro-batches and ranks is taken."""
    token_values: dict[str, Tensor] = field(default_factory=dict)
    """What the caller of ``train_step`` gets back of every token of this rank's shard, [tokens]
    each, without a gradient."""


LossFunction = Callable[..., LossOutput]
"""(log_probs [tokens], entropy [tokens], batch) -> LossOutput; of a critic
(values [tokens], batch) -> LossOutput"""


@dataclass
class StepStatistics:
    """One optimizer step, the same on every rank but for ``token_values``."""

    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    parameters_updated: bool
    not_finite: str | None = None
    """Which parameters have a gradient that is not finite, if any; the step was skipped."""
    seconds: float = 0.0
    """Wall-clock time of the step, of the slowest rank."""
    seconds_of: dict[str, float] = field(default_factory=dict)
    """The mean rank's forward, backward, optimizer, communication (experts' all-to-all, pipeline
    stages, gradients, as far as nothing hides it; that of tensor and context parallelism counts as
    forward and backward) and other."""
    tokens_per_second_per_gpu: float = 0.0
    tflops_per_gpu: float = 0.0
    """Of the model's arithmetic, ``training_flops``; nothing is counted twice."""
    mfu: float | None = None
    """The same as a share of a large bf16 matrix product on this machine; None on CPUs."""
    memory: dict[str, float] = field(default_factory=dict)
    """GB of the fullest GPU in every phase since the last step, measured and predicted, by
    PHASE/FIGURE; empty on CPUs."""
    token_values: dict[str, list[Tensor]] = field(default_factory=dict)
    """``LossOutput.token_values`` of every micro-batch, [T] each in the order of its row; on the
    last pipeline stage, of whose ranks each has all of it."""
