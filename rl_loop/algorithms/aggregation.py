"""From token losses to one number, independent of how the batch is cut into micro-batches and ranks."""

from __future__ import annotations

import torch


def sample_weights(tokens: torch.Tensor, aggregation: str, constant: float) -> torch.Tensor:
    """Weight of each token loss of a sample, so that the loss is the weighted sum over all tokens of the mini-batch.

    tokens: [samples], the loss tokens of every sample of the *global* mini-batch; -> [samples], fp64.

    - ``token-mean``: every token counts the same (DAPO, arXiv 2503.14476, eq. 12).
    - ``seq-mean-token-mean``: every sample counts the same (GRPO, arXiv 2402.03300, eq. 3; GSPO).
    - ``seq-mean-token-sum``: the mean over samples of their sums; long samples count more.
    - ``seq-mean-token-sum-norm``: the same divided by ``constant``, the longest possible sample (Dr. GRPO,
      arXiv 2503.20783).

    Samples without loss tokens do not count. What rollout correction drops still counts in the denominators, which
    keeps the gradient an average over what was sampled.
    """
    tokens = tokens.double()
    samples = (tokens > 0).sum().clamp(min=1)
    if aggregation == "token-mean":
        return torch.ones_like(tokens) / tokens.sum().clamp(min=1)
    if aggregation == "seq-mean-token-mean":
        return 1 / (samples * tokens.clamp(min=1))
    if aggregation == "seq-mean-token-sum":
        return torch.ones_like(tokens) / samples
    if aggregation == "seq-mean-token-sum-norm":
        return torch.ones_like(tokens) / (samples * constant)
    raise ValueError(f"unknown aggregation {aggregation!r}")
