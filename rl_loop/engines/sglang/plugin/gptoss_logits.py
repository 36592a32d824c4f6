"""Logits of SGLang servers in fp32, as the trainer computes them.

SGLang 0.5.17 multiplies hidden states with the output layer in bf16, rounds the logits to bf16, and
converts them to fp32 (``LogitsProcessor._compute_lm_head``). This rounds a logit of 16 to 32 by up
to 0.06. Sampled log-probs then differ from the trainer's, which keep the fp32 accumulator of the
same product.

SGLang's ``--enable-fp32-lm-head`` converts the weight to fp32 in every step and multiplies in fp32.
This module multiplies with the bf16 weight, and only the result is fp32. The logits are equal up to
the order of the sum, and there is no copy of the weight.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Let SGLang's logits processor keep logits in fp32."""
    from sglang.srt.layers import logits_processor

    processor = logits_processor.LogitsProcessor
    processor._compute_lm_head = compute_in_fp32(logits_processor)


def compute_in_fp32(logits_processor: Any) -> Callable[..., Tensor]:
    """Return a replacement of ``LogitsProcessor._compute_lm_head``.

    Its results are fp32 [tokens, vocabulary]. It calls the original method if the logits are not a
    plain product of bf16 or fp16, such as with an adapter, a bias or quantization.

    Args:
        logits_processor: SGLang's module of this name.
    """
    original = logits_processor.LogitsProcessor._compute_lm_head

    @wraps(original)
    def _compute_lm_head(
        self: Any, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None = None
    ) -> Tensor:
        # Otherwise the original does more than one product, or computes in a different dtype.
        is_plain = (
            embedding_bias is None
            and not self.use_fp32_lm_head
            and self.rl_on_policy_target is None
            and not hasattr(lm_head, "apply_lora")
            and hasattr(lm_head, "weight")
            and lm_head.weight.dtype in (torch.bfloat16, torch.float16)
            and not logits_processor.should_apply_lm_head_quant_method(
                lm_head, getattr(lm_head, "quant_method", None)
            )
        )
        if not is_plain:
            return original(self, hidden_states, lm_head, embedding_bias)
        return fp32_product(hidden_states.to(lm_head.weight.dtype), lm_head.weight)

    return _compute_lm_head


def fp32_product(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """Compute ``hidden_states @ weight.T`` with an fp32 result.

    Args:
        hidden_states: bf16 or fp16 [tokens, hidden_size].
        weight: [vocabulary, hidden_size] of the same dtype.

    Returns:
        fp32 [tokens, vocabulary].
    """
    if hidden_states.is_cuda:
        return torch.mm(hidden_states, weight.t(), out_dtype=torch.float32)
    # On CPUs torch.mm has no out_dtype.
    return hidden_states.float() @ weight.float().t()
