"""The value model of PPO: the policy's architecture and parallel layout with a scalar in place of the vocabulary."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_gptoss.model import chunks_of
from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.trainer import Head, PolicyTrainer


class ValueHead(torch.nn.Module):
    """One weight per hidden unit, the same on every tensor-parallel rank, zero at first."""

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        device = next(model.parameters()).device
        self.weight = torch.nn.Parameter(
            torch.zeros(1, model.config.hidden_size, dtype=model.config.params_dtype, device=device)
        )
        self.sequence_parallel = model.config.sequence_parallel
        self.tp_group = parallel_state.get_tensor_model_parallel_group()


def make_critic(policy: torch.nn.Module) -> torch.nn.Module:
    """Give a model that holds the policy's weights a value head; its output layer is dropped."""
    for chunk in chunks_of(policy):
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk)
    return policy


class ValueTrainer(PolicyTrainer):
    """``train_step`` takes a loss of (values [tokens], batch); ``score`` gives values.

    The value at a token is that of the state before it: the expected return when the tokens up to the one before are
    known, as PackedBatch lays out labels."""

    def _training_head(self, temperature: float) -> Head:
        return lambda *arguments: _values(*arguments)[None]

    def score(self, batches: Sequence[PackedBatch], temperature: float = 1.0) -> list[torch.Tensor]:
        """Values of every micro-batch, fp32 [tokens] each. Collective."""
        return self._evaluate(batches, _values)


def _values(hidden: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, batch: Any) -> torch.Tensor:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if group.size() > 1:
        # every tensor-parallel rank computes the whole value, and Megatron adds up what they send back: each a part
        hidden = hidden / group.size() + hidden.detach() * (1 - 1 / group.size())
    return (hidden.to(dtype) @ weight.to(dtype).t())[:, 0]
