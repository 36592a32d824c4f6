"""The rollout engine as the loop sees it: token ids in, token ids out."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rl_loop.trajectory import FinishReason, WeightVersionSpan

if TYPE_CHECKING:  # configurations import this package, and reading one must not take seconds
    import torch


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
    """``request_id`` is unique; the agent loop names requests ``EPISODE/turn/tokens of the turn so far``."""

    request_id: str
    input_ids: list[int]
    sampling: SamplingParams
    return_routed_experts: bool = False

    @property
    def episode(self) -> str:
        """What the requests of one episode share, each of which continues the tokens of the one before."""
        return self.request_id.rsplit("/", 2)[0]


@dataclass
class GenerateResult:
    """output_ids and output_log_probs have the same length; the stop token, if one was sampled, is included.

    ``output_log_probs`` are natural logs of the distribution that was sampled from, at the sampling temperature
    and before top-p truncation. ``routed_experts`` is int16 [len(input_ids) + len(output_ids) - 1, layers, top_k].
    ``weight_versions`` are spans over output_ids."""

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

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """log p(input_ids[i] | input_ids[:i]) for i >= 1: len(input_ids) - 1 natural logs."""

    async def abort(self, request_id: str | None = None) -> None:
        """Stop one request, or all; each returns its partial tokens with FinishReason.ABORT."""

    async def sync_weights(self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", version: int) -> None:
        """Replace all weights, by Hugging Face name; what runs is aborted. Raises ValueError naming missing or unknown
        tensors; then nothing has changed."""

    async def close(self) -> None:
        """The engine is not used any more."""


def check_routes(routes: np.ndarray, experts: int) -> np.ndarray:
    """``routes`` int16 [tokens, layers, top_k]. Raises RuntimeError naming the layer that made no real choice: an
    expert twice, as in a buffer that nobody filled (all zeros), or a number that is none of ``experts``."""
    ordered = np.sort(routes, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    wrong = np.argwhere(twice | (ordered[..., 0] < 0) | (ordered[..., -1] >= experts))
    if len(wrong):
        token, layer = wrong[0]
        raise RuntimeError(
            f"routed experts of layer {layer} were not recorded or are no expert numbers: {routes[token, layer]} of "
            f"{experts} at token {token}. Its router did not run as expected. In SGLang the triton_kernel MoE backend "
            "does this; triton does not"
        )
    return routes
