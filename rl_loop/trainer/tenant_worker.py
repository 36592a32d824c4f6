"""Operations of a trainer rank on tenants: adapters of clients that share the base."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_gptoss.checkpoint.base_digest import base_digest
from megatron_gptoss.optimizer import AdamSettings
from megatron_gptoss.scorer import alignment, gather_parameters
from megatron_gptoss.step_results import UpdateStatistics
from megatron_gptoss.tenant_state import (
    TenantCopy,
    copy_adapter,
    copy_tenant,
    load_adapter_factors,
    load_tenant,
    new_tenant,
    place_tenant,
    take_tenant,
    used_rank,
)
from rl_loop.algorithms.summed_losses import LOG_PROBS, SummedLoss, summed_objective
from rl_loop.config.partial_configs import TrainerConfig
from rl_loop.trainer.rank_inputs import RankInputs
from rl_loop.trainer.worker import TrainerWorker


@dataclass(frozen=True)
class PassResult:
    """Result of a pass over sequences of a tenant."""

    loss: float
    """Sum of the losses of all tokens."""
    log_probs: np.ndarray
    """Log-prob of each label in nats, float32 [tokens]. 0 for the first token of a sequence."""


def rank_name(rank: int, name: str) -> str:
    """Return the name of a rank's tensor whose value differs from that of rank 0."""
    return f"rank{rank}/{name}"


class TenantWorker(TrainerWorker):
    """A trainer rank with tenants. One is in the trainer, the others are in host memory."""

    def __init__(
        self,
        settings: TrainerConfig,
        rank: int,
        master: str,
        port: int,
        threads: int,
        store_file: Path | None = None,
    ) -> None:
        super().__init__(settings, rank, master, port, threads, store_file)
        self._current: str | None = None
        """Name of the tenant in the trainer. None if there is none."""
        self._others: dict[str, TenantCopy] = {}
        """Tenants outside of the trainer by name."""

    # -- tenants ----------------------------------------------------------------------------------

    def new_tenant(self, name: str, rank: int, seed: int) -> None:
        """Create a tenant, and place it in the trainer."""
        self._put_away()
        new_tenant(self.trainer, rank, seed)
        self._current = name

    def load_tenant(
        self, name: str, rank: int, tensors: Mapping[str, torch.Tensor], optimizer: bool
    ) -> None:
        """Create or replace a tenant by a copied one. See ``tenant_state.load_tenant``.

        If that fails, an earlier tenant of this name is unchanged.

        Args:
            name: name of the tenant.
            rank: rank of the copied adapter.
            tensors: result of ``TenantGroup.copy_tenant``.
            optimizer: whether to load the optimizer state.
        """
        self._put_away()
        own = rank_name(dist.get_rank(), "")
        tensors = dict(tensors)
        for key in [key for key in tensors if key.startswith(own)]:
            tensors[key.removeprefix(own)] = tensors[key]
        load_tenant(self.trainer, rank, tensors, optimizer=optimizer)
        self._others.pop(name, None)
        self._current = name

    def switch(self, name: str) -> None:
        """Place a tenant in the trainer."""
        if name == self._current:
            return
        # Before the trainer's tenant leaves, so that an unknown name changes nothing.
        tenant = self._others[name]
        self._put_away()
        place_tenant(self.trainer, tenant)
        del self._others[name]
        self._current = name

    def drop_tenant(self, name: str) -> None:
        """Forget a tenant. Without effect for unknown names."""
        if name == self._current:
            self._current = None
        self._others.pop(name, None)

    def _put_away(self) -> None:
        """Copy the trainer's tenant to host memory."""
        # The distributed optimizer would otherwise overwrite the factors of the next tenant.
        gather_parameters(self.trainer.model)
        if self._current is not None:
            self._others[self._current] = take_tenant(self.trainer)
            self._current = None

    # -- passes and steps of the trainer's tenant -------------------------------------------------

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

    # -- copies -----------------------------------------------------------------------------------

    def copy_tenant(self) -> dict[str, torch.Tensor]:
        """Copy the tenant with its optimizer state."""
        gather_parameters(self.trainer.model)
        return copy_tenant(self.trainer)

    def copy_adapter(self) -> dict[str, torch.Tensor]:
        """Copy the tenant without its optimizer state."""
        gather_parameters(self.trainer.model)
        return copy_adapter(self.trainer)

    def base_digest(self) -> str:
        """Return the digest of the base that adapters in PEFT's format have."""
        return base_digest(self.model)

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
        gather_parameters(self.trainer.model)
        used, own = used_rank(self.trainer), copy_adapter(self.trainer)
        if tensors is None:
            tensors = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        load_adapter_factors(self.trainer, rank, tensors)
        return used, own
