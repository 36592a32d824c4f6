"""Experts of a layer on a GPU: grouped matrix products and a fused activation.

A row is a pair of a token and one of its experts: the token's hidden state as input of the expert.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor

from gptoss_kernels.swiglu import clamped_swiglu
from megatron_gptoss.transformer_config import set_distribution


class GptOssGroupedMLP(TEGroupedMLP):
    """All experts of this rank: two grouped matrix products and a fused activation.

    Megatron's forward pass clamps, gates and weights in separate passes and keeps their results for
    the backward pass. It adds the second bias through an fp32 copy of all rows.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

        # With this mark Megatron would sum the gradient over tensor-parallel ranks, but each rank
        # already has the whole gradient. Transformer Engine 2.20 does not mark biases of unsplit
        # layers; Megatron's own layers do (``cpu_experts``). Reset the mark in any case.
        for name, parameter in self.named_parameters():
            if ".bias" in name:
                set_distribution(parameter, sequence_parallel=False)

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        *unused: Any,
    ) -> tuple[Tensor, None]:
        """Compute the weighted output of each expert for its rows.

        Args:
            permuted_local_hidden_states: [rows, hidden_size] in any float dtype, sorted by expert.
            tokens_per_expert: [experts] rows per local expert.
            permuted_probs: [rows] gate value of each row.
            unused: arguments of Megatron's experts.

        Returns:
            [rows, hidden_size] in this dtype, and None for the bias, which is already added.
        """
        row_counts: list[int] = tokens_per_expert.tolist()

        def down(activated: Tensor) -> tuple[Tensor, Tensor]:
            output, biases = self.linear_fc2(activated, row_counts)
            return output, torch.stack(list(biases))

        output = run_experts(
            permuted_local_hidden_states,
            permuted_probs,
            row_counts,
            gate_up=lambda x: self.linear_fc1(x, row_counts)[0],
            down=down,
            limit=self.config.activation_func_clamp_value,
            recompute=self.activation_recompute,
        )
        return output, None


def run_experts(
    hidden_states: Tensor,
    probs: Tensor,
    row_counts: list[int],
    *,
    gate_up: Callable[[Tensor], Tensor],
    down: Callable[[Tensor], tuple[Tensor, Tensor]],
    limit: float,
    recompute: bool,
) -> Tensor:
    """Compute the weighted output of each expert for its rows.

    Args:
        hidden_states: [rows, hidden_size] in any float dtype, sorted by expert.
        probs: [rows] gate value of each row.
        row_counts: rows per expert.
        gate_up: first product, bias included: [rows, hidden_size] -> [rows, 2 * width].
        down: second product, and the biases to add: [rows, width] -> [rows, hidden_size],
            [experts, hidden_size].
        limit: bound of the activation's clamps.
        recompute: whether to compute the activation again in the backward pass.

    Returns:
        [rows, hidden_size].
    """
    gates_and_ups = gate_up(hidden_states)

    if recompute:
        # Keep only the input of the activation. Its output is computed again before the backward
        # pass of the second product.
        checkpoint = CheckpointWithoutOutput()
        activated = checkpoint.checkpoint(
            lambda x, probs: clamped_swiglu(x, probs, limit),
            gates_and_ups,
            probs,
        )
        output, biases = down(activated)
        checkpoint.discard_output_and_register_recompute(output)
    else:
        activated = clamped_swiglu(gates_and_ups, probs, limit)
        output, biases = down(activated)

    return add_weighted_bias(output, biases, probs, row_counts)


def add_weighted_bias(
    output: Tensor,
    biases: Tensor,
    probs: Tensor,
    row_counts: list[int],
) -> Tensor:
    """Return output[row] + probs[row] * biases[expert of row].

    Args:
        output: [rows, hidden_size], sorted by expert.
        biases: [experts, hidden_size].
        probs: [rows] gate value of each row.
        row_counts: rows per expert.

    Returns:
        [rows, hidden_size] with the dtype of ``output``.
    """
    # The sum is one product with a matrix [rows, experts] that has one value per row. It avoids a
    # copy of the bias for every row.
    #
    # Pinned memory: a copy from pageable memory would wait for all queued work of the GPU.
    counts = torch.tensor(row_counts, pin_memory=output.is_cuda)
    counts = counts.to(output.device, non_blocking=True)
    experts = torch.arange(len(row_counts), device=output.device)
    expert_of_row = experts.repeat_interleave(counts, output_size=len(output))

    weights = torch.zeros(len(output), len(row_counts), dtype=output.dtype, device=output.device)
    weights = weights.scatter(1, expert_of_row[:, None], probs[:, None].to(output.dtype))
    return torch.addmm(output, weights, biases.to(output.dtype))
