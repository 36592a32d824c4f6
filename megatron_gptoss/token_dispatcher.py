"""Token dispatcher of the mixture of experts."""

from typing import Any

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


class AlltoAllTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher. If one rank has all experts, it skips steps that would only copy.

    Megatron sorts the rows by expert, sends them, sorts the received chunks by local expert, and
    reverses this after the experts. On a single rank the chunks are in order, but Megatron copies
    them in all four passes. Its sorts are custom ops of Transformer Engine, and their time on the
    host limits the speed of small models.
    """

    tokens_per_expert: Any
    """Rows per local expert, int64 [experts], from the router until the experts; else None."""

    @property
    def exchanges_tokens(self) -> bool:
        """True if tokens go to experts of other ranks."""
        return bool(self.tp_size * self.ep_size > 1)

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send rows to the ranks of their experts.

        Args:
            tokens: [rows, hidden_size] in any dtype, sorted by expert.
            probs: [rows] gate values.

        Returns:
            Received tokens and gate values. With one rank they are the arguments.
        """
        if self.exchanges_tokens:
            return super().token_dispatch(tokens, probs)
        return tokens, probs

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort received rows by local expert.

        Args:
            tokens: [rows, hidden_size] in any dtype.
            probs: [rows] gate values.

        Returns:
            Tokens, rows per local expert [experts] on the CPU, and gate values.
        """
        if self.exchanges_tokens:
            return super().dispatch_postprocess(tokens, probs)
        # Megatron copies the number of rows to the CPU, and waits for it at one of three points,
        # which depends on the configuration.
        counts = self.tokens_per_expert
        for point in ("before_ep_alltoall", "before_permutation_2", "before_finish"):
            counts = self._maybe_dtoh_and_synchronize(point, counts)
        self.tokens_per_expert = None
        return tokens, counts, probs

    def combine_preprocess(self, output: Tensor) -> Tensor:
        """Return the output [rows, hidden_size] of the experts in the order of the received rows."""
        return super().combine_preprocess(output) if self.exchanges_tokens else output

    def token_combine(self, output: Tensor) -> Tensor:
        """Send the output [rows, hidden_size], of any dtype, back to the ranks of the tokens."""
        return super().token_combine(output) if self.exchanges_tokens else output
