"""Embedded engine, against plain forwards and generate() of the same model."""

from __future__ import annotations

import asyncio
import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_gptoss.log_probs import log_probs_and_entropy
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.embedded.engine import TransformersEngine
from rl_loop.engines.protocol import GenerateResult, ModelShape, check_result
from rl_loop.infrastructure import EngineError
from tests.support.rl_loop.engines.models import (
    LAYERS,
    TOP_K,
    VOCAB,
    build_engine,
    held,
    plain_log_probs,
    plain_routes,
    prompt,
    reference_model,
    request,
    tiny_config,
)
from tests.support.waiting import PATIENCE_SECONDS

MODEL = reference_model()


def gather(engine: TransformersEngine, requests: list) -> list[GenerateResult]:
    async def all_of_them() -> list[GenerateResult]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(all_of_them())


def assert_log_probs_are_those_of_a_plain_forward(
    tokens: list[int], result: GenerateResult, t: float = 1.0
) -> None:
    expected = plain_log_probs(MODEL, tokens + result.output_ids, t)[len(tokens) - 1 :]
    np.testing.assert_allclose(result.output_log_probs, expected, atol=1e-5, rtol=0)


def test_greedy_decoding_of_a_ragged_batch_equals_generate() -> None:
    engine = build_engine(MODEL)
    prompts = [prompt(n, seed=n) for n in (1, 2, 5, 7, 8, 9, 13, 30, 47)]
    results = gather(engine, [request(p, 25, temperature=0.0) for p in prompts])
    for p, result in zip(prompts, results, strict=True):
        expected = MODEL.generate(torch.tensor([p]), max_new_tokens=25, do_sample=False)[
            0, len(p) :
        ].tolist()
        assert result.output_ids == expected
        assert result.finish_reason == FinishReason.LENGTH
        assert_log_probs_are_those_of_a_plain_forward(p, result)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_a_plain_forward_alone_and_batched(
    temperature: float,
) -> None:
    engine = build_engine(MODEL, max_batch_size=5)  # fewer rows than requests
    prompts = [prompt(3 + 4 * i, seed=i) for i in range(12)]
    results = gather(
        engine,
        [request(p, 5 + 3 * i, temperature=temperature, seed=i) for i, p in enumerate(prompts)],
    ) + gather(engine, [request(prompts[3], 20, temperature=temperature, seed=99)])
    for i, (p, result) in enumerate(zip([*prompts, prompts[3]], results, strict=True)):
        assert (
            len(result.output_ids) == len(result.output_log_probs) == (5 + 3 * i if i < 12 else 20)
        )
        assert result.weight_versions == [WeightVersionSpan(0, len(result.output_ids), 1)]
        assert_log_probs_are_those_of_a_plain_forward(p, result, temperature)


def test_multi_turn_episodes_reuse_their_prefix_and_stay_exact() -> None:
    engine = build_engine(MODEL, max_batch_size=4)

    async def episode(seed: int) -> None:
        rng, tokens, cached = random.Random(seed), prompt(20 + seed, seed=seed), 0
        for turn in range(4):
            result = await engine.generate(
                request(tokens, rng.randint(3, 30), seed=seed * 10 + turn, routes=True)
            )
            assert result.cached_tokens >= cached
            assert_log_probs_are_those_of_a_plain_forward(tokens, result)
            assert result.routed_experts is not None
            np.testing.assert_array_equal(
                result.routed_experts, plain_routes(MODEL, tokens + result.output_ids)
            )
            cached = len(tokens) + len(result.output_ids) - 1
            tokens = (
                tokens
                + result.output_ids
                + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 15))]
            )

    async def all_of_them() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*(episode(seed) for seed in range(7)))

    asyncio.run(all_of_them())


def test_samples_of_one_prompt_share_its_prefill() -> None:
    engine = build_engine(MODEL)
    tokens = prompt(60)

    async def all_at_once() -> list[GenerateResult]:
        with held(engine):  # otherwise the first would start before the second arrives
            samples = [
                asyncio.create_task(engine.generate(request(tokens, 6, seed=i))) for i in range(8)
            ]
            await asyncio.sleep(0)
        return await asyncio.wait_for(asyncio.gather(*samples), 20)

    results = asyncio.run(all_at_once())
    assert sorted(result.cached_tokens for result in results) == [0] + [59] * 7
    assert len({tuple(result.output_ids) for result in results}) > 1
    for result in results:
        assert_log_probs_are_those_of_a_plain_forward(tokens, result)


def test_finished_sequence_is_cached_until_its_row_is_needed() -> None:
    engine = build_engine(MODEL, max_batch_size=1)  # two rows: one runs, one is kept
    for seed in (0, 1, 2):
        gather(engine, [request(prompt(30, seed), 2, temperature=0.0)])
    again = [
        gather(engine, [request(prompt(30, seed), 1, temperature=0.0)])[0].cached_tokens
        for seed in (2, 0)
    ]
    assert again == [29, 0]


def test_routes_equal_those_of_a_plain_forward_in_a_ragged_batch() -> None:
    engine = build_engine(MODEL, max_batch_size=3)
    prompts = [prompt(5 + 6 * i, seed=i) for i in range(7)]
    requests = [request(p, 4 + 5 * (i % 3), seed=i, routes=i != 2) for i, p in enumerate(prompts)]
    # The caller may already have the routes of the first tokens.
    requests = [replace(r, routes_start=i) for i, r in enumerate(requests)]
    results = gather(engine, requests)
    for i, (p, result) in enumerate(zip(prompts, results, strict=True)):
        if i == 2:
            assert result.routed_experts is None
            continue
        routes = result.routed_experts
        assert routes is not None and routes.dtype == np.uint8
        assert routes.shape == (len(p) + len(result.output_ids) - 1 - i, LAYERS, TOP_K)
        np.testing.assert_array_equal(routes, plain_routes(MODEL, p + result.output_ids)[i:])


def test_all_zero_routes_are_rejected_with_the_layer() -> None:
    model = reference_model()
    engine = TransformersEngine(model)

    def no_choice(
        _module: object, _input: object, output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        return output[0], output[1], torch.zeros_like(output[2])

    # This hook runs before the engine's hook, like a router that does not fill its buffer.
    model.model.layers[2].mlp.router.register_forward_hook(no_choice, prepend=True)
    with pytest.raises(RuntimeError, match="routed experts of layer 2"):
        gather(engine, [request(prompt(9), 3, routes=True)])
    assert len(gather(engine, [request(prompt(9), 3)])[0].output_ids) == 3


def test_tokens_of_a_seed_do_not_depend_on_the_batch() -> None:
    engine = build_engine(reference_model(dtype=torch.float64), max_batch_size=6)
    tokens = prompt(17)
    (alone,) = gather(engine, [request(tokens, 40, seed=7, top_p=0.9, temperature=1.2)])
    others = [request(prompt(3 + 2 * i, seed=50 + i), 2 + 5 * i, seed=i) for i in range(9)]
    batched = gather(
        engine, [*others[:4], request(tokens, 40, seed=7, top_p=0.9, temperature=1.2), *others[4:]]
    )[4]
    assert batched.output_ids == alone.output_ids
    np.testing.assert_allclose(batched.output_log_probs, alone.output_log_probs, atol=1e-12)
    (other_seed,) = gather(engine, [request(tokens, 40, seed=8, top_p=0.9, temperature=1.2)])
    assert other_seed.output_ids != alone.output_ids


def test_continuations_differ_without_a_seed() -> None:
    first, second = gather(build_engine(MODEL), [request(prompt(9), 30), request(prompt(9), 30)])
    assert first.output_ids != second.output_ids


def test_stop_token_ends_the_continuation_and_belongs_to_it() -> None:
    engine = build_engine(MODEL)
    (free,) = gather(engine, [request(prompt(12), 30, seed=3)])
    stop = free.output_ids[10]
    first = free.output_ids.index(stop)
    (stopped,) = gather(engine, [request(prompt(12), 30, seed=3, stop_token_ids=(VOCAB - 1, stop))])
    expected = free.output_ids[: first + 1]
    if VOCAB - 1 in expected:
        expected = expected[: expected.index(VOCAB - 1) + 1]
    assert stopped.output_ids == expected
    assert stopped.finish_reason == FinishReason.STOP


def test_score_of_several_chunks_equals_a_plain_forward() -> None:
    engine = build_engine(MODEL)
    tokens = prompt(1100)
    for temperature in (1.0, 0.5):
        scores = asyncio.run(engine.score(tokens, temperature))
        np.testing.assert_allclose(
            scores, plain_log_probs(MODEL, tokens, temperature), atol=1e-5, rtol=0
        )
    assert asyncio.run(engine.score([5])) == []


def test_long_prompts_grow_the_cache_and_stay_exact() -> None:
    engine = build_engine(MODEL)
    prompts = [prompt(600), prompt(600)[:555] + prompt(100, seed=9), prompt(120)]
    for result, p in zip(
        gather(engine, [request(p, 12, seed=1) for p in prompts]), prompts, strict=True
    ):
        assert_log_probs_are_those_of_a_plain_forward(p, result)


@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals_lengths_and_cancellations_stay_exact(seed: int) -> None:
    rng = random.Random(seed)
    engine = build_engine(MODEL, max_batch_size=rng.randint(1, 6))
    stems = [prompt(n, seed=n) for n in (5, 25, 40)]

    async def one(i: int) -> None:
        await asyncio.sleep(rng.random() * 0.1)
        stem = rng.choice(stems)
        tokens = stem[: rng.randint(1, len(stem))] + prompt(rng.randint(0, 20), seed=i)
        task = asyncio.create_task(
            engine.generate(request(tokens, rng.randint(1, 25), seed=i, routes=True))
        )
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.05)
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                return
        result = await task
        assert_log_probs_are_those_of_a_plain_forward(tokens, result)
        np.testing.assert_array_equal(
            result.routed_experts, plain_routes(MODEL, tokens + result.output_ids)
        )

    async def all_of_them() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*(one(i) for i in range(25)))

    asyncio.run(all_of_them())


def test_bfloat16_engine_agrees_with_its_own_score() -> None:
    engine = build_engine(reference_model(dtype=torch.bfloat16))
    tokens = prompt(40)
    (result,) = gather(engine, [request(tokens, 20, seed=0)])
    scored = asyncio.run(engine.score(tokens + result.output_ids))[len(tokens) - 1 :]
    assert np.abs(np.array(result.output_log_probs) - scored).mean() < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_generation_on_a_gpu_equals_a_plain_forward_on_the_cpu() -> None:
    engine = TransformersEngine(copy.deepcopy(MODEL).to("cuda"), max_batch_size=4)
    prompts = [prompt(5 + 9 * i, seed=i) for i in range(6)]
    for p, result in zip(
        prompts, gather(engine, [request(p, 20, seed=1, top_p=0.9) for p in prompts]), strict=True
    ):
        expected = plain_log_probs(MODEL, p + result.output_ids)[len(p) - 1 :]
        np.testing.assert_allclose(result.output_log_probs, expected, atol=1e-4, rtol=0)


def test_rotary_frequencies_are_fp32_in_every_engine_dtype() -> None:
    config = tiny_config()
    engines = [
        TransformersEngine.from_config(config, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    low, full = (engine._model.model.rotary_emb.inv_freq for engine in engines)
    assert torch.equal(low.float(), full) and low.dtype == torch.float32
    assert engines[0]._model.lm_head.weight.dtype == torch.bfloat16
    assert config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request([], 5), "empty"),
        (request([1, VOCAB], 5), "outside"),
        (request([-1], 5), "outside"),
        (request([1], 1 << 20), "positions"),
    ],
)
def test_invalid_requests_are_rejected_with_the_reason(bad: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather(build_engine(MODEL), [bad])


def test_deterministic_log_probs_do_not_depend_on_other_requests() -> None:
    wanted = [request(prompt(20 + 7 * i, seed=i), 20, seed=i) for i in range(4)]
    # These prompts are longer, so that the cache grows, and begin with prefixes of ``wanted``.
    others = [request([*prompt(20, seed=0), *prompt(150, seed=9)], 12, seed=7), *wanted[:2]]
    others = [request(r.input_ids, 12 + i, seed=50 + i) for i, r in enumerate(others)]

    def answers(deterministic: bool, busy: bool) -> list[list[float]]:
        engine = build_engine(MODEL, deterministic=deterministic)
        if not busy:
            return [gather(engine, [one])[0].output_log_probs for one in wanted]
        gather(engine, others)
        again = [request(r.input_ids, 12 + i, seed=70 + i) for i, r in enumerate(others)]
        return [result.output_log_probs for result in gather(engine, [*again, *wanted])[3:]]

    assert answers(deterministic=True, busy=True) == answers(deterministic=True, busy=False)
    # Without the setting, batches change the bits.
    assert answers(deterministic=False, busy=True) != answers(deterministic=False, busy=False)


def test_result_of_another_request_is_rejected() -> None:
    first, second = request(prompt(9), 5, seed=1), request(prompt(9), 5, seed=2)
    answers = gather(build_engine(MODEL), [first, second])
    shape = ModelShape(VOCAB)
    for asked, answer in zip((first, second), answers, strict=True):
        check_result(asked, answer, shape)
    with pytest.raises(EngineError, match=f"the result of another request .{second.request_id}"):
        check_result(first, answers[1], shape)
    # Results without a request id are accepted.
    check_result(first, replace(answers[1], request_id=None), shape)


def test_bf16_engine_has_the_trainers_log_probs() -> None:
    """For equal hidden states, neither the engine nor the trainer rounds logits to bf16."""
    model = reference_model(dtype=torch.bfloat16)
    model.lm_head.weight.mul_(20)  # the error of rounded logits would be up to 0.06
    engine = build_engine(model)
    seen: list[torch.Tensor] = []
    engine._model.model.norm.register_forward_hook(
        lambda _module, _inputs, hidden: seen.append(hidden[0].clone())
    )

    def of_the_trainer(hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        weight = engine._model.lm_head.weight
        return log_probs_and_entropy(hidden, weight, torch.tensor(tokens))[0]

    async def run() -> None:
        sampled = await engine.generate(request(prompt(20), 30, seed=1))
        hidden = torch.stack([states[-1] for states in seen])
        ours = torch.tensor(sampled.output_log_probs)
        torch.testing.assert_close(
            ours, of_the_trainer(hidden, sampled.output_ids), rtol=0, atol=1e-4
        )

        seen.clear()
        text = prompt(300)  # two chunks of positions
        scores = torch.tensor(await engine.score(text))
        (hidden,) = seen
        torch.testing.assert_close(scores, of_the_trainer(hidden, text[1:]), rtol=0, atol=1e-4)
        await engine.close()

    asyncio.run(run())
