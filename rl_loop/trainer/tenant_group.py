"""All ranks of a trainer that serves tenants."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from megatron_gptoss.optimizer import AdamSettings
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import UpdateStatistics
from rl_loop.algorithms.summed_losses import SummedLoss
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.tenant_worker import PassResult


class TenantGroup(TrainerGroup):
    """All ranks, each with a ``TenantWorker``. They hold one tenant at a time."""

    def accumulate(self, samples: TrainingSamples, loss: SummedLoss) -> PassResult:
        """Add the gradient of a loss over all samples to the gradients of earlier passes."""
        return self._pass("accumulate", samples, loss)

    def evaluate(self, samples: TrainingSamples, loss: SummedLoss) -> PassResult:
        """Compute a loss over all samples without gradients."""
        return self._pass("evaluate", samples, loss)

    def _pass(self, method: str, samples: TrainingSamples, loss: SummedLoss) -> PassResult:
        plan = self._plan(samples)
        inputs = self._inputs.store(samples, plan)
        results: list[PassResult] = self._on_ranks(method, inputs, self._result_ranks, loss)
        self._inputs.release()
        log_probs = plan.gather_results(
            samples, [result.log_probs for result in results], "log_probs", np.dtype(np.float32)
        )
        return PassResult(results[0].loss, log_probs)

    def take_step(self, settings: AdamSettings) -> UpdateStatistics:
        """Update the tenant with the gradients of all passes since its last step.

        Raises:
            RuntimeError: there was no pass, or one failed.
        """
        statistics: UpdateStatistics = self._all("take_step", settings)
        return statistics

    def fail_step(self, reason: str) -> None:
        """Let the next step fail, because a pass of it was refused."""
        self._all("fail_step", reason)

    def new_tenant(self, rank: int, seed: int) -> None:
        """Replace the tenant by a new one."""
        self._all("new_tenant", rank, seed)

    def copy_tenant(self) -> dict[str, torch.Tensor]:
        """Copy the tenant with its optimizer state."""
        tensors: dict[str, torch.Tensor] = self._all("copy_tenant")
        return tensors

    def copy_adapter(self) -> dict[str, torch.Tensor]:
        """Copy the tenant without its optimizer state."""
        tensors: dict[str, torch.Tensor] = self._all("copy_adapter")
        return tensors

    def load_tenant(
        self, rank: int, tensors: Mapping[str, torch.Tensor], *, optimizer: bool
    ) -> None:
        """Replace the tenant by a copied one, with or without its optimizer state."""
        self._all("load_tenant", rank, tensors, optimizer)

    @contextmanager
    def with_adapter(self, rank: int, tensors: Mapping[str, torch.Tensor] | None) -> Iterator[None]:
        """Let the model have other factors in the block. None for the base."""
        own = self._all("exchange_adapter", rank, tensors)
        try:
            yield
        finally:
            self._all("exchange_adapter", *own)
