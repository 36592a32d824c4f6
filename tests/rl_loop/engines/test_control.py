"""Abort, weight sync, cancellation and failure while requests run."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.embedded.engine import TransformersEngine
from rl_loop.engines.protocol import GenerateRequest
from rl_loop.weight_sync.source import WeightMismatchError
from tests.support.rl_loop.engines.models import (
    VOCAB,
    build_engine,
    held,
    plain_log_probs,
    plain_routes,
    prompt,
    reference_model,
    request,
)
from tests.support.waiting import wait_until, wait_until_async

MODEL, OTHER = reference_model(0), reference_model(1)
FOREVER = 50_000


async def started(engine: TransformersEngine, steps: int = 5) -> None:
    first = engine._scheduler.steps
    await wait_until_async(lambda: engine._scheduler.steps >= first + steps)


def start(engine: TransformersEngine, **options: object) -> tuple:
    r = request(prompt(11), FOREVER, seed=1, **options)
    return r, asyncio.create_task(engine.generate(r))


async def answer(task: asyncio.Task):
    return await asyncio.wait_for(task, 20)


def test_abort_returns_partial_tokens_of_that_request_only() -> None:
    async def main() -> None:
        engine = engine_of_model
        (first, first_task), (_, second_task) = start(engine, routes=True), start(engine)
        await started(engine)
        await engine.abort("no such request")
        await engine.abort(first.request_id)
        result = await answer(first_task)
        assert result.finish_reason == FinishReason.ABORT
        assert len(result.output_ids) == len(result.output_log_probs) >= 4
        np.testing.assert_array_equal(
            result.routed_experts, plain_routes(MODEL, first.input_ids + result.output_ids)
        )
        assert not second_task.done()
        before = engine._scheduler.steps
        await started(engine)
        assert engine._scheduler.steps > before
        await engine.abort()
        assert len((await answer(second_task)).output_ids) > len(result.output_ids)

    engine_of_model = build_engine(MODEL)
    asyncio.run(main())


def test_abort_all_also_ends_queued_requests() -> None:
    engine = build_engine(MODEL, max_batch_size=1)

    async def main() -> None:
        (_, running), (_, waiting) = start(engine), start(engine, routes=True)
        await started(engine)
        await engine.abort()
        assert (await answer(running)).output_ids
        result = await answer(waiting)
        assert (result.output_ids, result.finish_reason, result.routed_experts) == (
            [],
            FinishReason.ABORT,
            None,
        )

    asyncio.run(main())


def test_cancelled_request_frees_its_row() -> None:
    engine = build_engine(MODEL, max_batch_size=1)

    async def main() -> None:
        r, running = start(engine)
        await started(engine)
        waiting = asyncio.create_task(engine.generate(request(prompt(4), 3)))
        running.cancel()
        assert len((await answer(waiting)).output_ids) == 3
        assert running.cancelled()
        again = asyncio.create_task(engine.generate(r))  # its id is free again
        await started(engine)
        again.cancel()

    asyncio.run(main())


def test_event_loop_is_not_blocked_while_tokens_are_sampled() -> None:
    engine = build_engine(MODEL)

    async def main() -> None:
        _, running = start(engine)
        await started(engine)
        steps, turns = engine._scheduler.steps, 0
        while engine._scheduler.steps < steps + 20:
            await asyncio.sleep(0)
            turns += 1
        assert turns > 20
        await engine.abort()
        await answer(running)

    asyncio.run(main())


def test_request_id_that_is_in_use_is_rejected() -> None:
    engine = build_engine(MODEL)

    async def main() -> None:
        r, running = start(engine)
        await started(engine)
        with pytest.raises(ValueError, match="already running"):
            await engine.generate(r)
        await engine.abort()
        await answer(running)

    asyncio.run(main())


def test_weight_sync_aborts_requests_that_then_use_new_weights() -> None:
    engine = build_engine(MODEL)

    async def main() -> None:
        r, running = start(engine, routes=True)
        await started(engine)
        await engine.sync_weights(OTHER.state_dict().items(), 2)
        assert engine._scheduler.weight_version == 2
        part = await answer(running)
        n = len(part.output_ids)
        assert (part.finish_reason, part.weight_versions) == (
            FinishReason.ABORT,
            [WeightVersionSpan(0, n, 1)],
        )
        tokens = r.input_ids + part.output_ids
        rest = await engine.generate(request(tokens, 5, routes=True))
        assert rest.weight_versions == [WeightVersionSpan(0, 5, 2)]
        for model, prefix, result in ((MODEL, r.input_ids, part), (OTHER, tokens, rest)):
            whole = prefix + result.output_ids
            expected = plain_log_probs(model, whole)[len(prefix) - 1 :]
            np.testing.assert_allclose(result.output_log_probs, expected, atol=1e-5, rtol=0)
            np.testing.assert_array_equal(result.routed_experts, plain_routes(model, whole))

    asyncio.run(main())


def test_weight_sync_drops_the_prefix_cache() -> None:
    engine = build_engine(MODEL)

    async def main() -> None:
        await engine.generate(request(prompt(30), 5, temperature=0.0))
        await engine.sync_weights(OTHER.state_dict().items(), 2)
        result = await engine.generate(request(prompt(30), 5, seed=0))
        assert result.cached_tokens == 0
        expected = plain_log_probs(OTHER, prompt(30) + result.output_ids)[29:]
        np.testing.assert_allclose(result.output_log_probs, expected, atol=1e-5, rtol=0)
        assert result.weight_versions == [WeightVersionSpan(0, 5, 2)]

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["is missing", "is not in", "has shape", "was sent twice"])
def test_weights_that_do_not_fit_are_named_and_not_loaded(fault: str) -> None:
    engine = build_engine(MODEL)
    named = dict(OTHER.state_dict())
    name = "model.layers.1.mlp.experts.down_proj"
    extra = []
    if fault == "is missing":
        del named[name]
    elif fault == "is not in":
        name = "model.layers.9.self_attn.sinks"
        named[name] = torch.zeros(4)
    elif fault == "has shape":
        named[name] = named[name].transpose(1, 2)
    else:
        extra = [(name, named[name])]

    async def main() -> None:
        before = await engine.generate(request(prompt(20), 5, temperature=0.0))
        with pytest.raises(WeightMismatchError, match=f"tensor {name} {fault}"):
            await engine.sync_weights([*named.items(), *extra], 2)
        assert engine._scheduler.weight_version == 1
        after = await engine.generate(request(prompt(20), 5, temperature=0.0))
        assert after.cached_tokens == 19  # the cache is kept, too
        assert after.output_ids == before.output_ids
        np.testing.assert_allclose(
            await engine.score(prompt(40)), plain_log_probs(MODEL, prompt(40)), atol=1e-5
        )

    asyncio.run(main())


def test_model_exception_fails_all_requests_but_not_later_ones() -> None:
    model = reference_model()
    engine = TransformersEngine(model, max_batch_size=2)

    def fail(*_: object) -> None:
        raise MemoryError("no memory left for this layer")

    async def main() -> None:
        tasks = [start(engine)[1] for _ in range(4)]
        await started(engine)
        hook = model.model.layers[2].register_forward_pre_hook(fail)
        for task in tasks:
            with pytest.raises(RuntimeError, match="no memory left") as raised:
                await answer(task)
            assert isinstance(raised.value.__cause__, MemoryError)
        with pytest.raises(MemoryError):
            await engine.score(prompt(5))
        hook.remove()
        result = await engine.generate(request(prompt(11), 6, seed=0))
        expected = plain_log_probs(MODEL, prompt(11) + result.output_ids)[10:]
        np.testing.assert_allclose(result.output_log_probs, expected, atol=1e-5, rtol=0)

    asyncio.run(main())


def test_nan_weights_raise_until_good_weights_arrive() -> None:
    engine = build_engine(MODEL)
    bad = {name: tensor.clone() for name, tensor in MODEL.state_dict().items()}
    bad["model.layers.0.self_attn.k_proj.bias"][0] = float("nan")

    async def main() -> None:
        await engine.sync_weights(bad.items(), 2)
        with pytest.raises(RuntimeError, match="weights 2: the model's logits are not finite"):
            await engine.generate(request(prompt(5), 3))
        await engine.sync_weights(MODEL.state_dict().items(), 3)
        assert len((await engine.generate(request(prompt(5), 3))).output_ids) == 3

    asyncio.run(main())


def test_overflow_in_a_request_does_not_affect_later_ones() -> None:
    engine = build_engine(MODEL)
    weights = {name: tensor.clone() for name, tensor in MODEL.state_dict().items()}
    weights["model.embed_tokens.weight"][7] = float("inf")

    async def main() -> None:
        await engine.sync_weights(weights.items(), 2)
        with pytest.raises(RuntimeError, match="not finite"):
            await engine.generate(request([7] * 30, 3))
        prompts = [
            [1, 2, 3],
            [token for token in prompt(40) if token != 7],
        ]  # the short prompt gets the row of the failed request
        with held(engine):
            tasks = [
                asyncio.create_task(engine.generate(request(p, 2, temperature=0.0)))
                for p in prompts
            ]
            await asyncio.sleep(0)
        for p, task in zip(prompts, tasks, strict=True):
            result = await answer(task)
            expected = plain_log_probs(MODEL, p + result.output_ids)[len(p) - 1 :]
            np.testing.assert_allclose(result.output_log_probs, expected, atol=1e-5, rtol=0)

    asyncio.run(main())


def test_closed_engine_fails_running_and_later_requests() -> None:
    engine = build_engine(MODEL)

    async def main() -> None:
        _, running = start(engine)
        await started(engine)
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await answer(running)
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate(request(prompt(5), 3))
        with pytest.raises(RuntimeError, match="closed"):
            await engine.abort()

    asyncio.run(main())


def test_engine_thread_ends_when_the_engine_is_released() -> None:
    threads = threading.active_count()
    engine = build_engine(MODEL)
    asyncio.run(engine.generate(request([VOCAB - 1], 2)))
    asyncio.run(engine.abort())
    gone = weakref.ref(engine)
    del engine

    def is_gone() -> bool:
        gc.collect()
        return gone() is None

    # The engine's thread refers to the engine until the last step ends. Then the thread ends.
    wait_until(is_gone)
    wait_until(lambda: threading.active_count() <= threads)


def test_request_begins_when_it_leaves_the_queue() -> None:
    """The time limit of an episode does not include the time in the queue."""

    engine = build_engine(MODEL, max_batch_size=1)

    async def main() -> None:
        order: list[str] = []
        first = replace(request(prompt(5), 30), on_begin=lambda: order.append("first begins"))
        second = replace(request(prompt(6), 5), on_begin=lambda: order.append("second begins"))

        async def run(name: str, asked: GenerateRequest) -> None:
            await engine.generate(asked)
            order.append(f"{name} ends")

        with held(engine):
            running = asyncio.gather(run("first", first), run("second", second))
            await asyncio.sleep(0.05)
            assert order == []
        await running
        assert (
            order.index("first begins") < order.index("second begins") < order.index("second ends")
        )
        assert order[0] == "first begins"
        assert sorted(order) == ["first begins", "first ends", "second begins", "second ends"]
        await engine.close()

    asyncio.run(main())


def test_engine_without_weights_rejects_requests() -> None:
    """Tokens of random weights would count as tokens of version 0, the first policy of a run."""
    empty = TransformersEngine.from_config(MODEL.config)
    with pytest.raises(RuntimeError, match="the engine has no weights yet"):
        asyncio.run(empty.generate(request(prompt(5), 3)))
    with pytest.raises(RuntimeError, match="the engine has no weights yet"):
        asyncio.run(empty.score(prompt(5)))
    asyncio.run(empty.sync_weights(MODEL.state_dict().items(), 0))
    result = asyncio.run(empty.generate(request(prompt(5), 3)))
    assert result.weight_versions[0].version == 0
