"""The rollout engine as the loop sees it: token ids in, token ids out.

Also the checks of what engines answer (``check_result``).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from megatron_gptoss.routes import ROUTE_DTYPES, route_dtype, unknown_route
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.infrastructure import EngineFault

if TYPE_CHECKING:
    # Configurations import this package, and reading one must not take seconds.
    import torch


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one continuation."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """The same seed, weights and prompt give the same continuation in every batch."""


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt to continue."""

    request_id: str
    """Unique; the agent loop names requests ``EPISODE/turn/tokens of the turn so far``."""
    input_ids: list[int]
    sampling: SamplingParams
    return_routed_experts: bool = False
    on_begin: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """Called on the event loop when the request leaves the engine's queue: from then on the time
    of its episode runs. An engine that cannot see that calls it with the first tokens."""

    @property
    def episode(self) -> str:
        """What the requests of an episode share; each continues the tokens of the one before."""
        return self.request_id.rsplit("/", 2)[0]


@dataclass
class GenerateResult:
    """A continuation. ``output_ids`` and ``output_log_probs`` have the same length."""

    output_ids: list[int]
    """The stop token, if one was sampled, is included."""
    output_log_probs: list[float]
    """Natural logs of the distribution that was sampled from, at the sampling temperature and
    before top-p truncation."""
    finish_reason: FinishReason
    weight_versions: list[WeightVersionSpan] = field(default_factory=list)
    """Spans over ``output_ids``; empty from an engine that knows no versions."""
    routed_experts: np.ndarray | None = None
    """uint8 or int16, as ``megatron_gptoss.routes.route_dtype`` says for the model:
    [len(input_ids) + len(output_ids) - 1, layers, top_k]."""
    cached_tokens: int = 0
    """Tokens of the prompt that the engine had in its prefix cache."""
    request_id: str | None = None
    """Of the request that this answers; None from an engine that does not say."""


class RolloutEngine(Protocol):
    """What the agent loop needs of every engine."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one continuation. Requests made concurrently are batched."""

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Compute log p(input_ids[i] | input_ids[:i]) for i >= 1.

        Returns len(input_ids) - 1 natural logs.
        """

    async def abort(self, request_id: str | None = None) -> None:
        """Stop one request, or all; each returns its partial tokens with FinishReason.ABORT."""

    async def close(self) -> None:
        """Release everything; the engine is not used any more."""


@runtime_checkable
class HoldsWeights(Protocol):
    """An engine that holds the model itself, and takes weights."""

    async def sync_weights(
        self,
        named_tensors: "Iterable[tuple[str, torch.Tensor]]",
        version: int,
    ) -> None:
        """Replace all weights, by Hugging Face name. Running requests are aborted.

        Of a run with ``quantization`` the embedded engine gets experts as blocks and scales.

        Raises WeightMismatch naming missing or unknown tensors. Then nothing has changed.
        """


@runtime_checkable
class ClientOfServers(Protocol):
    """An engine that sends requests to servers, which take their weights elsewhere."""

    def set_min_version(self, version: int) -> None:
        """Use only answers that were made with weights ``version`` or later."""


def weight_holder(engine: RolloutEngine) -> HoldsWeights:
    """Return an engine as one that takes weights. Raises TypeError for a client of servers."""
    if isinstance(engine, HoldsWeights):
        return engine
    raise TypeError(
        f"rollout.engine: {type(engine).__name__} has no sync_weights, so its backend cannot call "
        "workers.load_weights. For a client of servers call workers.set_min_version"
    )


def server_client(engine: RolloutEngine) -> ClientOfServers:
    """Return an engine as a client of servers. Raises TypeError for one that holds the model."""
    if isinstance(engine, ClientOfServers):
        return engine
    raise TypeError(
        f"rollout.engine: {type(engine).__name__} has no set_min_version, so its backend cannot call "
        "workers.set_min_version. For an engine that holds the model call workers.load_weights"
    )


@runtime_checkable
class PackedExpertsEngine(Protocol):
    """An engine that may hold experts in MXFP4, and tells which."""

    async def packed_digests(self) -> dict[str, str]:
        """Compute digests of the experts that came in MXFP4, as ``converters.mxfp4_tensors.Digests``;
        empty if none did.

        Raises RuntimeError naming a tensor whose values are not those of its bits.
        """


@runtime_checkable
class MeasuresRounding(Protocol):
    """An engine that can compute without the rounding of its dtype."""

    async def rounding_error(self, input_ids: list[int]) -> float | None:
        """Return how far rounding moves the log-probs of ``score`` at temperature 1.

        Mean |log-prob in the engine's dtype - log-prob in fp32|, in nats per token, with the same
        weights. None if it cannot be measured.
        """


POSITIVE_LOG_PROB = 1e-3
"""Nats that rounding may lift the log-prob of a certain token above 0; more is no probability."""


@dataclass(frozen=True)
class ModelShape:
    """What is known of the model when an engine's answers are checked; None where unknown."""

    vocabulary_size: int
    layers: int | None = None
    top_k: int | None = None
    experts: int | None = None


def check_result(request: GenerateRequest, result: GenerateResult, shape: ModelShape) -> None:
    """Raise EngineFault if ``result`` cannot be an answer to ``request``.

    Engines are not trusted: one wrong number would be trained on as if the policy had sampled it.
    """
    try:
        if result.request_id not in (None, request.request_id):
            raise _InvalidResult(f"this is the answer to request {result.request_id}")
        _check_tokens(request.sampling, result, shape.vocabulary_size)
        _check_versions(result)
        if request.return_routed_experts and result.output_ids:
            tokens = len(request.input_ids) + len(result.output_ids) - 1
            _check_routes_shape(result.routed_experts, tokens, shape)
    except _InvalidResult as fault:
        raise EngineFault(request.request_id, str(fault)) from None


class _InvalidResult(Exception):
    """Says what is wrong with an answer."""


def _check_tokens(sampling: SamplingParams, result: GenerateResult, vocabulary_size: int) -> None:
    ids = result.output_ids
    log_probs = result.output_log_probs
    reason = result.finish_reason

    if reason not in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
        raise _InvalidResult(f"it ended for the reason {reason!r}, which no sampling has")
    if len(ids) > sampling.max_new_tokens:
        raise _InvalidResult(
            f"{len(ids)} tokens came back, {sampling.max_new_tokens} were asked for"
        )
    if len(log_probs) != len(ids):
        raise _InvalidResult(f"{len(log_probs)} log-probs came back for {len(ids)} tokens")

    # Only a request that was aborted before its first token may come back without any.
    if not ids:
        if reason is not FinishReason.ABORT:
            ending = f"it ended for the reason {reason.value!r}"
            raise _InvalidResult(f"no token came back, and {ending}")
        return

    if (fault := fault_in_ids(ids, vocabulary_size)) is not None:
        raise _InvalidResult(fault)
    if (fault := fault_in_log_probs(log_probs)) is not None:
        raise _InvalidResult(fault)
    if any(token in sampling.stop_token_ids for token in ids[:-1]):
        raise _InvalidResult("tokens came back behind a stop token")


def fault_in_ids(ids: list[int], vocabulary_size: int) -> str | None:
    """Describe the first of ``ids`` (at least one) that is no token id; None if all are."""
    array = np.asarray(ids)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        return f"token ids are no whole numbers: {ids[:3]}"

    outside = (array < 0) | (array >= vocabulary_size)
    if outside.any():
        position = int(outside.argmax())
        return f"token {position} is {array[position]}, and the vocabulary has {vocabulary_size}"
    return None


def fault_in_log_probs(log_probs: list[float]) -> str | None:
    """Describe the first of ``log_probs`` (at least one) that is no log-prob; None if all are."""
    # numpy would turn None and numbers in text into floats without a word.
    for position, log_prob in enumerate(log_probs):
        # The first comparison costs a tenth of the second, and nearly always suffices.
        if type(log_prob) is not float and not isinstance(log_prob, Real):
            return f"the log-prob of token {position} is {log_prob!r}"

    array = np.asarray(log_probs, dtype=np.float64)
    is_log_prob = np.isfinite(array) & (array <= POSITIVE_LOG_PROB)
    if not is_log_prob.all():
        position = int(is_log_prob.argmin())
        return f"the log-prob of token {position} is {log_probs[position]}: broken weights, or numbers that overflow"
    return None


def _check_versions(result: GenerateResult) -> None:
    """Check that spans of weight versions follow one another over all tokens."""
    # An engine that knows no versions gives none.
    if not result.weight_versions:
        return

    end = 0
    for span in result.weight_versions:
        if span.start != end or span.end <= span.start:
            raise _InvalidResult(
                f"weight versions {result.weight_versions} are not one behind the other"
            )
        end = span.end
    if end != len(result.output_ids):
        raise _InvalidResult(
            f"weight versions are of {end} tokens, {len(result.output_ids)} came back"
        )


def _check_routes_shape(routes: Any, tokens: int, shape: ModelShape) -> None:
    """Check that ``routes`` are routes of so many tokens through a model of this shape."""
    if routes is None:
        raise _InvalidResult("no routed experts came back, which were asked for")
    if not isinstance(routes, np.ndarray) or routes.dtype not in ROUTE_DTYPES or routes.ndim != 3:
        raise _InvalidResult("routed experts are no uint8 or int16 [tokens, layers, top_k]")

    expected = (tokens, shape.layers or routes.shape[1], shape.top_k or routes.shape[2])
    if routes.shape != expected:
        raise _InvalidResult(f"routed experts have the shape {routes.shape}, expected {expected}")

    if shape.experts is not None:
        try:
            check_routes(routes, shape.experts)
        except RuntimeError as error:
            raise _InvalidResult(str(error)) from None


def check_routes(routes: np.ndarray, experts: int) -> np.ndarray:
    """Return ``routes``, whole numbers [tokens, layers, top_k], if a router can have chosen them.

    Raises RuntimeError naming the layer that made no real choice: one that has an expert twice, as
    in a buffer that nobody filled (all zeros), or a number that is none of ``experts``. "Not known"
    is no choice either.
    """
    if routes.dtype == np.uint8 and experts > unknown_route(routes.dtype):
        raise RuntimeError(
            f"routed experts came as uint8, which cannot tell {experts} experts and "
            f'"not known" apart; expected {route_dtype(experts)}'
        )

    # Sorted, experts chosen twice are neighbours, and the first and last say whether all exist.
    ordered = np.sort(routes, axis=-1)
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    outside = (ordered[..., 0] < 0) | (ordered[..., -1] >= experts)
    invalid = np.argwhere(repeated | outside)

    if len(invalid):
        token, layer = invalid[0]
        raise RuntimeError(
            f"routed experts of layer {layer} were not recorded or are no expert numbers: "
            f"{routes[token, layer]} of {experts} at token {token}. Its router did not run as "
            "expected. In SGLang the triton_kernel MoE backend does this; triton does not"
        )
    return routes
