"""The experts of a layer on a GPU: grouped matrix products around one fused activation."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor

from gptoss_kernels.swiglu import clamped_swiglu
from megatron_gptoss.transformer_config import mark


class GptOssGroupedMLP(TEGroupedMLP):
    """All experts of this rank: two grouped matrix products around one fused activation.

    Megatron's own forward clamps, gates and weighs in separate passes, keeps their results for the
    backward pass, and adds the second bias through an fp32 copy of every expert's rows.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

        # Megatron sums gradients over tensor-parallel ranks where a parameter is marked so, and each
        # rank has all of this one already. Transformer Engine 2.20 marks biases of layers only that
        # several ranks split, as these are not; Megatron's own layers do always (``cpu_experts``).
        for name, parameter in self.named_parameters():
            if ".bias" in name:
                mark(parameter, sequence_parallel=False)

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        *unused: Any,
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
    """Run every expert on its rows and weigh the results.

    Args:
        hidden_states: [rows, hidden_size], sorted by expert.
        probs: [rows], the gate value of each row.
        row_counts: rows of each expert.
        gate_up: the first product, bias included: [rows, hidden_size] -> [rows, 2 * width].
        down: the second product, and the biases to add: [rows, width] -> [rows, hidden_size],
            [experts, hidden_size].
        limit: of the activation's clamps.
        recompute: compute the activation again in the backward pass instead of keeping it.

    Returns:
        [rows, hidden_size].
    """
    gates_and_ups = gate_up(hidden_states)

    if recompute:
        # Kept are the inputs of the activation; its output is computed again when the
        # backward pass reaches the second product.
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
    """Compute output[row] + probs[row] * biases[expert of row].

    It is one product with a matrix that has one entry per row, without a copy of the bias for
    every row.

    Args:
        output: [rows, hidden_size], sorted by expert.
        biases: [experts, hidden_size].
        probs: [rows].
        row_counts: rows of each expert.
    """
    # From pinned memory: a copy from elsewhere would wait until the GPU has done what is queued.
    counts = torch.tensor(row_counts, pin_memory=output.is_cuda)
    counts = counts.to(output.device, non_blocking=True)
    experts = torch.arange(len(row_counts), device=output.device)
    expert_of_row = experts.repeat_interleave(counts, output_size=len(output))

    weights = torch.zeros(len(output), len(row_counts), dtype=output.dtype, device=output.device)
    weights = weights.scatter(1, expert_of_row[:, None], probs[:, None].to(output.dtype))
    return torch.addmm(output, weights, biases.to(output.dtype))
