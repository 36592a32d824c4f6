"""The value model of PPO: the policy with a scalar in place of the vocabulary."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_gptoss.model import chunks_of
from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.scorer import Head
from megatron_gptoss.trainer import PolicyTrainer


class ValueHead(torch.nn.Module):
    """One weight per hidden unit, the same on every tensor-parallel rank, zero at first."""

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        # Values begin at zero, whatever the hidden states are.
        zeros = torch.zeros(
            1,
            model.config.hidden_size,
            dtype=model.config.params_dtype,
            device=next(model.parameters()).device,
        )
        self.weight = torch.nn.Parameter(zeros)

        # What ``gather_hidden_states`` reads of an output layer.
        self.sequence_parallel = model.config.sequence_parallel
        self.tp_group = parallel_state.get_tensor_model_parallel_group()


def make_critic(policy: torch.nn.Module) -> torch.nn.Module:
    """Replace the output layer of a model that holds the policy's weights by a value head."""
    # Only the last stage's last chunk has an output layer.
    for chunk in chunks_of(policy):
        # The embedding is no output layer any more: its copies need not agree.
        chunk.share_embeddings_and_output_weights = False
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk)
    return policy


class ValueTrainer(PolicyTrainer):
    """Trains a critic: ``train_step`` takes a loss of (values [tokens], batch).

    The value at a token is that of the state before it: the expected return when the tokens up to
    the one before are known, in the order in which PackedBatch has labels.
    """

    def _training_head(self, temperature: float) -> Head:
        def head(hidden: Tensor, weight: Tensor, group: dist.ProcessGroup, batch: Any) -> Tensor:
            return _values(hidden, weight, group, batch)[None]

        return head

    def score(self, batches: Sequence[PackedBatch], temperature: float = 1.0) -> list[Tensor]:
        """Compute the values of every micro-batch, fp32 [tokens] each. Collective."""
        return self._evaluate(batches, _values)


def _values(hidden: Tensor, weight: Tensor, group: dist.ProcessGroup, batch: Any) -> Tensor:
    """Compute values [tokens] from hidden states [tokens, hidden_size], in fp32 at least."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)

    # Every tensor-parallel rank computes the same value, and Megatron adds up the gradients that
    # they send back: each sends its share of the gradient.
    size = group.size()
    if size > 1:
        hidden = hidden / size + hidden.detach() * (1 - 1 / size)

    return (hidden.to(dtype) @ weight.to(dtype).t())[:, 0]
