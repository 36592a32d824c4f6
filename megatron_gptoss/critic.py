"""Value model of PPO: the policy with a value head instead of the output layer."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_gptoss.model import list_chunks
from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.scorer import Head
from megatron_gptoss.trainer import PolicyTrainer


class ValueHead(torch.nn.Module):
    """Linear value head [1, hidden_size], the same on every tensor-parallel rank."""

    def __init__(self, model: GPTModel) -> None:
        """Create the head for the last chunk ``model``."""
        super().__init__()
        # With zeros, all initial values are 0 for any hidden states.
        zeros = torch.zeros(
            1,
            model.config.hidden_size,
            dtype=model.config.params_dtype,
            device=next(model.parameters()).device,
        )
        self.weight = torch.nn.Parameter(zeros)

        # ``gather_hidden_states`` reads these attributes of an output layer.
        self.sequence_parallel = model.config.sequence_parallel
        self.tp_group = parallel_state.get_tensor_model_parallel_group()


def make_critic(policy: torch.nn.Module) -> torch.nn.Module:
    """Replace the output layer of a copied policy by a value head, in place.

    Returns:
        The same model.
    """
    # Only the last chunk of the last stage has an output layer.
    for chunk in list_chunks(policy):
        # Without an output layer, Megatron need not keep copies of a tied embedding equal.
        chunk.share_embeddings_and_output_weights = False
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk)
    return policy


class ValueTrainer(PolicyTrainer):
    """Trainer of a critic. Its loss function takes (values [tokens], batch).

    The value of a token is the expected return before the token, given all earlier tokens. Values
    are in the label order of PackedBatch.
    """

    def _training_head(self, temperature: float) -> Head:
        """Return the function that computes values as [1, tokens]. Values have no temperature."""

        def head(hidden: Tensor, weight: Tensor, group: dist.ProcessGroup, batch: Any) -> Tensor:
            return _values(hidden, weight, group, batch)[None]

        return head

    def score(self, batches: Sequence[PackedBatch], temperature: float = 1.0) -> list[Tensor]:
        """Compute the values of every micro-batch. Collective.

        Args:
            batches: micro-batches of this data-parallel rank.
            temperature: unused.

        Returns:
            [labels] fp32 per micro-batch (fp64 for an fp64 model).
        """
        return self._evaluate(batches, _values)


def _values(hidden: Tensor, weight: Tensor, group: dist.ProcessGroup, batch: PackedBatch) -> Tensor:
    """Compute values [labels] from hidden states [tokens, hidden_size], in fp32 or wider."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)

    # Every tensor-parallel rank computes the same values, and Megatron sums the gradients of all
    # ranks. Divide the gradient by the number of ranks, and leave the value unchanged.
    size = group.size()
    if size > 1:
        hidden = hidden / size + hidden.detach() * (1 - 1 / size)

    return batch.at_labels((hidden.to(dtype) @ weight.to(dtype).t())[:, 0])
