"""The embedded rollout engine: transformers' GptOssForCausalLM with continuous batching, in this process.

A worker thread owns the model. Requests and commands reach it through a queue and take effect between two steps, so
the event loop, and the tool calls on it, go on meanwhile.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AttentionInterface, GptOssConfig, GptOssForCausalLM

from rl_loop.engines.batched_generation import BatchedGeneration, RunningSequence
from rl_loop.engines.cached_attention import ATTENTION_NAME, row_cache_attention
from rl_loop.engines.protocol import GenerateRequest, GenerateResult

AttentionInterface.register(ATTENTION_NAME, row_cache_attention)


class TransformersEngine:
    """RolloutEngine around a GptOssForCausalLM, which it takes over: nobody else may run or change that model.

    Weight updates meet running requests as follows: ``sync_weights`` waits for the step in progress; the sequences keep
    their tokens, their keys and values are computed anew under the new weights, and the answer has one span per
    version. The routes (and log-probs) of tokens stay those of the weights that they were processed with first.
    """

    def __init__(
        self,
        model: GptOssForCausalLM,
        *,
        max_batch_size: int = 64,
        prefix_cache_tokens: int = 32768,
        weight_version: int = 0,
    ) -> None:
        """``max_batch_size``: sequences decoded together. ``prefix_cache_tokens``: tokens of finished sequences whose
        keys and values are kept for the next turn; 0 keeps none. ``weight_version``: of the weights it has now."""
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, not {max_batch_size}")
        devices = {str(parameter.device) for parameter in model.parameters()}
        if len(devices) != 1:
            raise ValueError(f"the embedded engine needs the whole model on one device, not on {sorted(devices)}")
        model.eval().requires_grad_(False)
        model.set_attn_implementation(ATTENTION_NAME)
        if model.lm_head.weight.dtype == torch.float64:
            model.set_experts_implementation("eager")  # torch's grouped matrix product, the default, knows no fp64
        self._model = model
        self._device = model.device
        generation = BatchedGeneration(model, max_batch_size, prefix_cache_tokens, weight_version)
        self._worker = _Worker(generation)
        self._generation = generation
        self._finalizer = weakref.finalize(self, self._worker.stop)

    @classmethod
    def from_config(
        cls,
        config: GptOssConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> Self:
        """With random weights, to be replaced by ``sync_weights``. ``options`` are those of the constructor."""
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(dtype)  # the rotary frequencies stay fp32, which .to(dtype) would round
            with torch.device(device):
                model = GptOssForCausalLM(copy.deepcopy(config))  # the engine changes its attention setting
        finally:
            torch.set_default_dtype(before)
        return cls(model, **options)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> Self:
        """From a Hugging Face checkpoint. Raises FileNotFoundError or ValueError naming the directory and the fault."""
        path = Path(directory)
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} is not a Hugging Face checkpoint: it has no config.json")
        try:
            loaded: Any = GptOssForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
            model, report = loaded
        except Exception as error:  # safetensors, JSON, torch and transformers each have their own kinds
            raise ValueError(f"cannot read the model in {path}: {error}. Is a file incomplete?") from error
        faults = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
        if faults:
            raise ValueError(f"the checkpoint in {path} does not fit its config.json: {faults}")
        return cls(model.to(device), **options)

    @property
    def weight_version(self) -> int:
        return self._generation.weight_version

    @property
    def steps(self) -> int:
        """Forward passes of generation so far."""
        return self._generation.steps

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one continuation; requests made concurrently are batched.

        Raises ValueError for a request that cannot run, RuntimeError with the cause if the model failed. Cancelling
        frees the request's place. Aborted before it started, a request has no outputs and no routed experts.
        """
        self._check_request(request)
        return await asyncio.wrap_future(self._worker.submit(request))

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """log p(input_ids[i] | input_ids[:i]) for i >= 1: len(input_ids) - 1 natural logs, between two steps."""
        self._check_tokens(input_ids, "score")
        if temperature < 0:
            raise ValueError(f"score: temperature must not be negative, is {temperature}")
        if len(input_ids) == 1:
            return []
        return await self._call(lambda: self._generation.score(list(input_ids), temperature))

    async def abort(self, request_id: str | None = None) -> None:
        """Stop one request, or all, waiting ones too. A request that is unknown or has ended is no error."""
        await self._call(lambda: self._generation.abort(request_id))

    async def pause(self) -> None:
        """Let no new request start and abort what runs; new and waiting requests wait for ``resume``."""
        await self._call(lambda: self._worker.hold("pause"))

    async def resume(self) -> None:
        await self._call(lambda: self._worker.release("pause"))

    async def sleep(self) -> None:
        """Pause, free all keys and values, and move the weights to host memory if they are not there.

        Weights can be synced while asleep. ``wake`` brings them back.
        """

        def fall_asleep() -> None:
            self._worker.hold("sleep")
            self._generation.drop_cache()
            if self._device.type != "cpu":
                self._move("cpu")
                torch.cuda.empty_cache()

        await self._call(fall_asleep)

    async def wake(self) -> None:
        """Move the weights back and let requests start, unless the engine is also paused."""

        def wake_up() -> None:
            self._move(self._device)
            self._worker.release("sleep")

        await self._call(wake_up)

    async def sync_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights, by Hugging Face name, in place and cast to the engine's dtype.

        Raises ValueError listing missing, unknown, repeated and wrongly shaped tensors; then nothing changed.
        """
        named = list(named_tensors)
        await self._call(lambda: self._replace_weights(named, version))

    def _replace_weights(self, named: list[tuple[str, torch.Tensor]], version: int) -> None:
        targets = dict(self._model.named_parameters())  # tied weights appear once
        given = dict(named)
        faults = [f"missing {name}" for name in targets if name not in given]
        faults += [f"unknown {name}" for name in given if name not in targets]
        faults += [f"repeated {name}" for name in given if len(named) != len(given) and _count(named, name) > 1]
        faults += [
            f"shape of {name} is {list(given[name].shape)}, not {list(target.shape)}"
            for name, target in targets.items()
            if name in given and given[name].shape != target.shape
        ]
        if faults:
            shown = "; ".join(faults[:20]) + (f"; and {len(faults) - 20} more" if len(faults) > 20 else "")
            raise ValueError(f"weights {version} do not fit the rollout engine's model, nothing was changed: {shown}")
        self._generation.preempt()
        self._generation.drop_cache()
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(given[name])
        self._generation.weight_version = version

    def _move(self, device: str | torch.device) -> None:
        module: torch.nn.Module = self._model
        module.to(device)

    async def close(self) -> None:
        """Stop the worker thread. Requests under way and later ones fail with RuntimeError."""
        self._finalizer()

    async def _call[T](self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._worker.call(function))

    def _check_request(self, request: GenerateRequest) -> None:
        sampling, name = request.sampling, f"request {request.request_id}"
        self._check_tokens(request.input_ids, name)
        if sampling.max_new_tokens < 1:
            raise ValueError(f"{name}: max_new_tokens must be at least 1, is {sampling.max_new_tokens}")
        if not sampling.temperature >= 0:
            raise ValueError(f"{name}: temperature must not be negative, is {sampling.temperature}")
        if not 0 < sampling.top_p <= 1:
            raise ValueError(f"{name}: top_p must be above 0 and at most 1, is {sampling.top_p}")
        total, limit = len(request.input_ids) + sampling.max_new_tokens, self._model.config.max_position_embeddings
        if total > limit:
            raise ValueError(f"{name}: prompt and max_new_tokens make {total} tokens, the model has {limit} positions")

    def _check_tokens(self, tokens: list[int], name: str) -> None:
        vocab_size = self._model.config.vocab_size
        if not tokens:
            raise ValueError(f"{name}: input_ids is empty")
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError(f"{name}: input_ids holds ids outside [0, {vocab_size})")


def _count(named: list[tuple[str, torch.Tensor]], name: str) -> int:
    return sum(other == name for other, _ in named)


class _Worker:
    """The thread that runs steps while there is work, and commands between them."""

    def __init__(self, generation: BatchedGeneration) -> None:
        self._generation = generation
        self._changed = threading.Condition()
        self._inbox: deque[tuple[Callable[[], Any], Future[Any]] | RunningSequence] = deque()
        self._live: dict[str, Future[GenerateResult]] = {}
        self._holds: set[str] = set()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="rollout-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerateRequest) -> Future[GenerateResult]:
        sequence = RunningSequence(request, Future())
        with self._changed:
            known = self._live.get(request.request_id)
            if known is not None and not known.done():
                raise ValueError(f"request {request.request_id} is already running: request ids must be unique")
            self._put(sequence)
            self._live[request.request_id] = sequence.future
        sequence.future.add_done_callback(lambda _: self._forget(request.request_id, sequence.future))
        return sequence.future

    def call[T](self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            self._put((function, future))
        return future

    def _put(self, item: tuple[Callable[[], Any], Future[Any]] | RunningSequence) -> None:
        if self._stopped:
            raise RuntimeError("the rollout engine is closed")
        self._inbox.append(item)
        self._changed.notify()

    def _forget(self, request_id: str, future: Future[GenerateResult]) -> None:
        with self._changed:
            if self._live.get(request_id) is future:
                del self._live[request_id]

    def hold(self, reason: str) -> None:
        """Run no steps until every hold is released. What has started is answered with what it has."""
        self._holds.add(reason)
        self._generation.abort(None, waiting=False)

    def release(self, reason: str) -> None:
        self._holds.discard(reason)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._inbox or self._stopped or (self._generation.has_work and not self._holds)):
                    self._changed.wait()
                inbox, self._inbox = self._inbox, deque()
                stopped = self._stopped
            self._take_in(inbox)
            del inbox  # commands refer to the engine, which could never be collected while this thread waits
            if stopped:
                self._generation.fail(RuntimeError("the rollout engine was closed"))
                return
            if self._generation.has_work and not self._holds:
                try:
                    self._generation.step()
                except Exception as error:  # whatever the model raises belongs to those who wait for it
                    self._generation.fail(error)

    def _take_in(self, inbox: deque[tuple[Callable[[], Any], Future[Any]] | RunningSequence]) -> None:
        for item in inbox:
            if isinstance(item, RunningSequence):
                self._generation.add(item)
                continue
            function, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
