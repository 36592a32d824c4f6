"""Embedded rollout engine: a causal language model of transformers in this process.

One thread owns the model. Steps and commands are queued for it, so a command runs between two
steps. The event loop, which also runs tool calls, is never blocked.
"""

import asyncio
import copy
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from converters.hf_layouts import mxfp4_shapes
from converters.mxfp4_tensors import Digests, stack_digests, stored_names
from gptoss_kernels import mxfp4
from rl_loop.engines.embedded.kv_cache import ATTENTION_NAME, row_cache_attention
from rl_loop.engines.embedded.scheduler import RunningSequence, SequenceScheduler
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, NewTokens
from rl_loop.weight_sync.expected import ExpectedTensors
from rl_loop.weight_sync.source import WeightMismatchError

MAX_REPORTED_FAULTS = 20
"""Maximum number of tensors that an error about weights names."""

# On import, because ``set_attn_implementation`` accepts only registered names.
AttentionInterface.register(ATTENTION_NAME, row_cache_attention)


class TransformersEngine:
    """RolloutEngine that runs GPT-OSS, Llama or Qwen2 of transformers with continuous batching.

    The engine owns the model: other code must not run or change it.
    """

    constrains_tokens = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_batch_size: int = 64,
        deterministic: bool = False,
        weight_version: int | None = 0,
    ) -> None:
        """Prepare ``model`` for generation.

        Args:
            model: model that the engine will own.
            max_batch_size: number of sequences that are decoded together. Keys and values of an
                equal number of finished sequences are kept for their next turn.
            deterministic: whether to decode one sequence at a time and keep no keys and values.
            weight_version: version of the model's weights. None if the weights are placeholders:
                the engine then does not compute before ``sync_weights``.

        Raises:
            ValueError: if ``max_batch_size`` is below 1.
        """
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1 (got {max_batch_size})")

        model.eval().requires_grad_(False)
        model.set_attn_implementation(ATTENTION_NAME)
        self._has_experts = hasattr(model.config, "num_local_experts")
        if self._has_experts and model.lm_head.weight.dtype == torch.float64:
            # The default implementation, torch's grouped matrix product, does not support fp64.
            model.set_experts_implementation("eager")

        self._model = model
        if deterministic:
            self._scheduler = SequenceScheduler(model, max_batch_size=1, reuses_prefixes=False)
        else:
            self._scheduler = SequenceScheduler(model, max_batch_size)
        self._scheduler.weight_version = weight_version
        self._thread = ThreadPoolExecutor(1, "rollout-engine")
        self._closed = False
        self._mxfp4_tensors: dict[str, torch.Tensor] = {}
        """MXFP4 blocks and scales of the experts as they were sent, by stored name."""

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Self:
        """Build a model on the CPU with random weights, which ``sync_weights`` replaces.

        Args:
            config: transformers' configuration of the model.
            dtype: dtype of the weights.
            options: options of the constructor.
        """
        model_config = copy.deepcopy(config)  # the engine changes it
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
        return cls(model, weight_version=None, **options)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one continuation. Concurrent requests are batched.

        Cancelling this call frees the request's cache row. A request that is aborted before it
        starts has no outputs and no expert indices.

        Raises:
            ValueError: if the request cannot run.
            RuntimeError: if the model failed (the error has the cause), or if there are no weights
                yet.
        """
        name = f"request {request.request_id}"
        self._check_weights(name)
        self._check_tokens(request.input_ids, name)
        if request.return_routed_experts and not self._has_experts:
            raise ValueError(f"{name} asks for routed experts, but the model has no experts")
        # Rotary positions have no end, so the model would continue without an error, but badly.
        total = len(request.input_ids) + request.sampling.max_new_tokens
        limit = self._model.config.max_position_embeddings
        if total > limit:
            raise ValueError(
                f"{name}: prompt and max_new_tokens are {total} tokens, but the model has "
                f"{limit} positions"
            )

        # Callbacks must run on the event loop, but the engine has its own thread.
        loop = asyncio.get_running_loop()

        def begin() -> None:
            if request.on_begin is not None:
                with suppress(RuntimeError):  # the loop is closed, so no caller waits
                    loop.call_soon_threadsafe(request.on_begin)

        def add(tokens: NewTokens) -> None:
            if request.on_tokens is not None:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(request.on_tokens, tokens)

        sequence = RunningSequence(
            request, on_begin=begin, on_tokens=add if request.on_tokens is not None else None
        )
        answer = asyncio.wrap_future(sequence.future)
        try:
            await self._call(lambda: self._add(sequence))
            return await answer
        finally:
            # If this task is cancelled, the next step sees it here and frees the row.
            answer.cancel()

    def _check_weights(self, name: str) -> None:
        """Raise RuntimeError if there are no weights yet: random tokens would look valid."""
        if self._scheduler.weight_version is None:
            raise RuntimeError(f"{name}: the engine has no weights yet. Call sync_weights first")

    def _add(self, sequence: RunningSequence) -> None:
        was_idle = not self._scheduler.has_work
        self._scheduler.add(sequence)
        # While there is work, each step submits the next one. A second chain must not begin.
        if was_idle:
            self._thread.submit(self._step)

    def _step(self) -> None:
        """Run one step. The next step is queued behind the commands that came during this one."""
        try:
            self._scheduler.step()
        except Exception as error:  # callers of ``generate`` receive every error of the model
            self._scheduler.fail(error)
        if self._scheduler.has_work:
            self._thread.submit(self._step)

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Return log p(input_ids[i] | input_ids[:i]) for i >= 1, computed between two steps.

        Returns:
            len(input_ids) - 1 natural logs.

        Raises:
            ValueError: if ``input_ids`` is empty or has unknown ids.
            RuntimeError: if there are no weights yet.
        """
        self._check_weights("score")
        self._check_tokens(input_ids, "score")
        if len(input_ids) == 1:
            return []
        return await self._call(lambda: self._scheduler.score(list(input_ids), temperature))

    async def rounding_error(self, input_ids: list[int]) -> float | None:
        """Return the effect of the dtype's rounding on the log-probs of ``score``.

        Returns:
            Mean absolute difference to fp32 with equal weights, in nats per token. None if the fp32
            weights do not fit in the device's memory.
        """
        self._check_tokens(input_ids, "rounding_error")
        return await self._call(lambda: self._rounding_error(list(input_ids)))

    def _rounding_error(self, tokens: list[int]) -> float | None:
        """Return the mean difference of log-probs from fp32 weights, None if memory is too small."""
        rounded = self._scheduler.score(tokens, temperature=1.0)
        # Only the data is exchanged. A second model would need twice the memory.
        original = {parameter: parameter.data for parameter in self._model.parameters()}
        try:
            for parameter, data in original.items():
                parameter.data = data.float()
            exact = self._scheduler.score(tokens, temperature=1.0)
        except torch.OutOfMemoryError:
            return None
        finally:
            for parameter, data in original.items():
                parameter.data = data
        differences = [abs(a - b) for a, b in zip(rounded, exact, strict=True)]
        return sum(differences) / len(differences)

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all if ``request_id`` is None, including waiting ones.

        Unknown and finished requests are ignored.
        """
        await self._call(lambda: self._scheduler.abort(request_id))

    async def sync_weights(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
    ) -> None:
        """Replace all weights, and abort all requests.

        Tensors are copied in place and cast to the engine's dtype. Experts' matrices may be MXFP4
        blocks and scales: the engine keeps them and computes with their values.

        Args:
            named_tensors: (Hugging Face name, tensor in the shape of this name). Floats of any
                dtype, and uint8 for blocks and scales.
            version: version of the weights.

        Raises:
            WeightMismatchError: if tensors are missing, unknown, repeated or have a wrong shape. The
                message lists them. The weights are then unchanged.
        """
        # All tensors are needed at once, because none is written before all are checked.
        tensors = list(named_tensors)
        await self._call(lambda: self._replace_weights(tensors, version))

    def _replace_weights(self, tensors: list[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy all weights into the model, or none if one of them does not fit."""
        # Check everything before writing anything. named_parameters lists tied weights once.
        parameters = dict(self._model.named_parameters())
        new_weights = dict(tensors)
        shapes = _expected_shapes(new_weights, parameters)
        faults = ExpectedTensors(shapes, "the rollout engine's model").faults(tensors)
        if faults:
            shown = "; ".join(faults[:MAX_REPORTED_FAULTS])
            if len(faults) > MAX_REPORTED_FAULTS:
                shown += f"; and {len(faults) - MAX_REPORTED_FAULTS} more"
            raise WeightMismatchError(
                f"weights {version} do not fit the model of the rollout engine, which keeps its earlier "
                f"weights. Faults: {shown}"
            )

        # All requests first, because the cache can be dropped only if no sequence is running.
        self._scheduler.abort(None)
        self._scheduler.drop_cache()
        self._mxfp4_tensors = {}
        with torch.no_grad():
            for name, parameter in parameters.items():
                if name in new_weights:
                    parameter.copy_(new_weights[name])
                else:
                    # Cloned, because the tensors may use memory that their owner overwrites.
                    packed = {key: new_weights[key].clone() for key in stored_names(name)}
                    self._mxfp4_tensors |= packed
                    parameter.copy_(_values(*packed.values()))
        self._scheduler.weight_version = version

    async def mxfp4_digests(self) -> Digests:
        """Return digests of the experts that came in MXFP4. Empty if none did.

        Raises:
            RuntimeError: if the values of a tensor differ from its MXFP4 bits. The message names
                it.
        """
        return await self._call(self._mxfp4_digests)

    def _mxfp4_digests(self) -> Digests:
        """Compare values with MXFP4 bits, and return digests of the bits."""
        for name, parameter in self._model.named_parameters():
            blocks_name, scales_name = stored_names(name)
            if blocks_name not in self._mxfp4_tensors:
                continue
            # Digests cover the bits, but the engine computes with the values.
            values = _values(self._mxfp4_tensors[blocks_name], self._mxfp4_tensors[scales_name])
            if not torch.equal(parameter, values.to(parameter.dtype)):
                raise RuntimeError(
                    f"{name}: the engine computes with values that differ from the MXFP4 blocks and "
                    "scales that it received"
                )
        return stack_digests(self._mxfp4_tensors.items())

    async def close(self) -> None:
        """Stop the thread. Running and later requests fail with RuntimeError."""
        if self._closed:
            return
        self._closed = True
        error = RuntimeError("the rollout engine was closed")
        # Queued behind the running step, because two threads must not use the model.
        failing = self._thread.submit(self._scheduler.fail, error)
        await asyncio.wrap_future(failing)
        self._thread.shutdown()

    async def _call[T](self, function: Callable[[], T]) -> T:
        """Run ``function`` on the thread that owns the model and return its result."""
        if self._closed:
            raise RuntimeError("the rollout engine is closed")
        return await asyncio.wrap_future(self._thread.submit(function))

    def _check_tokens(self, tokens: list[int], name: str) -> None:
        # Within the model an unknown id would be an error of the whole batch.
        vocab_size = self._model.config.vocab_size
        if not tokens:
            raise ValueError(f"{name}: input_ids is empty")
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError(f"{name}: input_ids contains ids outside [0, {vocab_size})")


def _values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values of MXFP4 experts' matrices in Hugging Face's layout, [experts, in, out]."""
    return mxfp4.dequantize(blocks, scales).mT


def _expected_shapes(
    tensors: dict[str, torch.Tensor], parameters: dict[str, torch.nn.Parameter]
) -> dict[str, tuple[int, ...]]:
    """Return {name: expected shape} of every tensor.

    Experts of which any stored tensor came have the shapes of MXFP4 blocks and scales.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape)
        if any(stored_name in tensors for stored_name in stored_names(name)):
            expected |= mxfp4_shapes(name, shape)
        else:
            expected[name] = shape
    return expected
