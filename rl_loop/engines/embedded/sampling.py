"""Sampling from logits. Pure functions on tensors."""

from collections.abc import Sequence

import numpy as np
import torch


def sampling_log_probs(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return the log-softmax at each row's temperature, in fp32, or in fp64 for fp64 logits.

    Args:
        logits: [rows, vocab_size].
        temperatures: [rows]. 0 (greedy) counts as 1.

    Returns:
        [rows, vocab_size], natural logs.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    # Greedy sampling has no temperature to divide by.
    scale = torch.where(temperatures == 0, 1.0, temperatures).to(logits.dtype)
    return torch.log_softmax(logits / scale[:, None], dim=-1)


def allowed_log_probs(
    log_probs: torch.Tensor, allowed: Sequence[np.ndarray | None]
) -> torch.Tensor:
    """Return the log-softmax over the allowed tokens of each row.

    Args:
        log_probs: [rows, vocab_size].
        allowed: allowed tokens of each row, bool [vocab_size]. None for a row without a constraint,
            which is returned unchanged.

    Returns:
        [rows, vocab_size], -inf for other tokens.
    """
    rows = [row for row, tokens in enumerate(allowed) if tokens is not None]
    if not rows:
        return log_probs
    constrained = log_probs.clone()
    for row in rows:
        forbidden = ~torch.from_numpy(allowed[row]).to(log_probs.device)
        masked = log_probs[row].masked_fill(forbidden, -torch.inf)
        # The allowed tokens may all be so unlikely that their probabilities are 0 otherwise.
        constrained[row] = torch.log_softmax(masked, dim=-1)
    return constrained


def sample(
    log_probs: torch.Tensor,
    uniforms: torch.Tensor,
    greedy: torch.Tensor,
    top_ps: torch.Tensor,
) -> torch.Tensor:
    """Sample one token per row by inverting the cumulative distribution at a uniform number.

    A request draws one number per token from its own generator, so its continuation does not depend
    on the other sequences of the batch.

    Args:
        log_probs: [rows, vocab_size].
        uniforms: fp64 [rows] in [0, 1).
        greedy: bool [rows]. These rows take the most likely token.
        top_ps: [rows].

    Returns:
        int64 [rows]: token ids.
    """
    # In fp64, because an fp32 cumulative sum over 200,000 tokens would lose the unlikely ones.
    probs = log_probs.double().exp()
    tokens = _invert_cumulative(probs, uniforms)

    (nucleus_rows,) = torch.nonzero(top_ps < 1, as_tuple=True)
    if len(nucleus_rows):
        # Stable, so that ties are broken equally in every batch.
        ordered, order = probs[nucleus_rows].sort(dim=-1, descending=True, stable=True)
        # The nucleus is the smallest set of the likeliest tokens whose mass reaches top_p. A token
        # belongs to it if the mass of all likelier tokens is less than top_p.
        mass_before = ordered.cumsum(-1) - ordered
        nucleus = ordered * (mass_before < top_ps[nucleus_rows, None])
        places = _invert_cumulative(nucleus, uniforms[nucleus_rows])
        tokens[nucleus_rows] = order.gather(1, places[:, None])[:, 0]

    return torch.where(greedy, log_probs.argmax(-1), tokens)


def top_tokens(log_probs: torch.Tensor, counts: list[int]) -> list[list[tuple[int, float]]]:
    """Return the most likely tokens of each row with their log-probs, the most likely first.

    Args:
        log_probs: [rows, vocab_size].
        counts: number of tokens for each row.
    """
    if not any(counts):
        return [[] for _ in counts]
    values, tokens = log_probs.topk(min(max(counts), log_probs.shape[1]), dim=-1)
    return [
        list(zip(ids[:count], row[:count], strict=True))
        for ids, row, count in zip(tokens.tolist(), values.tolist(), counts, strict=True)
    ]


def _invert_cumulative(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return, per row, the index where the cumulative weight passes ``uniform * total``.

    Args:
        weights: [rows, n]. Need not sum to 1.
        uniforms: [rows] in [0, 1).

    Returns:
        int64 [rows].
    """
    cumulative = weights.cumsum(-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    # With right=True a token of weight 0 is never chosen, not even at a target of 0.
    indices = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    # Rounding can make the target equal to the total, which no index passes.
    return indices.clamp_(max=weights.shape[-1] - 1)
