"""Sampling from logits: pure functions on tensors."""

import torch


def sampling_log_probs(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Natural log of the softmax at each row's temperature, in fp32 or better; temperature 0 counts as 1.

    logits: [rows, vocab_size]; temperatures: [rows]; returns [rows, vocab_size]."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scale = torch.where(temperatures == 0, 1.0, temperatures).to(logits.dtype)
    return torch.log_softmax(logits / scale[:, None], dim=-1)


def sample(log_probs: torch.Tensor, uniforms: torch.Tensor, greedy: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """One token per row by inverting the cumulative distribution at a uniform number.

    One number per token, drawn by the request's own generator, makes a continuation independent of the batch.

    log_probs: [rows, vocab_size]; uniforms: fp64 [rows] in [0, 1); greedy: bool [rows]; top_ps: [rows].
    Returns int64 [rows]."""
    probs = log_probs.double().exp()
    tokens = _invert(probs, uniforms)
    (nucleus,) = torch.nonzero(top_ps < 1, as_tuple=True)
    if len(nucleus):
        ordered, order = probs[nucleus].sort(dim=-1, descending=True, stable=True)
        # the smallest set whose mass reaches top_p: a token belongs if the mass before it does not
        before = ordered.cumsum(-1) - ordered
        kept = ordered * (before < top_ps[nucleus, None])
        tokens[nucleus] = order.gather(1, _invert(kept, uniforms[nucleus])[:, None])[:, 0]
    return torch.where(greedy, log_probs.argmax(-1), tokens)


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The index in which each row's cumulative weight passes ``uniform * total``; weights need not sum to 1."""
    cumulative = weights.cumsum(-1)
    found = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return found.clamp_(max=weights.shape[-1] - 1)
