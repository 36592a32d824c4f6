"""The embedded rollout engine: transformers' GptOssForCausalLM with continuous batching, in this process.

One thread owns the model. Steps and commands queue for it, so commands take effect between two steps, and the event
loop, and the tool calls on it, go on meanwhile."""

import asyncio
import copy
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from rl_loop.engines.embedded.kv_cache import ATTENTION_NAME, row_cache_attention
from rl_loop.engines.embedded.scheduler import BatchedGeneration, RunningSequence
from rl_loop.engines.protocol import GenerateRequest, GenerateResult

AttentionInterface.register(ATTENTION_NAME, row_cache_attention)


class TransformersEngine:
    """RolloutEngine around a GptOssForCausalLM, which it takes over: nobody else may run or change that model."""

    def __init__(self, model: GptOssForCausalLM, *, max_batch_size: int = 64) -> None:
        """``max_batch_size``: sequences decoded together; as many finished ones keep their keys and values for the next
        turn."""
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, not {max_batch_size}")
        model.eval().requires_grad_(False)
        model.set_attn_implementation(ATTENTION_NAME)
        if model.lm_head.weight.dtype == torch.float64:
            model.set_experts_implementation("eager")  # torch's grouped matrix product, the default, knows no fp64
        self._model = model
        self._generation = BatchedGeneration(model, max_batch_size)
        self._thread = ThreadPoolExecutor(1, "rollout-engine")
        self._closed = False

    @classmethod
    def from_config(cls, config: GptOssConfig, *, dtype: torch.dtype = torch.float32, **options: Any) -> Self:
        """On the CPU, with random weights for ``sync_weights`` to replace; ``options`` are the constructor's."""
        own_config = copy.deepcopy(config)  # the engine changes it
        return cls(AutoModelForCausalLM.from_config(own_config, dtype=dtype), **options)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one continuation; requests made concurrently are batched.

        Raises ValueError for a request that cannot run, RuntimeError with the cause if the model failed. Cancelling
        frees the request's place. Aborted before it started, a request has no outputs and no routed experts."""
        name = f"request {request.request_id}"
        self._check_tokens(request.input_ids, name)
        total = len(request.input_ids) + request.sampling.max_new_tokens
        limit = self._model.config.max_position_embeddings
        if total > limit:
            raise ValueError(f"{name}: prompt and max_new_tokens make {total} tokens, the model has {limit} positions")
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
            answer.cancel()

    def _add(self, sequence: RunningSequence) -> None:
        idle = not self._generation.has_work
        self._generation.add(sequence)
        if idle:
            self._thread.submit(self._step)

    def _step(self) -> None:
        """One step of generation; the next one queues behind the commands that came meanwhile."""
        try:
            self._generation.step()
        except Exception as error:  # whatever the model raises belongs to those who wait for it
            self._generation.fail(error)
        if self._generation.has_work:
            self._thread.submit(self._step)

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """log p(input_ids[i] | input_ids[:i]) for i >= 1: len(input_ids) - 1 natural logs, between two steps."""
        self._check_tokens(input_ids, "score")
        if len(input_ids) == 1:
            return []
        return await self._call(lambda: self._generation.score(list(input_ids), temperature))

    async def abort(self, request_id: str | None = None) -> None:
        """Stop one request, or all, waiting ones too. A request that is unknown or has ended is no error."""
        await self._call(lambda: self._generation.abort(request_id))

    async def sync_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights, by Hugging Face name, in place and cast to the engine's dtype; all requests are aborted.

        Raises ValueError listing missing, unknown, repeated and wrongly shaped tensors; then nothing changed."""
        named = list(named_tensors)
        await self._call(lambda: self._replace_weights(named, version))

    def _replace_weights(self, named: list[tuple[str, torch.Tensor]], version: int) -> None:
        targets = dict(self._model.named_parameters())  # tied weights appear once
        given = dict(named)
        faults = [f"missing {name}" for name in targets if name not in given]
        faults += [f"unknown {name}" for name in given if name not in targets]
        faults += [f"repeated {name}" for name, count in Counter(name for name, _ in named).items() if count > 1]
        wrong = [name for name in targets if name in given and given[name].shape != targets[name].shape]
        faults += [f"shape of {n} is {list(given[n].shape)}, not {list(targets[n].shape)}" for n in wrong]
        if faults:
            shown = "; ".join(faults[:20]) + (f"; and {len(faults) - 20} more" if len(faults) > 20 else "")
            raise ValueError(f"weights {version} do not fit the rollout engine's model, nothing was changed: {shown}")
        self._generation.abort(None)
        self._generation.drop_cache()
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(given[name])
        self._generation.weight_version = version

    async def close(self) -> None:
        """Stop the thread. Requests under way and later ones fail with RuntimeError."""
        if not self._closed:
            self._closed = True
            failing = self._thread.submit(self._generation.fail, RuntimeError("the rollout engine was closed"))
            await asyncio.wrap_future(failing)
            self._thread.shutdown()

    async def _call[T](self, function: Callable[[], T]) -> T:
        if self._closed:
            raise RuntimeError("the rollout engine is closed")
        return await asyncio.wrap_future(self._thread.submit(function))

    def _check_tokens(self, tokens: list[int], name: str) -> None:
        vocab_size = self._model.config.vocab_size
        if not tokens:
            raise ValueError(f"{name}: input_ids is empty")
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError(f"{name}: input_ids holds ids outside [0, {vocab_size})")
