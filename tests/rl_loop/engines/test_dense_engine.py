"""Embedded engine with Llama and Qwen2, against plain forwards and generate()."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from megatron_gptoss.families.dense.config import DenseModelConfig
from rl_loop.engines.embedded.backend import build_engine
from rl_loop.engines.protocol import GenerateResult
from tests.support.megatron_gptoss.dense_reference import MODELS, dense_hf_model, dense_weights
from tests.support.rl_loop.engines.models import plain_log_probs, prompt, request

KINDS = ["llama", "qwen2, tied", "llama 3's rope", "qwen2.5's yarn"]


def start_engine(config: DenseModelConfig) -> Any:
    engine = build_engine(config, "fp32", 8)
    asyncio.run(engine.sync_weights(dense_weights(config).items(), 1))
    return engine


async def gather(engine: Any, requests: list[Any]) -> list[GenerateResult]:
    return await asyncio.gather(*(engine.generate(r) for r in requests))


@pytest.mark.parametrize("kind", KINDS)
def test_dense_greedy_decoding_of_ragged_batch_equals_generate(kind: str) -> None:
    config = MODELS[kind]
    model, engine = dense_hf_model(config), start_engine(config)
    prompts = [prompt(n, seed=n) for n in (1, 2, 9, 30, 47)]
    results = asyncio.run(gather(engine, [request(p, 20, temperature=0.0) for p in prompts]))

    for ids, result in zip(prompts, results, strict=True):
        generated = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
        assert result.output_ids == generated[0, len(ids) :].tolist()
        expected = plain_log_probs(model, ids + result.output_ids)[len(ids) - 1 :]
        np.testing.assert_allclose(result.output_log_probs, expected, atol=1e-5, rtol=0)
        assert result.routed_experts is None
    asyncio.run(engine.close())


def test_dense_turn_from_the_cache_equals_a_full_forward() -> None:
    config = MODELS["qwen2, tied"]
    model, engine = dense_hf_model(config), start_engine(config)
    first = asyncio.run(engine.generate(request(prompt(40), 10, seed=3)))
    longer = prompt(40) + first.output_ids + prompt(12, seed=8)
    second = asyncio.run(engine.generate(request(longer, 10, seed=4)))

    assert second.cached_tokens >= 48
    expected = plain_log_probs(model, longer + second.output_ids)[len(longer) - 1 :]
    np.testing.assert_allclose(second.output_log_probs, expected, atol=1e-5, rtol=0)
    scores = asyncio.run(engine.score(longer))
    np.testing.assert_allclose(scores, plain_log_probs(model, longer), atol=1e-5, rtol=0)
    asyncio.run(engine.close())


def test_routes_of_a_dense_model_are_rejected() -> None:
    engine = start_engine(MODELS["llama"])
    with pytest.raises(ValueError, match="asks for routed experts, but the model has no experts"):
        asyncio.run(engine.generate(request(prompt(4), 2, routes=True)))
    asyncio.run(engine.close())


def test_weights_of_another_model_family_are_named() -> None:
    engine = start_engine(MODELS["llama"])
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias is not in"):
        asyncio.run(engine.sync_weights(dense_weights(MODELS["qwen2"]).items(), 2))
    asyncio.run(engine.close())
