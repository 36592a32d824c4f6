"""The most likely ids of each token, computed from hidden states in blocks, without a gradient."""

import torch
import torch.distributed as dist
from torch import Tensor

from gptoss_kernels.logits import fp32_logits
from megatron_gptoss.block_sizes import CHUNK_TOKENS
from megatron_gptoss.log_probs import log_probs_and_entropy
from megatron_gptoss.logit_blocks import column_spans, first_local_id, spans


@torch.no_grad()
def top_log_probs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k most likely ids of each token, and their log-probs.

    Args:
        hidden: [tokens, hidden_size], the same on all ranks of ``group``.
        weight: [vocab_size / group size, hidden_size] rows of this rank.
        k: number of ids, at most the size of the vocabulary.
        temperature: divisor of the logits.
        group: tensor-parallel ranks that split the vocabulary; None for a single rank.

    Returns:
        Ids [tokens, k] int64, most likely first, and log-probs [tokens, k].
    """
    first_id = first_local_id(weight, group)
    ranks = 1 if group is None else group.size()
    best, ids = [], []
    for rows in spans(len(hidden), CHUNK_TOKENS):
        block_scores, block_ids = [], []
        for columns in column_spans(weight):
            logits = fp32_logits(hidden[rows], weight[columns])
            # The k best ids of all are among the k best of each block, so no more need to be kept.
            scores, index = logits.topk(min(k, logits.shape[-1]), dim=-1)
            block_scores.append(scores / temperature)
            block_ids.append(index + first_id + columns.start)
        scores, kept = torch.cat(block_scores, dim=-1), torch.cat(block_ids, dim=-1)
        scores, index = scores.topk(min(k, scores.shape[-1]), dim=-1)
        best.append(scores)
        ids.append(kept.gather(-1, index))

    scores, kept = torch.cat(best), torch.cat(ids)
    if group is not None and ranks > 1:
        scores, kept = _gather_columns(scores, group), _gather_columns(kept, group)
        scores, index = scores.topk(k, dim=-1)
        kept = kept.gather(-1, index)

    # The label is one of the ids, so its log-prob gives the normalizer.
    log_probs, _ = log_probs_and_entropy(hidden, weight, kept[:, 0], temperature, group)
    return kept, scores - scores[:, :1] + log_probs[:, None]


def _gather_columns(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join [tokens, columns] of all ranks to [tokens, ranks * columns]."""
    gathered = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(gathered, values.contiguous(), group=group)
    return torch.cat(gathered, dim=-1)


@torch.no_grad()
def greedy_tokens(
    hidden: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return each token's id with the largest logit; among equal logits the smallest id.

    Args:
        hidden: [tokens, hidden_size], the same on all ranks of ``group``.
        weight: [vocab_size / group size, hidden_size] rows of this rank.
        group: tensor-parallel ranks that split the vocabulary; None for a single rank.

    Returns:
        [tokens] int64.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    best = hidden.new_full((len(hidden),), -torch.inf, dtype=dtype)
    ids = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    for rows in spans(len(hidden), CHUNK_TOKENS):
        for columns in column_spans(weight):
            # Strictly greater: among equal logits the earlier block wins.
            block_best, index = fp32_logits(hidden[rows], weight[columns]).max(dim=-1)
            is_better = block_best > best[rows]
            best[rows] = torch.where(is_better, block_best, best[rows])
            ids[rows] = torch.where(is_better, index + columns.start, ids[rows])

    if group is None or group.size() == 1:
        return ids

    # One message for values and ids, because ids are exact in fp64.
    global_ids = ids + first_local_id(weight, group)
    local = torch.stack([best.double(), global_ids.double()])
    gathered = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(gathered, local, group=group)
    # [ranks, 2, tokens] -> two tensors [ranks, tokens]. argmax returns the first of equal values,
    # and ranks are in the order of the vocabulary.
    values, candidates = torch.stack(gathered).unbind(1)
    winner = values.argmax(dim=0, keepdim=True)
    return candidates.gather(0, winner)[0].long()
