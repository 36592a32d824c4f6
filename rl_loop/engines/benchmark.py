"""How fast the embedded engine samples: ``python -m rl_loop.engines.benchmark`` prints one JSON line.

The workload is that of tiny agentic training: many concurrent episodes of a few turns each, whose prompts share a
system message, on a model of random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

import torch
from transformers import GptOssConfig

from rl_loop.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from rl_loop.engines.transformers_engine import TransformersEngine


def tiny_config(experts: int) -> GptOssConfig:
    """4 layers of hidden size 128, two of them with a window of 32."""
    return GptOssConfig(
        num_hidden_layers=4,
        hidden_size=128,
        intermediate_size=96,
        num_local_experts=experts,
        num_experts_per_tok=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=1024,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=None,
    )


async def _episode(engine: TransformersEngine, index: int, prompt: list[int], turns: int) -> list[GenerateResult]:
    rng = random.Random(index)
    tokens, results = list(prompt), []
    for turn in range(turns):
        sampling = SamplingParams(max_new_tokens=rng.randint(10, 50), seed=1000 * index + turn)
        results.append(await engine.generate(GenerateRequest(f"{index}-{turn}", tokens, sampling, True)))
        tokens = tokens + results[-1].output_ids + [rng.randrange(1024) for _ in range(rng.randint(10, 30))]
    return results


async def run(engine: TransformersEngine, episodes: int, group: int) -> dict[str, float]:
    """Figures of ``episodes`` concurrent episodes, ``group`` of them of each prompt."""
    rng = random.Random(0)
    system = [rng.randrange(1024) for _ in range(60)]
    prompts = [system + [rng.randrange(1024) for _ in range(40)] for _ in range(max(1, episodes // group))]
    steps = engine.steps
    start = time.perf_counter()
    done = await asyncio.gather(
        *(_episode(engine, i, prompts[i % len(prompts)], rng.randint(2, 4)) for i in range(episodes))
    )
    seconds = time.perf_counter() - start
    steps = engine.steps - steps
    sampled = sum(len(result.output_ids) for results in done for result in results)
    return {
        "episodes": episodes,
        "seconds": round(seconds, 3),
        "sampled_tokens": sampled,
        "tokens_per_second": round(sampled / seconds, 1),
        "steps": steps,
        "ms_per_step": round(1000 * seconds / steps, 3),
        "mean_batch": round(sampled / steps, 1),
        "cached_tokens": sum(result.cached_tokens for results in done for result in results),
    }


async def decode_milliseconds(engine: TransformersEngine, batch: int, context: int = 200, steps: int = 60) -> float:
    """Mean time of one step in which ``batch`` sequences of about ``context`` tokens sample one token each, in ms."""
    rng = random.Random(1)
    prompts = [[rng.randrange(1024) for _ in range(context)] for _ in range(batch)]

    async def seconds(new_tokens: int, run: str) -> float:
        sampling = SamplingParams(new_tokens, seed=0)
        start = time.perf_counter()
        await asyncio.gather(
            *(engine.generate(GenerateRequest(f"{run}-{i}", p, sampling)) for i, p in enumerate(prompts))
        )
        return time.perf_counter() - start

    await seconds(1, "warm")  # afterwards all prompts are cached
    prefill = min([await seconds(1, f"prefill{n}") for n in range(3)])
    return 1000 * (await seconds(1 + steps, "decode") - prefill) / steps


async def _main(arguments: argparse.Namespace) -> None:
    config = tiny_config(arguments.experts)
    if arguments.experts_implementation:
        config._experts_implementation = arguments.experts_implementation
    engine = TransformersEngine.from_config(config, max_batch_size=arguments.episodes)
    try:
        decode = await decode_milliseconds(engine, arguments.episodes)
        figures = await run(engine, arguments.episodes, arguments.group)
        print(json.dumps({"threads": torch.get_num_threads(), "decode_ms_per_step": round(decode, 3), **figures}))
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=32, help="concurrent episodes, and the largest batch")
    parser.add_argument("--group", type=int, default=8, help="episodes of each prompt")
    parser.add_argument("--experts", type=int, default=16, help="experts per layer")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--experts-implementation", choices=["eager", "batched_mm", "grouped_mm"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    asyncio.run(_main(arguments))


if __name__ == "__main__":
    main()
