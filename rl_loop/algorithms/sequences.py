"""Sums over the sequences of a packed row, whose tokens may lie on several ranks, and weights."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class SequenceIndex:
    """Sequence of every token. All results are constant to autograd.

    Example:
        >>> sequences = SequenceIndex(torch.tensor([0, 0, 1]), count=2)
        >>> sequences.mean(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([True, True, True])).tolist()
        [2.0, 5.0]
    """

    index: torch.Tensor
    """int64 [tokens], below ``count``. Padding may have any index, because no mask includes it."""
    count: int
    """Sequences in the mini-batch."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other tokens of the same sequences (context parallelism)."""

    def sum(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Sum values [tokens] where mask, bool [tokens], is true -> [count], fp64."""
        # fp64, because packing changes the order of the terms, which would show in an fp32 sum.
        total = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        total.index_add_(0, self.index, torch.where(mask, values.detach(), 0).double())

        if self.group is not None and self.group.size() > 1:
            # Every rank takes part for every sequence, even if it has none of its tokens.
            dist.all_reduce(total, group=self.group)
        return total

    def mean(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Average values [tokens] over masked tokens -> [count], fp64. 0 without masked tokens."""
        return self.sum(values, mask) / self.sum(mask, mask).clamp(min=1)

    def to_tokens(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """Return for every token the value of its sequence: [count] -> [tokens], of any dtype."""
        return per_sequence[self.index]


def sample_weights(
    tokens: torch.Tensor,
    aggregation: str,
    constant: float,
    episodes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weight of each sample's token losses in the total loss: [samples], fp64.

    - ``token-mean``: every token has the same weight (DAPO, arXiv 2503.14476, eq. 12).
    - ``seq-mean-token-mean``: every episode has the same weight (GRPO, arXiv 2402.03300, eq. 3,
      and GSPO).
    - ``seq-mean-token-sum``: the mean over episodes of their sums, so long episodes weigh more.
    - ``seq-mean-token-sum-norm``: the same, divided by ``constant`` (Dr. GRPO, arXiv 2503.20783).

    Episodes without loss tokens do not count. Tokens that are left out later, because they are
    too old or dropped by rollout correction, count in the denominators. Therefore the gradient
    remains an average over all sampled tokens.

    Args:
        tokens: [samples], loss tokens per sample of the *global* mini-batch.
        aggregation: one of the above.
        constant: length of the longest possible sample.
        episodes: int64 [samples], each sample's episode index. An agent that branches has
            several samples per episode, which count as one. None if every sample is an episode.

    Example:
        >>> # An episode of 1 token and one of 3 tokens.
        >>> tokens = torch.tensor([1, 3])
        >>> sample_weights(tokens, "token-mean", constant=8).tolist()
        [0.25, 0.25]
        >>> sample_weights(tokens, "seq-mean-token-sum", constant=8).tolist()
        [0.5, 0.5]
    """
    tokens = tokens.double()
    episode_tokens = tokens
    count = (tokens > 0).sum().clamp(min=1)
    if episodes is not None and len(episodes) > 0:
        # Samples of one episode share a divisor, so branching does not raise its weight.
        sums = torch.zeros(int(episodes.max()) + 1, dtype=torch.float64)
        sums.index_add_(0, episodes, tokens)
        episode_tokens = sums[episodes]
        count = (sums > 0).sum().clamp(min=1)
    divisors = {
        "token-mean": tokens.sum().clamp(min=1),
        "seq-mean-token-mean": count * episode_tokens.clamp(min=1),
        "seq-mean-token-sum": count,
        "seq-mean-token-sum-norm": count * constant,
    }
    # Most divisors are one number for all samples.
    return torch.ones_like(tokens) / divisors[aggregation]
