"""Experts as separate modules, whose matrices are multiplied in grouped GEMMs."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from megatron_gptoss.layers.experts import run_experts


class ExpertMatrices(Protocol):
    """One of the two expert matrices, for all experts of this rank."""

    def multiply(self, x: Tensor, row_counts: Sequence[int], with_bias: bool = False) -> Tensor:
        """Compute x W^T with the weight of each row's expert.

        Args:
            x: [rows, in] in the model's dtype, sorted by expert.
            row_counts: rows per expert.
            with_bias: whether to add the biases.

        Returns:
            [rows, out] in the dtype of x.
        """

    def biases(self) -> Tensor:
        """Return the biases of all experts, [experts, out] in the model's dtype."""


class StackedExperts(SequentialMLP):
    """All experts of this rank: two grouped matrix products and a fused activation.

    Each expert is a module with its own weights and biases, as in SequentialMLP. Parameters,
    checkpoints and converters therefore have one set of names.
    """

    gate_up: ExpertMatrices
    """Gate and up projections."""
    down: ExpertMatrices
    """Down projections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # SequentialMLP leaves recomputation of the activation to each expert.
        self.activation_recompute = (
            self.config.recompute_granularity == "selective"
            and "moe_act" in self.config.recompute_modules
        )

    def named_linears(self, name: str) -> list[Any]:
        """Return the layer ``name``, "linear_fc1" or "linear_fc2", of all experts."""
        experts: list[torch.nn.Module] = list(self.local_experts)
        return [getattr(expert, name) for expert in experts]

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Compute the weighted output of each expert for its rows.

        Args:
            permuted_local_hidden_states: [rows, hidden_size] in any float dtype, sorted by expert.
            tokens_per_expert: [experts] rows per local expert.
            permuted_probs: [rows] gate value of each row.

        Returns:
            [rows, hidden_size] in this dtype, and None for the bias, which is already added.
        """
        # The second bias is weighted by the router, so it is added after the second product.
        # Grouped products need the counts on the host. The dispatcher has copied them already.
        row_counts: list[int] = tokens_per_expert.tolist()
        output = run_experts(
            permuted_local_hidden_states,
            permuted_probs,
            row_counts,
            gate_up=lambda x: self.gate_up.multiply(x, row_counts, with_bias=True),
            down=lambda x: (self.down.multiply(x, row_counts), self.down.biases()),
            limit=self.config.activation_func_clamp_value,
            recompute=self.activation_recompute,
        )
        return output, None
