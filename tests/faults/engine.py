"""Embedded engine that samples scripted turns and injects false answers on request.

observed_run.py names it as ``tests.faults.engine:FaultyBackend``. A file in ``orders`` is an order.
The first engine that sees it executes it:

    nan      log-probs of an answer are NaN
    version  an answer has a future weight version
    old      an answer has an older weight version than the policy
    twice    an answer is that of another request
    routes   all experts of an answer are 0, as in an unfilled buffer
    bucket   a bit of the weights flips in transit to the engines

server.py has the same engine behind SGLang's protocol.
"""

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_gptoss.config import ModelConfig
from rl_loop.data.response_check import MIN_TOKENS
from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.backend import EngineConfig, EngineFactory
from rl_loop.engines.embedded.backend import EmbeddedBackend, build_engine
from rl_loop.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    RolloutEngine,
    WeightVersionSpan,
)
from rl_loop.weight_sync.source import LoadedWeights, WeightSource

DAMAGED = "model.layers.0.self_attn.q_proj.weight"
"""Name of the tensor with the flipped bit."""


class Options(EngineConfig):
    """Settings of the backend."""

    call: list[int]
    """Tokens of a turn that calls the sandbox."""
    answer: list[int]
    """Tokens of a turn that ends the episode with an answer to check."""
    orders: Path
    """Directory of orders."""
    deterministic: bool = True
    """The same option as in the embedded engine."""
    quantization: None = None
    """The same option as in the embedded engine."""


def flip_exponent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of an fp32 or bf16 tensor with a flipped exponent bit in its first number.

    The bit next to the sign changes the number by many orders of magnitude.
    """
    damaged = tensor.clone()
    bits = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    damaged.view(bits).view(-1)[0] ^= 1 << (8 * tensor.element_size() - 2)
    return damaged


def take_order(orders: Path, name: str) -> bool:
    """Delete an order file. Return True if the file existed."""
    try:
        os.unlink(orders / name)
    except FileNotFoundError:
        return False
    return True


class FaultyEngine:
    """Engine that follows a script, samples from the policy, and gives false answers on order.

    The script determines the first turn of three episodes out of four. Its log-probs are those of
    the
    policy.
    """

    def __init__(self, engine: RolloutEngine, settings: Options) -> None:
        self._engine = engine
        self._scripts = {1: settings.call, 2: settings.answer, 3: settings.call}
        self._orders = settings.orders
        self._version = 0
        self._last: GenerateResult | None = None

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await self._answer(request)
        lie = self._lie(request, result)
        self._last = result
        return lie

    async def _answer(self, request: GenerateRequest) -> GenerateResult:
        seed = int(request.episode.rpartition("/")[2])
        turn, done = request.request_id.removeprefix(request.episode).strip("/").split("/")[:2]
        script = self._scripts.get(seed % 4)
        # Requests of a server have an id behind "#".
        is_first = turn == "0" and re.split("[.#]", done)[0] == "0"
        if script is None or not is_first or request.sampling.max_new_tokens < len(script):
            return await self._engine.generate(request)

        if request.on_begin is not None:
            request.on_begin()
        text = request.input_ids + script
        log_probs = await self._engine.score(text, request.sampling.temperature or 1.0)
        spans = [WeightVersionSpan(0, len(script), self._version)]
        return GenerateResult(
            list(script),
            log_probs[-len(script) :],
            FinishReason.STOP,
            spans,
            routed_experts=await self._routes(request, text),
            request_id=request.request_id,  # as in results of the embedded engine
        )

    async def _routes(self, request: GenerateRequest, text: list[int]) -> np.ndarray | None:
        """Return the experts of all tokens of ``text`` except the last, if requested."""
        if not request.return_routed_experts:
            return None
        # An engine returns routes only for a generation, so generate one token after the text.
        one_more = replace(
            request, input_ids=text, sampling=replace(request.sampling, max_new_tokens=1)
        )
        result = await self._engine.generate(one_more)
        assert result.routed_experts is not None
        return result.routed_experts[:-1]

    def _lie(self, request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        if not result.output_ids:
            return result
        if take_order(self._orders, "nan"):
            return replace(result, output_log_probs=[float("nan")] * len(result.output_ids))
        if take_order(self._orders, "version"):
            return replace(result, weight_versions=self._spans(result, self._version + 3))
        if self._version > 0 and take_order(self._orders, "old"):
            return replace(result, weight_versions=self._spans(result, self._version - 1))
        if result.routed_experts is not None and take_order(self._orders, "routes"):
            return replace(result, routed_experts=np.zeros_like(result.routed_experts))
        if self._is_like_another(request, result) and take_order(self._orders, "twice"):
            assert self._last is not None
            return self._last
        return result

    @staticmethod
    def _spans(result: GenerateResult, version: int) -> list[WeightVersionSpan]:
        return [WeightVersionSpan(0, len(result.output_ids), version)]

    def _is_like_another(self, request: GenerateRequest, result: GenerateResult) -> bool:
        """Return True if the previous result would also be a valid result of this request.

        It must differ from ``result``, and be long enough to be recognized as wrong.
        """
        if self._last is None or self._last.output_ids == result.output_ids:
            return False
        return MIN_TOKENS <= len(self._last.output_ids) <= request.sampling.max_new_tokens

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        return await self._engine.score(input_ids, temperature)

    async def abort(self, request_id: str | None = None) -> None:
        await self._engine.abort(request_id)

    async def sync_weights(self, named_tensors: Any, version: int) -> None:
        await self._engine.sync_weights(named_tensors, version)
        self._version = version

    async def close(self) -> None:
        await self._engine.close()


def build(model: ModelConfig, dtype: str, settings: Options) -> FaultyEngine:
    """Build the engine of a rollout worker."""
    deterministic = settings.deterministic
    engine = build_engine(model, dtype, max_batch_size=16, deterministic=deterministic)
    return FaultyEngine(engine, settings)


class FaultyBackend(EmbeddedBackend):
    """Backend with one ``FaultyEngine`` in every rollout worker."""

    Options = Options
    settings: Options  # type: ignore[assignment]

    def engine_factory(self) -> EngineFactory:
        return partial(build, self.context.model, self.context.dtype, self.settings)

    def sync_weights(self, source: WeightSource, version: int) -> None:
        if take_order(self.settings.orders, "bucket"):
            weights = dict(source.weights())
            source = LoadedWeights(weights | {DAMAGED: flip_exponent(weights[DAMAGED])})
        super().sync_weights(source, version)
