"""All ranks of a trainer that serves tenants."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from megatron_gptoss.optimizer import AdamSettings
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import UpdateStatistics
from rl_loop.algorithms.summed_losses import SummedLoss
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.tenant_worker import PassResult, rank_name


class TenantGroup(TrainerGroup):
    """All ranks, each with a ``TenantWorker``. Tenants have names."""

    # -- tenants ----------------------------------------------------------------------------------

    def new_tenant(self, name: str, rank: int, seed: int) -> None:
        """Create a tenant."""
        self._all("new_tenant", name, rank, seed)

    def load_tenant(
        self, name: str, rank: int, tensors: Mapping[str, torch.Tensor], *, optimizer: bool
    ) -> None:
        """Create or replace a tenant by a copied one, with or without its optimizer state."""
        self._all("load_tenant", name, rank, tensors, optimizer)

    def drop_tenant(self, name: str) -> None:
        """Forget a tenant. Without effect for unknown names."""
        self._all("drop_tenant", name)

    def copy_tenant(self, name: str) -> dict[str, torch.Tensor]:
        """Copy a tenant with its optimizer state.

        Returns:
            Tensors of rank 0 by name. Tensors of another rank that differ have the name
            ``rank_name(RANK, NAME)``.
        """
        self._all("switch", name)
        world = self._settings.parallel.world_size
        first, *others = self.ranks.call("copy_tenant", [()] * world, range(world))
        merged: dict[str, torch.Tensor] = dict(first)
        for rank, tensors in enumerate(others, start=1):
            for key, tensor in tensors.items():
                if key not in first or not torch.equal(tensor, first[key]):
                    merged[rank_name(rank, key)] = tensor
        return merged

    def copy_adapter(self, name: str) -> dict[str, torch.Tensor]:
        """Copy a tenant without its optimizer state."""
        return self._of_tenant(name, "copy_adapter")

    def base_digest(self) -> str:
        """Return the digest of the base that adapters in PEFT's format have."""
        digest: str = self._all("base_digest")
        return digest

    # -- passes and steps -------------------------------------------------------------------------

    def accumulate(self, name: str, samples: TrainingSamples, loss: SummedLoss) -> PassResult:
        """Add the gradient of a loss over all samples to the gradients of earlier passes."""
        return self._pass(name, "accumulate", samples, loss)

    def evaluate(self, name: str, samples: TrainingSamples, loss: SummedLoss) -> PassResult:
        """Compute a loss over all samples without gradients."""
        return self._pass(name, "evaluate", samples, loss)

    def _pass(
        self, name: str, method: str, samples: TrainingSamples, loss: SummedLoss
    ) -> PassResult:
        self._all("switch", name)
        plan = self._plan(samples)
        inputs = self._inputs.store(samples, plan)
        results: list[PassResult] = self._on_ranks(method, inputs, self._result_ranks, loss)
        self._inputs.release()
        log_probs = plan.gather_results(
            samples, [result.log_probs for result in results], "log_probs", np.dtype(np.float32)
        )
        return PassResult(results[0].loss, log_probs)

    def take_step(self, name: str, settings: AdamSettings) -> UpdateStatistics:
        """Update a tenant with the gradients of all passes since its last step.

        Raises:
            RuntimeError: there was no pass, or one failed.
        """
        statistics: UpdateStatistics = self._of_tenant(name, "take_step", settings)
        return statistics

    def fail_step(self, name: str, reason: str) -> None:
        """Let a tenant's next step fail, because a pass of it was refused."""
        self._of_tenant(name, "fail_step", reason)

    def _of_tenant(self, name: str, method: str, *arguments: Any) -> Any:
        """Place a tenant in the trainer and call a method on every rank."""
        self._all("switch", name)
        return self._all(method, *arguments)

    @contextmanager
    def with_adapter(self, rank: int, tensors: Mapping[str, torch.Tensor] | None) -> Iterator[None]:
        """Let the model have other factors in the block. None for the base."""
        own = self._all("exchange_adapter", rank, tensors)
        try:
            yield
        finally:
            self._all("exchange_adapter", *own)
