"""The real SGLang server on a CPU uses the recorded protocol. ``sglang_cpu`` adds sink attention.

Opt-in: GPTOSS_SGLANG_PYTHON names the interpreter of an environment with sglang==0.5.17 (without sglang-kernel).

    GPTOSS_SGLANG_PYTHON=/path/bin/python pytest -m slow tests/rl_loop/engines/test_sglang_real.py
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
import torch

from converters.names import hf_shapes
from converters.random_weights import random_hf_weights
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.embedded.engine import TransformersEngine
from rl_loop.engines.protocol import GenerateRequest, SamplingParams
from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.engine import SglangEngine
from rl_loop.engines.sglang.server import ServerState, ServerStatus, SglangServer
from rl_loop.engines.sglang.server_command import server_command
from rl_loop.engines.sglang.weight_endpoints import send_weights
from rl_loop.weight_sync.servers import SyncPlan
from rl_loop.weight_sync.source import WeightMismatchError

PYTHON = os.environ.get("GPTOSS_SGLANG_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="GPTOSS_SGLANG_PYTHON is not set"),
]

MODEL = GptOssModelConfig(
    num_layers=4, num_experts=4, experts_per_token=2, hidden_size=64, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, head_size=32, vocab_size=1024, sliding_window=16, max_length=2048,
    yarn_original_length=1024, yarn_factor=2.0, initializer_std=0.08,
)  # fmt: skip
PROMPT = list(range(10, 60))


def draw_weights(seed: int) -> dict[str, torch.Tensor]:
    get = random_hf_weights(MODEL, seed)
    return {name: get(name).to(torch.bfloat16) for name in hf_shapes(MODEL)}


async def reference(weights: dict[str, torch.Tensor], tokens: list[int]) -> list[float]:
    from transformers import GptOssConfig

    engine = TransformersEngine.from_config(GptOssConfig(**MODEL.to_hf_config()))
    await engine.sync_weights(weights.items(), 0)
    scores = await engine.score(tokens)
    await engine.close()
    return scores


def gap(a: list[float], b: list[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


def test_real_server_generates_aborts_scores_and_loads_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL.to_hf_config(dtype="bfloat16")))
    arguments = ["--device", "cpu", "--max-total-tokens", "4096", "--max-running-requests", "8"]
    settings = SglangConfig(
        python=PYTHON, attention_backend="intel_amx", memory_fraction=0.5, arguments=arguments
    )
    command = server_command(settings, 0, tmp_path, "bf16", routed_experts=False, seed=0)
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[2] / "support/rl_loop/sglang_cpu"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
    }

    async def main() -> None:
        server = SglangServer(command, environment, tmp_path / "log", health_seconds=30)
        try:
            while (await server.status()).state is not ServerState.UNSYNCED:
                assert not (await server.status()).fault, (await server.status()).fault
                await asyncio.sleep(0.5)
            await exercise((await server.status()).url)
        finally:
            await server.stop()

    async def exercise(url: str) -> None:
        async def servers() -> list[ServerStatus]:
            return [ServerStatus(url, ServerState.SYNCED, 1, 9)]

        engine = SglangEngine(servers, MODEL)
        for version, transport in enumerate(["gloo", "shared_memory", "disk", "gloo"], start=1):
            weights = draw_weights(version)
            plan = SyncPlan(
                urls=(url,),
                version=version,
                transport=transport,
                bucket_bytes=200_000,
                directory=tmp_path / "weights",
            )
            running = None
            if version > 1:
                request = GenerateRequest(f"r/0/0/{version}", PROMPT, SamplingParams(1500))
                running = asyncio.ensure_future(engine.generate(request))
                await asyncio.sleep(1)
            sent = {
                n: t.mT.contiguous().mT if n.endswith("_proj") else t for n, t in weights.items()
            }  # the matrices of experts are not contiguous
            await send_weights(
                (sent if transport == "shared_memory" else weights).items(), MODEL, plan
            )
            if running is not None:
                part = await running
                assert part.finish_reason is FinishReason.ABORT
                assert 0 < len(part.output_ids) < 1500
                assert [span.version for span in part.weight_versions] == [version - 1]
            scores = await engine.score(PROMPT)
            assert gap(scores, await reference(weights, PROMPT)) < 0.02
            assert gap(scores, await reference(draw_weights(version + 1), PROMPT)) > 0.2

        everything = SyncPlan(urls=(url,), version=4, transport="none")
        held = draw_weights(4)
        await send_weights(held.items(), MODEL, everything)
        last = "model.layers.3.mlp.experts.down_proj"
        with pytest.raises(WeightMismatchError, match=f"but its content differs in {last}$"):
            await send_weights((held | {last: held[last] + 1}).items(), MODEL, everything)
        client = SglangClient(url)  # a mismatch leaves the server paused
        await client.call("/continue_generation", {"torch_empty_cache": False})
        await client.close()

        first = await engine.generate(GenerateRequest("e/0/0/0", PROMPT, SamplingParams(40)))
        assert (first.finish_reason, len(first.output_ids)) == (FinishReason.LENGTH, 40)
        tokens = PROMPT + first.output_ids
        expected = await reference(draw_weights(4), tokens)
        assert gap(first.output_log_probs, expected[len(PROMPT) - 1 :]) < 0.02
        assert gap(first.output_log_probs, (await engine.score(tokens))[len(PROMPT) - 1 :]) < 0.005
        stops = tuple(range(500, 1024))
        second = await engine.generate(
            GenerateRequest("e/0/1/0", [*tokens, 5, 6], SamplingParams(40, stop_token_ids=stops))
        )
        assert second.finish_reason is FinishReason.STOP
        assert second.output_ids[-1] in stops
        assert second.cached_tokens >= 0.9 * len(tokens)
        long = asyncio.ensure_future(
            engine.generate(GenerateRequest("e/1/0/0", PROMPT, SamplingParams(1500)))
        )
        await asyncio.sleep(1)
        await engine.abort("e/1/0/0")
        aborted = await long
        assert aborted.finish_reason is FinishReason.ABORT
        assert 0 < len(aborted.output_ids) == len(aborted.output_log_probs) < 1500
        await engine.close()

    asyncio.run(main())
