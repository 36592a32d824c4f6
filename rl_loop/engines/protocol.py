"""The rollout engine as the loop sees it: token ids in, token ids out."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.infrastructure import EngineFault

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
    on_begin: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """Called on the event loop when the request leaves the engine's queue: from then on the time of its episode runs.
    An engine that cannot see that calls it with the first tokens."""

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


POSITIVE_LOG_PROB = 1e-3
"""What rounding may make of the log-prob of a certain token, in nats; more is no probability."""


@dataclass(frozen=True)
class ModelShape:
    """What is known of the model when an engine's answers are checked; None where it is not."""

    vocabulary_size: int
    layers: int | None = None
    top_k: int | None = None
    experts: int | None = None


def check_result(request: GenerateRequest, result: GenerateResult, shape: ModelShape) -> None:
    """Raise EngineFault if an engine's answer is none to ``request``. Engines are not believed: one wrong number here
    would be trained on as if the policy had sampled it."""
    try:
        _check_tokens(request.sampling, result, shape.vocabulary_size)
        _check_versions(result)
        if request.return_routed_experts and result.output_ids:
            rows = len(request.input_ids) + len(result.output_ids) - 1
            _check_routes_of(result.routed_experts, rows, shape)
    except _Misbehaviour as fault:
        raise EngineFault(request.request_id, str(fault)) from None


class _Misbehaviour(Exception):
    """What is wrong with an answer."""


def _check_tokens(sampling: SamplingParams, result: GenerateResult, vocabulary_size: int) -> None:
    ids, log_probs, reason = result.output_ids, result.output_log_probs, result.finish_reason
    if reason not in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
        raise _Misbehaviour(f"it ended for the reason {reason!r}, which no sampling has")
    if len(ids) > sampling.max_new_tokens:
        raise _Misbehaviour(f"{len(ids)} tokens came back, {sampling.max_new_tokens} were asked for")
    if len(log_probs) != len(ids):
        raise _Misbehaviour(f"{len(log_probs)} log-probs came back for {len(ids)} tokens")
    if not ids:
        if reason is not FinishReason.ABORT:
            raise _Misbehaviour(f"no token came back, and it ended for the reason {reason.value!r}")
        return

    if (fault := fault_in_ids(ids, vocabulary_size)) is not None:
        raise _Misbehaviour(fault)
    if (fault := fault_in_log_probs(log_probs)) is not None:
        raise _Misbehaviour(fault)
    if any(token in sampling.stop_token_ids for token in ids[:-1]):
        raise _Misbehaviour("tokens came back behind a stop token")


def fault_in_ids(ids: list[int], vocabulary_size: int) -> str | None:
    """Say which of ``ids``, at least one, is no token id; None if all are."""
    array = np.asarray(ids)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        return f"token ids are no whole numbers: {ids[:3]}"
    wrong = (array < 0) | (array >= vocabulary_size)
    if wrong.any():
        return f"token {int(wrong.argmax())} is {array[wrong][0]}, and the vocabulary has {vocabulary_size}"
    return None


def fault_in_log_probs(log_probs: list[float]) -> str | None:
    """Say which of ``log_probs``, at least one, is no log-prob; None if all are."""
    for position, log_prob in enumerate(log_probs):
        if not isinstance(log_prob, Real):
            return f"the log-prob of token {position} is {log_prob!r}"

    array = np.asarray(log_probs, dtype=np.float64)
    wrong = ~(np.isfinite(array) & (array <= POSITIVE_LOG_PROB))
    if wrong.any():
        position = int(wrong.argmax())
        return f"the log-prob of token {position} is {log_probs[position]}: broken weights, or numbers that overflow"
    return None


def _check_versions(result: GenerateResult) -> None:
    """Spans lie one behind the other over all tokens; an engine that knows no versions gives none."""
    if not result.weight_versions:
        return
    end = 0
    for span in result.weight_versions:
        if span.start != end or span.end <= span.start:
            raise _Misbehaviour(f"weight versions {result.weight_versions} are not one behind the other")
        end = span.end
    if end != len(result.output_ids):
        raise _Misbehaviour(f"weight versions are of {end} tokens, {len(result.output_ids)} came back")


def _check_routes_of(routes: Any, rows: int, shape: ModelShape) -> None:
    if routes is None:
        raise _Misbehaviour("no routed experts came back, which were asked for")
    if not isinstance(routes, np.ndarray) or routes.ndim != 3 or routes.dtype.kind not in "iu":
        raise _Misbehaviour("routed experts are no whole numbers of shape [tokens, layers, top_k]")
    wanted = (rows, shape.layers or routes.shape[1], shape.top_k or routes.shape[2])
    if routes.shape != wanted:
        raise _Misbehaviour(f"routed experts have the shape {routes.shape}, expected {wanted}")
    if shape.experts is None:
        return
    try:
        check_routes(routes, shape.experts)
    except RuntimeError as error:
        raise _Misbehaviour(str(error)) from None


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
