"""The trainer and the engine of a server, and the operations on them.

All methods run on one thread.
"""

import asyncio
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from megatron_gptoss.optimizer import AdamSettings
from rl_loop.engines.backend import RolloutBackend
from rl_loop.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    ModelShape,
    RolloutEngine,
    SamplingParams,
    check_result,
)
from rl_loop.tinker.datums import PassRequest
from rl_loop.tinker.errors import ClientError
from rl_loop.tinker.snapshots import Snapshot
from rl_loop.trainer.tenant_group import TenantGroup
from rl_loop.trainer.tenant_worker import PassResult


@dataclass(frozen=True)
class SampleRequest:
    """A request to sample continuations of one prompt, or a part of it."""

    name: str
    """Unique name."""
    prompt: list[int]
    """Tokens of the prompt."""
    numbers: range
    """Numbers of the continuations."""
    sampling: SamplingParams
    """Parameters of each continuation. Its seed is increased by the number of the continuation."""
    scores_prompt: bool = False
    """True if the log-probs of the prompt are wanted."""
    last_scored: int | None = None
    """Number of tokens at the end of the prompt whose log-probs are wanted. None for all."""


@dataclass(frozen=True)
class Samples:
    """Result of a ``SampleRequest``."""

    sequences: list[tuple[list[int], list[float], bool]]
    """Tokens and log-probs of each continuation, and True if it ended with a stop token."""
    prompt_log_probs: np.ndarray | None
    """float32 [tokens of the prompt], NaN for tokens without a log-prob. None if not requested."""


class Policy:
    """Tenants in the trainer, and one snapshot in the engine."""

    def __init__(
        self,
        group: TenantGroup,
        backend: RolloutBackend,
        engine: RolloutEngine,
        shape: ModelShape,
    ) -> None:
        """Serve a trainer and an engine that are ready. ``shape`` checks the engine's results."""
        self._group = group
        self._backend = backend
        self._engine = engine
        self._shape = shape
        self._sampling_from: Snapshot | None = None
        self._syncs = 0

    # -- training ---------------------------------------------------------------------------------

    def create(self, tenant: str, rank: int, seed: int) -> None:
        """Create a tenant."""
        self._group.new_tenant(tenant, rank, seed)

    def load(
        self, tenant: str, rank: int, tensors: Mapping[str, torch.Tensor], *, optimizer: bool
    ) -> None:
        """Create or replace a tenant by a saved one.

        Raises:
            ClientError: the tensors do not fit the adapters of this server. The tenant is unchanged.
        """
        try:
            self._group.load_tenant(tenant, rank, tensors, optimizer=optimizer)
        except (KeyError, RuntimeError, ValueError) as error:
            raise ClientError(
                f"the checkpoint does not fit the adapters of this server: {error}"
            ) from error

    def drop(self, tenant: str) -> None:
        """Forget a tenant."""
        self._group.drop_tenant(tenant)

    def run_pass(self, tenant: str, request: PassRequest) -> PassResult:
        """Run a forward pass, and a backward pass unless it is forward only.

        Raises:
            ClientError: the loss is not finite.
        """
        run = self._group.evaluate if request.forward_only else self._group.accumulate
        result = run(tenant, request.samples, request.loss)
        if not math.isfinite(result.loss):
            raise ClientError("the loss is not finite")
        return result

    def fail_step(self, tenant: str, reason: str) -> None:
        """Let a tenant's next step fail, because a pass of it was refused."""
        self._group.fail_step(tenant, reason)

    def take_step(self, tenant: str, settings: AdamSettings) -> dict[str, float]:
        """Take an optimizer step of a tenant, and return its metrics.

        Raises:
            ClientError: there is no gradient, a part of it is missing, or it is not finite.
        """
        try:
            update = self._group.take_step(tenant, settings)
        except (RuntimeError, FloatingPointError) as error:
            raise ClientError(str(error)) from error
        if not update.parameters_updated:
            raise ClientError(f"no step was taken: {update.non_finite_gradients}")
        return {"grad_norm": update.grad_norm}

    def copy(self, tenant: str) -> dict[str, torch.Tensor]:
        """Return a copy of a tenant with its optimizer state."""
        return self._group.copy_tenant(tenant)

    def copy_adapter(self, tenant: str) -> dict[str, torch.Tensor]:
        """Return a copy of a tenant's factors."""
        return self._group.copy_adapter(tenant)

    @cached_property
    def base_digest(self) -> str:
        """Digest of the base, for adapters in PEFT's format."""
        return self._group.base_digest()

    # -- sampling ---------------------------------------------------------------------------------

    def sample(
        self, snapshot: Snapshot, requests: Sequence[SampleRequest]
    ) -> list[Samples | ClientError]:
        """Sample requests of one snapshot. Returns a result or an error for each."""
        if snapshot is not self._sampling_from:
            tensors = snapshot.read()
            # Unknown until the sync has succeeded.
            self._sampling_from = None
            self._syncs += 1
            with self._group.with_adapter(snapshot.rank, tensors):
                self._backend.sync_weights(self._group, self._syncs)
            self._sampling_from = snapshot
        return asyncio.run(self._sample_all(requests))

    async def _sample_all(self, requests: Sequence[SampleRequest]) -> list[Samples | ClientError]:
        return await asyncio.gather(*map(self._sample_one, requests))

    async def _sample_one(self, request: SampleRequest) -> Samples | ClientError:
        """Return the result of a request."""
        try:
            results = await asyncio.gather(
                *(self._generate(request, number) for number in request.numbers)
            )
            scores = await self._score_prompt(request) if request.scores_prompt else None
        except ValueError as error:
            return ClientError(str(error))
        stop = request.sampling.stop_token_ids
        return Samples(
            [
                (
                    result.output_ids,
                    result.output_log_probs,
                    bool(result.output_ids) and result.output_ids[-1] in stop,
                )
                for result in results
            ],
            scores,
        )

    async def _generate(self, request: SampleRequest, number: int) -> GenerateResult:
        """Sample one continuation."""
        seed = request.sampling.seed
        if seed is None:
            seed = secrets.randbits(62)
        sampling = replace(request.sampling, seed=(seed + number) % 2**63)
        call = GenerateRequest(f"{request.name}/0/{number}", request.prompt, sampling)
        result = await self._engine.generate(call)
        check_result(call, result, self._shape)
        return result

    async def _score_prompt(self, request: SampleRequest) -> np.ndarray:
        """Return log-probs of the prompt, float32 [tokens]. NaN for tokens without one."""
        scores = np.full(len(request.prompt), np.nan, np.float32)
        scores[1:] = await self._engine.score(request.prompt)
        if request.last_scored is not None:
            scores[: -request.last_scored] = np.nan
        return scores
