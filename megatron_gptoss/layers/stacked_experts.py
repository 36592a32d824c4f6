"""The experts of a layer as modules of their own, of which all matrices of a kind are one product."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from megatron_gptoss.layers.experts import run_experts


class ExpertMatrices(Protocol):
    """One of the two matrices of all experts of this rank."""

    def multiply(self, x: Tensor, row_counts: Sequence[int], with_bias: bool = False) -> Tensor:
        """Compute x W^T, with each expert's bias if wanted: [rows, in] -> [rows, out]."""

    def biases(self) -> Tensor:
        """Return the biases of all experts, [experts, out]."""


class StackedExperts(SequentialMLP):
    """All experts of this rank: two grouped matrix products around one fused activation.

    Every expert is a module with weights and biases of its own, as in SequentialMLP, so that
    parameters, checkpoints and converters know one set of names. Only the products are grouped.
    """

    gate_up: ExpertMatrices
    down: ExpertMatrices

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation_recompute = (
            self.config.recompute_granularity == "selective"
            and "moe_act" in self.config.recompute_modules
        )

    def named_linears(self, name: str) -> list[Any]:
        """Return the linear layers of this name, "linear_fc1" or "linear_fc2", of all experts."""
        experts: list[torch.nn.Module] = list(self.local_experts)
        return [getattr(expert, name) for expert in experts]

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Run every expert on its rows and weigh the results.

        Args:
            permuted_local_hidden_states: [rows, hidden_size], sorted by expert.
            tokens_per_expert: rows of each local expert.
            permuted_probs: [rows], the gate value of each row.

        Returns:
            [rows, hidden_size], and None for the bias, which is added already.
        """
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
