"""Results of a loss function and of an optimizer step.

They are plain data, which processes without Megatron can read.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class LossOutput:
    """Result of a loss function for one micro-batch."""

    loss: Tensor
    """Loss [], *summed* over the tokens of the micro-batch and normalized over the global batch.

    The sum over micro-batches and ranks is the loss of the step.
    """
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Scalars [] to sum over micro-batches and ranks. All micro-batches need the same names."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Scalars [] of which the maximum over micro-batches and ranks is taken."""
    token_values: dict[str, Tensor] = field(default_factory=dict)
    """Values [tokens] of this rank's tokens to return from ``train_step``, without gradient."""


@dataclass(frozen=True)
class LoadRange:
    """Extreme loads over all experts and layers. 1 is an even share of the layer's tokens."""

    smallest: float
    """Load of the expert with the fewest tokens. 0 if an expert got none."""
    largest: float
    """Load of the expert with the most tokens."""


@dataclass(frozen=True)
class SharedTokens:
    """Token counts of an update with shared prefixes."""

    tokens: int
    """Tokens of all sequences. A shared prefix counts once per sequence."""
    computed: int
    """Tokens that the ranks compute. A shared prefix counts once."""
    route_conflicts: int
    """Tokens that are computed again only because their routes differ."""


LossFunction = Callable[..., LossOutput]
"""Loss function of a policy: (log_probs [tokens], entropy [tokens], batch) -> LossOutput.

For batches with ``teacher_top_ids``: (log_probs, entropy, batch, log-probs of these ids [tokens, k]).
For a critic: (values [tokens], batch) -> LossOutput.
"""


@dataclass(kw_only=True)
class PassStatistics:
    """Statistics of one pass with gradients, the same on every rank except ``token_values``."""

    sums: dict[str, float]
    """``LossOutput.sums`` over all micro-batches and ranks."""
    maxima: dict[str, float]
    """``LossOutput.maxima`` over all micro-batches and ranks."""
    expert_loads: LoadRange | None = None
    """Smallest and largest load of an expert in the pass; None for dense models."""
    load_balancing_loss: float | None = None
    """Load-balancing loss without its coefficient, mean over tokens and layers; None if not trained.

    1 if every expert gets an even share, and at most experts / experts per token.
    """
    token_values: dict[str, list[Tensor]] = field(default_factory=dict)
    """``LossOutput.token_values`` of every micro-batch, [T] in the order of its row.

    Every rank of the last pipeline stage has the values of the whole row. Other stages have none.
    """


@dataclass(kw_only=True)
class UpdateStatistics:
    """Statistics of an update of the parameters, the same on every rank."""

    learning_rate: float
    """Learning rate of the step."""
    grad_norm: float = math.nan
    """Global L2 norm of the gradient before clipping. NaN if the step was skipped."""
    parameters_updated: bool = False
    """True if the step was not skipped."""
    non_finite_gradients: str | None = None
    """Message that names the parameters with a gradient that is not finite; None if there are none.

    If it is set, the step was skipped.
    """


@dataclass(kw_only=True)
class StepStatistics(PassStatistics, UpdateStatistics):
    """Statistics of an optimizer step on one pass."""

    seconds: float = 0.0
    """Wall-clock time of the step on the slowest rank."""
    seconds_by_part: dict[str, float] = field(default_factory=dict)
    """Seconds by part, averaged over ranks: forward, backward, optimizer, communication, other.

    Communication is the exposed time of the experts' all-to-all, of pipeline messages and of the
    reduction of gradients. Messages of tensor and context parallelism count as forward or backward.
    """
    tokens_per_second_per_gpu: float = 0.0
    """Tokens in the rows of all micro-batches, with prompts and padding, per second and GPU."""
    tflops_per_gpu: float = 0.0
    """TFLOP/s per GPU by ``training_flops``, which does not count recomputation."""
    mfu: float | None = None
    """``tflops_per_gpu`` relative to a large bf16 matrix product on this machine; None on CPUs."""
    memory: dict[str, float] = field(default_factory=dict)
    """GB of the fullest GPU by PHASE/FIGURE since the last step, measured and predicted.

    Empty on CPUs.
    """
    shared_tokens: SharedTokens | None = None
    """Tokens that were saved. None if sequences share no prefixes."""
