"""Operations of a trainer rank on tenants: adapters of clients that share the base."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_gptoss.optimizer import AdamSettings
from megatron_gptoss.scorer import alignment
from megatron_gptoss.step_results import UpdateStatistics
from megatron_gptoss.tenant_state import (
    copy_adapter,
    copy_tenant,
    load_adapter_factors,
    load_tenant,
    new_tenant,
    used_rank,
)
from rl_loop.algorithms.summed_losses import LOG_PROBS, SummedLoss, summed_objective
from rl_loop.trainer.rank_inputs import RankInputs
from rl_loop.trainer.worker import TrainerWorker


@dataclass(frozen=True)
class PassResult:
    """Result of a pass over sequences of a tenant."""

    loss: float
    """Sum of the losses of all tokens."""
    log_probs: np.ndarray
    """Log-prob of each label in nats, float32 [tokens]. 0 for the first token of a sequence."""


class TenantWorker(TrainerWorker):
    """A trainer rank with one tenant at a time."""

    def accumulate(self, inputs: RankInputs, loss: SummedLoss) -> PassResult:
        """Add the gradient of a loss to the gradients of earlier passes."""
        (batches,) = inputs.pack(alignment())
        result = self.trainer.accumulate(batches, summed_objective(loss))
        log_probs = result.token_values[LOG_PROBS]
        return PassResult(result.sums["loss"], inputs.to_column(log_probs, np.dtype(np.float32)))

    def evaluate(self, inputs: RankInputs, loss: SummedLoss) -> PassResult:
        """Compute a loss without gradients."""
        (batches,) = inputs.pack(alignment())
        scores = self.trainer.score(batches)
        objective = summed_objective(loss)
        total = torch.zeros((), dtype=torch.double)
        for batch, log_probs in zip(batches, scores, strict=True):
            output = objective(log_probs, torch.zeros_like(log_probs), batch.to(log_probs.device))
            total += output.loss.double().cpu()
        # Context-parallel ranks have the scores of whole rows.
        device = next(self.model.parameters()).device
        total = total.to(device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return PassResult(float(total), inputs.to_column(scores, np.dtype(np.float32)))

    def take_step(self, settings: AdamSettings) -> UpdateStatistics:
        """Update the tenant with the gradients of all passes since its last step."""
        return self.trainer.step(settings)

    def fail_step(self, reason: str) -> None:
        """Let the next step fail, because a pass of it was refused."""
        self.trainer.fail_step(reason)

    def new_tenant(self, rank: int, seed: int) -> None:
        """Replace the tenant by a new one."""
        new_tenant(self.trainer, rank, seed)

    def copy_tenant(self) -> dict[str, torch.Tensor]:
        """Copy the tenant with its optimizer state."""
        return copy_tenant(self.trainer)

    def copy_adapter(self) -> dict[str, torch.Tensor]:
        """Copy the tenant without its optimizer state."""
        return copy_adapter(self.trainer)

    def load_tenant(self, rank: int, tensors: Mapping[str, torch.Tensor], optimizer: bool) -> None:
        """Replace the tenant by a copied one. See ``tenant_state.load_tenant``."""
        load_tenant(self.trainer, rank, tensors, optimizer=optimizer)

    def exchange_adapter(
        self, rank: int, tensors: Mapping[str, torch.Tensor] | None
    ) -> tuple[int, dict[str, torch.Tensor]]:
        """Replace the factors until the next exchange, in order to send merged weights.

        Args:
            rank: rank of the factors.
            tensors: factors by name. None for the base.

        Returns:
            Rank and factors of the tenant.
        """
        used, own = used_rank(self.trainer), copy_adapter(self.trainer)
        if tensors is None:
            tensors = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        load_adapter_factors(self.trainer, rank, tensors)
        return used, own
