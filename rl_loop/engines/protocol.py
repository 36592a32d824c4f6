"""The rollout engine as the loop sees it: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from rl_loop.trajectory import FinishReason, WeightVersionSpan


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one continuation. temperature 0 means greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None  # the same seed, weights and prompt give the same continuation, whatever it is batched with


@dataclass(frozen=True)
class GenerateRequest:
    request_id: str
    input_ids: list[int]
    sampling: SamplingParams
    return_routed_experts: bool = False


@dataclass
class GenerateResult:
    """output_ids and output_log_probs have the same length; the stop token, if one was sampled, is included.

    ``output_log_probs`` are natural logs of the distribution that was sampled from, at the sampling temperature
    and before top-p truncation. ``routed_experts`` is int16 [len(input_ids) + len(output_ids) - 1, layers, top_k].
    ``weight_versions`` are spans over output_ids.
    """

    output_ids: list[int]
    output_log_probs: list[float]
    finish_reason: FinishReason
    weight_versions: list[WeightVersionSpan] = field(default_factory=list)
    routed_experts: np.ndarray | None = None
    cached_tokens: int = 0


class RolloutEngine(Protocol):
    """What the agent loop and the weight sync need; the same for the embedded engine and for SGLang."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one continuation. Requests made concurrently are batched."""
        ...

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """log p(input_ids[i] | input_ids[:i]) for i >= 1: len(input_ids) - 1 natural logs."""
        ...

    async def abort(self, request_id: str | None = None) -> None:
        """Stop one request, or all; each returns its partial tokens with FinishReason.ABORT."""
        ...

    async def pause(self) -> None:
        """Let no new request start and abort what runs."""
        ...

    async def resume(self) -> None: ...

    async def sync_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights, by Hugging Face name. Raises ValueError naming missing or unknown tensors; then nothing
        has changed."""
        ...

    async def sleep(self) -> None:
        """Free the memory that generation needs (key/value cache, weights)."""
        ...

    async def wake(self) -> None: ...
