"""The optimizer and its learning rate."""

import math
from typing import Literal

from pydantic import Field

from megatron_gptoss.config.strict_model import StrictModel


class OptimizerConfig(StrictModel):
    """AdamW with a warm-up."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices; biases, norms and sinks have none."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.98, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    clip_grad: float = Field(1.0, gt=0)
    """Largest global gradient norm; larger gradients are scaled down to it."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What follows the warm-up; cosine falls to a tenth of the peak at the last step."""
    on_non_finite: Literal["skip", "stop"] = "skip"
    """What a gradient with NaN or infinity does: skip the step with a warning, or stop the run;
    both name it."""
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"
    """On GPUs: dtype in which gradients are added up over micro-batches and ranks. bf16 saves 2
    bytes per parameter and loses digits with every micro-batch."""
    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """On GPUs: dtype of Adam's moments. bf16 saves 4 bytes per parameter; master weights stay
    exact either way."""
    offload: float = Field(0.0, ge=0, le=1)
    """Share of the optimizer's state that rests in pinned host memory and comes to the GPU for
    every step, where the activations were. The numbers stay the same. A last resort: copying
    takes longer than the step itself."""

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Return the learning rate of a 0-based optimizer step.

        It rises linearly over the warm-up, then stays or falls as a cosine to a tenth.
        """
        # Step 0 counts as one: a learning rate of 0 would waste its batch.
        if step < self.warmup_steps or self.schedule == "constant":
            return self.lr * min(1.0, (step + 1) / max(1, self.warmup_steps))

        progress = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.lr * (0.1 + 0.9 * cosine)
