"""Configuration of the optimizer and its learning rate."""

import math
from typing import Literal

from pydantic import Field

from megatron_gptoss.config.precision import Precision
from megatron_gptoss.config.strict_model import StrictModel


class OptimizerConfig(StrictModel):
    """AdamW with a learning-rate warm-up."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices. Biases, norms and sinks have none."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of the first moment."""
    beta2: float = Field(0.98, ge=0, lt=1)
    """Decay rate of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Constant added to the root of the second moment."""
    clip_grad: float = Field(1.0, gt=0)
    """Maximum global gradient norm. Larger gradients are scaled down to it."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up. cosine falls to 10% of the peak at the last step."""
    on_non_finite: Literal["skip", "stop"] = "skip"
    """Reaction to a gradient with NaN or infinity: skip the step with a warning, or stop the run.
    The message names the parameters.
    """
    gradient_dtype: Precision = "fp32"
    """On GPUs: dtype for accumulating gradients over micro-batches and ranks. bf16 saves 2 bytes
    per parameter and loses precision with every micro-batch.
    """
    moment_dtype: Precision = "fp32"
    """On GPUs: dtype of Adam's moments. bf16 saves 4 bytes per parameter. Master weights stay exact
    in both cases.
    """
    offload_fraction: float = Field(0.0, ge=0, le=1)
    """Fraction of the optimizer state kept in pinned host memory. Each step copies it to the GPU
    and back, which takes longer than computing the new weights. Results do not change.
    """

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Return the learning rate of an optimizer step.

        Args:
            step: index of the step, from 0.
            total_steps: steps in the run.
        """
        # Step 0 counts as 1, because a learning rate of 0 would waste its batch.
        if step < self.warmup_steps or self.schedule == "constant":
            return self.lr * min(1.0, (step + 1) / max(1, self.warmup_steps))

        progress = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.lr * (0.1 + 0.9 * cosine)
