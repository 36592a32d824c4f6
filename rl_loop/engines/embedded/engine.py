"""The embedded rollout engine: a causal language model of transformers in this process.

One thread owns the model. Steps and commands queue for it, so a command takes effect between two
steps, and the event loop, with the tool calls that run on it, is never blocked.
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
from rl_loop.engines.embedded.scheduler import RunningSequence, Scheduler
from rl_loop.engines.protocol import GenerateRequest, GenerateResult
from rl_loop.weight_sync.expected import ExpectedTensors
from rl_loop.weight_sync.source import WeightMismatch

MAX_REPORTED_FAULTS = 20
"""Tensors that an error about weights names."""

AttentionInterface.register(ATTENTION_NAME, row_cache_attention)


class TransformersEngine:
    """Implements RolloutEngine with a model of transformers and continuous batching: GPT-OSS, Llama
    or Qwen2.

    The engine takes the model over: nobody else may run or change it.
    """

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
            model: the model, which the engine takes over.
            max_batch_size: number of sequences that are decoded together. The same number of
                finished ones keep their keys and values for the next turn.
            deterministic: whether to decode one sequence at a time and keep nothing.
            weight_version: version of the model's weights. None if they only reserve memory: the
                engine then refuses to compute before ``sync_weights``.
        """
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, not {max_batch_size}")

        model.eval().requires_grad_(False)
        model.set_attn_implementation(ATTENTION_NAME)
        self._has_experts = hasattr(model.config, "num_local_experts")
        if self._has_experts and model.lm_head.weight.dtype == torch.float64:
            # The default, torch's grouped matrix product, has no fp64 kernel.
            model.set_experts_implementation("eager")

        self._model = model
        if deterministic:
            self._scheduler = Scheduler(model, max_batch_size=1, reuses_prefixes=False)
        else:
            self._scheduler = Scheduler(model, max_batch_size)
        self._scheduler.weight_version = weight_version
        self._thread = ThreadPoolExecutor(1, "rollout-engine")
        self._closed = False
        self._packed: dict[str, torch.Tensor] = {}
        """Experts in MXFP4 as they came, by stored name."""

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Self:
        """Build a model on the CPU with random weights, for ``sync_weights`` to replace.

        ``options`` are the constructor's.
        """
        model_config = copy.deepcopy(config)  # the engine changes it
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
        return cls(model, weight_version=None, **options)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one continuation; requests made concurrently are batched.

        Cancelling frees the request's place. A request that is aborted before it starts has no
        outputs and no routed experts.

        Raises:
            ValueError: for a request that cannot run.
            RuntimeError: with the cause, if the model failed; if the engine has no weights yet.
        """
        name = f"request {request.request_id}"
        self._check_weights(name)
        self._check_tokens(request.input_ids, name)
        if request.return_routed_experts and not self._has_experts:
            raise ValueError(f"{name}: asks for routed experts of a model without experts")
        total = len(request.input_ids) + request.sampling.max_new_tokens
        limit = self._model.config.max_position_embeddings
        if total > limit:
            raise ValueError(
                f"{name}: prompt and max_new_tokens make {total} tokens, the model has {limit} positions"
            )

        # on_begin belongs to the event loop; the sequence leaves the queue on the engine's thread.
        loop = asyncio.get_running_loop()

        def begin() -> None:
            if request.on_begin is not None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(request.on_begin)

        sequence = RunningSequence(request, on_begin=begin)
        answer = asyncio.wrap_future(sequence.future)
        try:
            await self._call(lambda: self._add(sequence))
            return await answer
        finally:
            # If our task is cancelled, the next step sees it here and frees the place.
            answer.cancel()

    def _check_weights(self, name: str) -> None:
        """Raise RuntimeError before the first weights: random tokens must not look like a policy's."""
        if self._scheduler.weight_version is None:
            raise RuntimeError(f"{name}: the engine has no weights yet. Call sync_weights first.")

    def _add(self, sequence: RunningSequence) -> None:
        was_idle = not self._scheduler.has_work
        self._scheduler.add(sequence)
        # While there is work, each step submits the next one: a second chain must not begin.
        if was_idle:
            self._thread.submit(self._step)

    def _step(self) -> None:
        """Run one step; the next one queues behind the commands that came meanwhile."""
        try:
            self._scheduler.step()
        except Exception as error:  # whatever the model raises belongs to those who wait for it
            self._scheduler.fail(error)
        if self._scheduler.has_work:
            self._thread.submit(self._step)

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Compute log p(input_ids[i] | input_ids[:i]) for i >= 1, between two steps.

        Returns len(input_ids) - 1 natural logs.
        """
        self._check_weights("score")
        self._check_tokens(input_ids, "score")
        if len(input_ids) == 1:
            return []
        return await self._call(lambda: self._scheduler.score(list(input_ids), temperature))

    async def rounding_error(self, input_ids: list[int]) -> float | None:
        """Return how far the rounding of the engine's dtype moves the log-probs of ``score``.

        Returns the mean absolute difference to fp32 with the same weights, in nats per token; None
        if the device has no room for the weights in fp32.
        """
        self._check_tokens(input_ids, "rounding_error")
        return await self._call(lambda: self._rounding_error(list(input_ids)))

    def _rounding_error(self, tokens: list[int]) -> float | None:
        rounded = self._scheduler.score(tokens, temperature=1.0)
        held = {parameter: parameter.data for parameter in self._model.parameters()}
        try:
            for parameter, data in held.items():
                parameter.data = data.float()
            exact = self._scheduler.score(tokens, temperature=1.0)
        except torch.OutOfMemoryError:
            return None
        finally:
            for parameter, data in held.items():
                parameter.data = data
        differences = [abs(a - b) for a, b in zip(rounded, exact, strict=True)]
        return sum(differences) / len(differences)

    async def abort(self, request_id: str | None = None) -> None:
        """Stop one request, or all, waiting ones too.

        A request that is unknown or has ended is no error.
        """
        await self._call(lambda: self._scheduler.abort(request_id))

    async def sync_weights(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
    ) -> None:
        """Replace all weights, by Hugging Face name; all requests are aborted.

        Tensors are copied in place and cast to the engine's dtype. Experts' matrices may come in
        MXFP4, as blocks and scales: the engine keeps these and computes with their values.

        Raises WeightMismatch listing missing, unknown, repeated and wrongly shaped tensors. Then
        nothing has changed.
        """
        named = list(named_tensors)
        await self._call(lambda: self._replace_weights(named, version))

    def _replace_weights(self, named: list[tuple[str, torch.Tensor]], version: int) -> None:
        # Everything is compared before anything is written. Tied weights appear once.
        parameters = dict(self._model.named_parameters())
        new_weights = dict(named)
        shapes = _expected_shapes(new_weights, parameters)
        faults = ExpectedTensors(shapes, "the rollout engine's model").faults(named)
        if faults:
            shown = "; ".join(faults[:MAX_REPORTED_FAULTS])
            if len(faults) > MAX_REPORTED_FAULTS:
                shown += f"; and {len(faults) - MAX_REPORTED_FAULTS} more"
            raise WeightMismatch(
                f"weights {version} do not fit the rollout engine's model, nothing was changed: {shown}"
            )

        self._scheduler.abort(None)
        self._scheduler.drop_cache()
        self._packed = {}
        with torch.no_grad():
            for name, parameter in parameters.items():
                if name in new_weights:
                    parameter.copy_(new_weights[name])
                else:
                    # What was sent may be memory of somebody else.
                    packed = {key: new_weights[key].clone() for key in stored_names(name)}
                    self._packed |= packed
                    parameter.copy_(_values(*packed.values()))
        self._scheduler.weight_version = version

    async def packed_digests(self) -> Digests:
        """Compute digests of the experts that came in MXFP4; empty if none did.

        Raises RuntimeError naming a tensor whose values are not those of its bits.
        """
        return await self._call(self._packed_digests)

    def _packed_digests(self) -> Digests:
        for name, parameter in self._model.named_parameters():
            blocks_name, scales_name = stored_names(name)
            if blocks_name not in self._packed:
                continue
            values = _values(self._packed[blocks_name], self._packed[scales_name])
            if not torch.equal(parameter, values.to(parameter.dtype)):
                raise RuntimeError(f"{name}: the engine computes with other values than its bits")
        return stack_digests(self._packed.items())

    async def close(self) -> None:
        """Stop the thread. Requests under way and later ones fail with RuntimeError."""
        if self._closed:
            return
        self._closed = True
        error = RuntimeError("the rollout engine was closed")
        # Queued behind the step that runs: the model is not touched by two threads.
        failing = self._thread.submit(self._scheduler.fail, error)
        await asyncio.wrap_future(failing)
        self._thread.shutdown()

    async def _call[T](self, function: Callable[[], T]) -> T:
        """Run ``function`` on the thread that owns the model."""
        if self._closed:
            raise RuntimeError("the rollout engine is closed")
        return await asyncio.wrap_future(self._thread.submit(function))

    def _check_tokens(self, tokens: list[int], name: str) -> None:
        vocab_size = self._model.config.vocab_size
        if not tokens:
            raise ValueError(f"{name}: input_ids is empty")
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError(f"{name}: input_ids holds ids outside [0, {vocab_size})")


def _values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what experts' matrices in MXFP4 stand for, as Hugging Face has them: [E, in, out]."""
    return mxfp4.dequantize(blocks, scales).mT


def _expected_shapes(
    tensors: dict[str, torch.Tensor], parameters: dict[str, torch.nn.Parameter]
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor to expect: of experts of which any bits came in MXFP4, those
    of blocks and scales."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape)
        if any(stored_name in tensors for stored_name in stored_names(name)):
            expected |= mxfp4_shapes(name, shape)
        else:
            expected[name] = shape
    return expected
