"""A model, weights and syncs for tests of servers with MXFP4 experts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from converters.mxfp4_tensors import quantize_experts
from converters.names import hf_shapes
from converters.random_weights import random_hf_weights
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.weight_sync.servers import SyncPlan
from tests.support.rl_loop.mxfp4_server import Mxfp4Server

MODEL = GptOssModelConfig(
    num_layers=2, num_experts=3, experts_per_token=2, hidden_size=96, intermediate_size=192, num_attention_heads=4,
    num_key_value_heads=2, head_size=16, vocab_size=640, max_length=1024,
)  # fmt: skip
"""Model whose rows and blocks do not fill the layouts.

With two ranks, a rank has 96 of 192 intermediate columns, padded to 128.
"""


def mxfp4_weights(seed: int) -> dict[str, torch.Tensor]:
    get = random_hf_weights(MODEL, seed)
    return quantize_experts({name: get(name).to(torch.bfloat16) for name in hf_shapes(MODEL)})


def plan_for(url: str, ranks: int = 1, **changes: Any) -> SyncPlan:
    plan = SyncPlan(
        urls=(url,),
        version=2,
        transport="shared_memory",
        tensor_parallel=ranks,
        bucket_bytes=20_000,
        mxfp4_experts=True,
    )
    return replace(plan, **changes)


def run_with_server(ranks: int, work: Callable[[Mxfp4Server], Any]) -> None:
    async def main() -> None:
        server = Mxfp4Server(MODEL, ranks)
        await server.start()
        try:
            await work(server)
        finally:
            await server.stop()

    asyncio.run(main())
