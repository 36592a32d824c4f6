"""Interface of rollout engines: token ids in, token ids out.

``check_result`` checks the results of engines.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from megatron_gptoss.routes import ROUTE_DTYPES, route_dtype, unknown_route
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.infrastructure import EngineError

if TYPE_CHECKING:
    # Configurations import this package, and torch takes seconds to import.
    import torch


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one continuation."""

    max_new_tokens: int
    temperature: float = 1.0
    """Divisor of the logits. 0 means greedy."""
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Seed of the continuation. Equal seed, weights and prompt give equal tokens in every batch."""


type TokenChoice = tuple[int, float]
"""A token id and its log-prob, in nats."""


@dataclass(frozen=True)
class NewTokens:
    """Tokens that an engine has just sampled for a request. All lists have equal lengths."""

    ids: list[int]
    log_probs: list[float]
    """Log-probs of ``ids``, as in ``GenerateResult.output_log_probs``."""
    top_log_probs: list[list[TokenChoice]]
    """Most likely tokens of each position, the most likely first. Empty lists if not requested."""


class TokenMatcher(Protocol):
    """Constraint on one continuation: the tokens that may come next."""

    def allowed(self) -> np.ndarray:
        """Return the tokens that may come next: bool [vocab]. At least one is True.

        Raises:
            RuntimeError: the constraint cannot be evaluated.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Append tokens. Raises RuntimeError if they are not allowed."""
        ...


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt to continue."""

    request_id: str
    """Unique id. The agent loop uses ``EPISODE/turn/number of tokens of the turn so far``."""
    input_ids: list[int]
    sampling: SamplingParams
    return_routed_experts: bool = False
    routes_start: int = 0
    """Index of the first token whose experts are returned: at most len(input_ids) - 1.

    The caller has those of earlier tokens. Without this, every turn of an episode would return the
    experts of the whole episode.
    """
    on_begin: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """Called on the event loop when the request leaves the engine's queue.

    The time limit of its episode starts at this moment. Engines that cannot detect it call this
    function with the first tokens.
    """
    on_tokens: Callable[[NewTokens], None] | None = field(default=None, compare=False, repr=False)
    """Called on the event loop with the tokens of the result, as they are sampled and before the
    result is returned. Engines that cannot stream ignore it."""
    top_log_probs: int = 0
    """Number of most likely tokens that ``on_tokens`` gets for each position."""
    new_matcher: Callable[[], TokenMatcher] | None = field(default=None, compare=False, repr=False)
    """Returns a constraint on the continuation before its first token. None to sample freely. Only
    for engines with ``ConstrainsTokens``."""

    @property
    def episode(self) -> str:
        """Episode of the request. Each of its requests continues the tokens of the previous one."""
        # From the right, because the name of an episode may contain slashes.
        return self.request_id.rsplit("/", 2)[0]

    @property
    def group(self) -> str:
        """Task of the episode. Episodes of a task begin with the same prompt."""
        task, _, _ = self.episode.rpartition("/")
        return task or self.episode


@dataclass
class GenerateResult:
    """A continuation. ``output_ids`` and ``output_log_probs`` have equal lengths."""

    output_ids: list[int]
    """Sampled tokens, including the stop token if one was sampled."""
    output_log_probs: list[float]
    """Log-probs of the sampled tokens, in nats.

    They belong to the distribution at the sampling temperature, before top-p truncation and before
    a constraint (``GenerateRequest.new_matcher``).
    """
    finish_reason: FinishReason
    weight_versions: list[WeightVersionSpan] = field(default_factory=list)
    """Weight versions as spans over ``output_ids``. Empty from engines without versions."""
    routed_experts: np.ndarray | None = None
    """Experts of the tokens from ``routes_start`` of the request to the last but one, which was the
    last input: [len(input_ids) + len(output_ids) - 1 - routes_start, layers, top_k].

    uint8 or int16, as ``megatron_gptoss.routes.route_dtype`` returns for the model. None if not
    requested, or if there are no tokens.
    """
    cached_tokens: int = 0
    """Number of prompt tokens that were in the engine's prefix cache."""
    request_id: str | None = None
    """Id of the request. None from engines that do not return it."""


class RolloutEngine(Protocol):
    """Interface of the agent loop to an engine, or to a client of servers."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one continuation. Concurrent requests are batched."""

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Return log p(input_ids[i] | input_ids[:i]) for i >= 1.

        Returns:
            len(input_ids) - 1 natural logs.
        """

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all. Each returns its partial tokens with FinishReason.ABORT."""

    async def close(self) -> None:
        """Release all resources. The engine cannot be used afterwards."""


@runtime_checkable
class ConstrainsTokens(Protocol):
    """An engine that applies ``GenerateRequest.new_matcher``. Other engines would ignore it."""

    constrains_tokens: bool
    """True if the engine applies constraints."""


def constrains_tokens(engine: RolloutEngine) -> bool:
    """Return True if an engine applies ``GenerateRequest.new_matcher``."""
    return isinstance(engine, ConstrainsTokens) and engine.constrains_tokens


@runtime_checkable
class WeightHolder(Protocol):
    """An engine in the worker's process, which holds the model and receives its weights."""

    async def sync_weights(
        self,
        named_tensors: "Iterable[tuple[str, torch.Tensor]]",
        version: int,
    ) -> None:
        """Replace all weights. Running requests are aborted.

        In a run with ``quantization`` the embedded engine receives experts as blocks and scales.

        Args:
            named_tensors: (Hugging Face name, tensor in the shape of this name). Floats of any
                dtype, and uint8 for blocks and scales.
            version: version of the weights.

        Raises:
            WeightMismatchError: if tensors are missing or unknown. The message names them. The weights
                are then unchanged.
        """


@runtime_checkable
class ServerClient(Protocol):
    """A client of servers, which receive weights through another path."""

    def set_min_version(self, version: int) -> None:
        """Use only tokens that weights ``version`` or later have sampled."""


def weight_holder(engine: RolloutEngine) -> WeightHolder:
    """Return an engine as one that receives weights.

    Raises:
        TypeError: if it is a client of servers.
    """
    # ``isinstance`` checks only that the methods exist, not their signatures.
    if isinstance(engine, WeightHolder):
        return engine
    raise TypeError(
        f"rollout.engine: {type(engine).__name__} has no sync_weights, so its backend cannot "
        "call workers.load_weights. For a client of servers, call workers.set_min_version"
    )


def server_client(engine: RolloutEngine) -> ServerClient:
    """Return an engine as a client of servers.

    Raises:
        TypeError: if it holds the model.
    """
    if isinstance(engine, ServerClient):
        return engine
    raise TypeError(
        f"rollout.engine: {type(engine).__name__} has no set_min_version, so its backend cannot "
        "call workers.set_min_version. For an engine that holds the model, call "
        "workers.load_weights"
    )


@runtime_checkable
class Mxfp4Engine(Protocol):
    """An engine that may hold experts in MXFP4 and computes their digests."""

    async def mxfp4_digests(self) -> dict[str, str]:
        """Return ``converters.mxfp4_tensors.Digests`` of the experts that came in MXFP4.

        Empty if none did.

        Raises:
            RuntimeError: if the values of a tensor differ from its bits. The message names it.
        """


@runtime_checkable
class MeasuresRounding(Protocol):
    """An engine that can compute without the rounding of its dtype."""

    async def rounding_error(self, input_ids: list[int]) -> float | None:
        """Return the effect of rounding on the log-probs of ``score`` at temperature 1.

        Returns:
            Mean |log-prob in the engine's dtype - log-prob in fp32| with equal weights, in nats per
            token. None if it cannot be measured.
        """


POSITIVE_LOG_PROB = 1e-3
"""Largest valid log-prob in nats.

Rounding can lift the log-prob of a token with probability 1 above 0.
"""


@dataclass(frozen=True)
class ModelShape:
    """Shape of the model that checks of results need. Unknown fields are None."""

    vocabulary_size: int
    layers: int | None = None
    top_k: int | None = None
    experts: int | None = None


def check_result(request: GenerateRequest, result: GenerateResult, shape: ModelShape) -> None:
    """Check that ``result`` is a possible result of ``request``.

    Engines are not trusted: the trainer would use a wrong number as if the policy had sampled it.

    Args:
        request: request to the engine.
        result: result of the engine.
        shape: shape of the model.

    Raises:
        EngineError: if the result is impossible.
    """
    try:
        if result.request_id not in (None, request.request_id):
            raise _InvalidResultError(
                f"the engine returned the result of another request ({result.request_id})"
            )
        _check_tokens(request.sampling, result, shape.vocabulary_size)
        _check_versions(result)
        if request.return_routed_experts and result.output_ids:
            tokens = len(request.input_ids) + len(result.output_ids) - 1 - request.routes_start
            _check_routes_shape(result.routed_experts, tokens, shape)
    except _InvalidResultError as fault:
        raise EngineError(request.request_id, str(fault)) from None


class _InvalidResultError(Exception):
    """Reason why a result is impossible."""


def _check_tokens(sampling: SamplingParams, result: GenerateResult, vocabulary_size: int) -> None:
    ids = result.output_ids
    log_probs = result.output_log_probs
    reason = result.finish_reason

    # The agent loop sets all other reasons, such as a timeout.
    if reason not in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
        raise _InvalidResultError(f"the finish reason {reason!r} is unknown")
    if len(ids) > sampling.max_new_tokens:
        raise _InvalidResultError(
            f"the engine returned {len(ids)} tokens, but max_new_tokens is "
            f"{sampling.max_new_tokens}"
        )
    if len(log_probs) != len(ids):
        raise _InvalidResultError(
            f"the engine returned {len(log_probs)} log-probs for {len(ids)} tokens"
        )

    # Only a request that was aborted before its first token may have no tokens.
    if not ids:
        if reason is not FinishReason.ABORT:
            ending = f"the finish reason is {reason.value!r}"
            raise _InvalidResultError(f"the engine returned no token, but {ending}")
        return

    if (fault := fault_in_ids(ids, vocabulary_size)) is not None:
        raise _InvalidResultError(fault)
    if (fault := fault_in_log_probs(log_probs)) is not None:
        raise _InvalidResultError(fault)
    # Tokens behind the stop token would be trained on as a part of the turn.
    if any(token in sampling.stop_token_ids for token in ids[:-1]):
        raise _InvalidResultError("the engine returned tokens after a stop token")


def fault_in_ids(ids: list[int], vocabulary_size: int) -> str | None:
    """Return an error text for the first invalid token id. None if all are valid.

    Args:
        ids: at least one id.
        vocabulary_size: exclusive upper bound of the ids.
    """
    array = np.asarray(ids)
    # A list with a float, None or text becomes an array of another kind.
    if array.dtype.kind not in "iu" or array.ndim != 1:
        return f"token ids are not integers: {ids[:3]}"

    outside = (array < 0) | (array >= vocabulary_size)
    if outside.any():
        position = int(outside.argmax())
        return (
            f"token {position} is {array[position]}, but the vocabulary has {vocabulary_size} ids"
        )
    return None


def fault_in_log_probs(log_probs: list[float]) -> str | None:
    """Return an error text for the first invalid log-prob. None if all of them are valid."""
    # Checked first, because numpy silently converts None and numeric strings to floats.
    for position, log_prob in enumerate(log_probs):
        # The first comparison takes a tenth of the time of the second, and nearly always suffices.
        if type(log_prob) is not float and not isinstance(log_prob, Real):
            return f"the log-prob of token {position} is {log_prob!r}, not a number"

    array = np.asarray(log_probs, dtype=np.float64)
    is_log_prob = np.isfinite(array) & (array <= POSITIVE_LOG_PROB)
    if not is_log_prob.all():
        # argmin of booleans is the first False.
        position = int(is_log_prob.argmin())
        return (
            f"the log-prob of token {position} is {log_probs[position]}. The weights are "
            "damaged, or a value overflows"
        )
    return None


def _check_versions(result: GenerateResult) -> None:
    """Check that the spans of weight versions are adjacent and cover all tokens."""
    # Engines without versions return no spans.
    if not result.weight_versions:
        return

    end = 0
    for span in result.weight_versions:
        if span.start != end or span.end <= span.start:
            raise _InvalidResultError(
                f"weight_versions {result.weight_versions} has a gap or an overlap between spans"
            )
        end = span.end
    if end != len(result.output_ids):
        raise _InvalidResultError(
            f"weight_versions covers {end} tokens, but the engine returned {len(result.output_ids)}"
        )


def _check_routes_shape(routes: Any, tokens: int, shape: ModelShape) -> None:
    """Check that ``routes`` are expert indices of ``tokens`` tokens for a model of this shape."""
    # Without routes, a trainer with routing replay would silently use its own routes.
    if routes is None:
        raise _InvalidResultError(
            "the engine returned no routed experts, but the request asked for them"
        )
    if not isinstance(routes, np.ndarray) or routes.dtype not in ROUTE_DTYPES or routes.ndim != 3:
        actual = f"{getattr(routes, 'dtype', type(routes).__name__)} {list(np.shape(routes))}"
        raise _InvalidResultError(
            f"routed experts are {actual}, expected uint8 or int16 [tokens, layers, top_k]"
        )

    # An unknown size fits every array.
    expected = (tokens, shape.layers or routes.shape[1], shape.top_k or routes.shape[2])
    if routes.shape != expected:
        raise _InvalidResultError(
            f"routed experts have the shape {routes.shape}, expected {expected}"
        )

    if shape.experts is not None:
        try:
            check_routes(routes, shape.experts)
        except RuntimeError as error:
            raise _InvalidResultError(str(error)) from None


def check_routes(routes: np.ndarray, experts: int) -> np.ndarray:
    """Check that a router can have chosen these experts, and return them.

    A choice is invalid if it contains an expert twice, as in an unfilled buffer (all zeros), a
    number outside [0, experts), or the number for "not known".

    Args:
        routes: integers [tokens, layers, top_k].
        experts: number of experts.

    Raises:
        RuntimeError: if a choice is invalid. The message names the layer.
    """
    if routes.dtype == np.uint8 and experts > unknown_route(routes.dtype):
        raise RuntimeError(
            f"routed experts are uint8, but with {experts} experts uint8 has no free value that marks "
            f"unknown routes. Return {route_dtype(experts)}"
        )

    # Compare pairs instead of sorting, which takes ten times as long for the few experts of a
    # choice.
    is_invalid = np.zeros(routes.shape[:-1], dtype=bool)
    for first, second in combinations(range(routes.shape[-1]), 2):
        is_invalid |= routes[..., first] == routes[..., second]
    if routes.size > 0 and (routes.min() < 0 or routes.max() >= experts):
        is_invalid |= ((routes < 0) | (routes >= experts)).any(axis=-1)

    if is_invalid.any():
        token, layer = np.argwhere(is_invalid)[0]
        raise RuntimeError(
            f"routed experts of layer {layer} were not recorded or are invalid: "
            f"{routes[token, layer]} of {experts} experts at token {token}. The engine's router "
            "did not run. In SGLang this happens with --moe-runner-backend triton_kernel. Use "
            "triton"
        )
    return routes
