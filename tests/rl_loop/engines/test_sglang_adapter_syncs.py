"""Which tensors a fleet of SGLang servers sends in a run with unmerged adapters, and memory that stays allocated."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_gptoss.config import AdapterConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.engines.backend import BackendContext
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.fleet import CurrentWeights, SglangFleet
from rl_loop.engines.sglang.gpu_memory import ServerNeeds
from rl_loop.engines.sglang.server_actors import adapter_environment
from rl_loop.engines.sglang.weight_endpoints import SglangSender

MODEL_20B = GptOssModelConfig(num_layers=24, num_experts=32)
ADAPTER = AdapterConfig(rank=32, merge_experts=False)
SEPARATE: dict[str, Any] = {}
COLOCATED: dict[str, Any] = {"colocated": True}
KEPT: dict[str, Any] = {"colocated": True, "keep_weights": True}
DISK: dict[str, Any] = {"weight_sync": "disk"}


class Fleet(SglangFleet):
    """A fleet without servers that records its requests and the plans of its syncs."""

    def __init__(
        self, settings: SglangConfig, directory: Path, adapter: AdapterConfig | None
    ) -> None:
        context = BackendContext(MODEL_20B, "bf16", 0, directory, adapter=adapter)
        servers: Any = SimpleNamespace(actors=["server"], api_key="key")
        super().__init__(servers, settings, context)
        self.senders: list[SglangSender] = []
        self.tags: list[str] = []

    def _resume_memory(self, urls: tuple[str, ...], tags: list[str]) -> None:
        self.tags += tags

    def sync_version(self, version: int, incarnation: int = 0) -> SglangSender:
        source = SimpleNamespace(send_weights=self.senders.append)
        self._current = CurrentWeights(source, version)
        status = SimpleNamespace(url="http://server", incarnation=incarnation)
        self._wake_and_send({"server": status}, version)
        return self.senders[-1]


def fleet(tmp_path: Path, adapter: AdapterConfig | None = ADAPTER, **settings: Any) -> Fleet:
    return Fleet(SglangConfig(quantization="mxfp4", **settings), tmp_path, adapter)


@pytest.mark.parametrize(
    ("settings", "adapter", "expected"),
    [
        # The first sync and every seventh version compare checksums, and need all tensors.
        (SEPARATE, ADAPTER, [False, True, True, False, True]),
        (KEPT, ADAPTER, [False, True, True, False, True]),
        (COLOCATED, ADAPTER, [False] * 5),
        (DISK, ADAPTER, [False] * 5),
        (SEPARATE, None, [False] * 5),
    ],
    ids=["separate", "kept", "released", "disk", "full_training"],
)
def test_base_is_sent_once_if_servers_keep_it(
    settings: dict[str, Any], adapter: AdapterConfig | None, expected: list[bool], tmp_path: Path
) -> None:
    servers = fleet(tmp_path, adapter, **settings)
    senders = [servers.sync_version(version) for version in (1, 2, 3, 7, 8)]
    assert [sender.adapters_only for sender in senders] == expected
    for sender in senders:
        assert sender.mxfp4_experts
        assert sender.plans[0].adapter == adapter
        assert not (sender.plans[0].compare and sender.adapters_only)


def test_restarted_server_gets_the_base_again(tmp_path: Path) -> None:
    servers = fleet(tmp_path)
    servers.sync_version(1)
    assert servers.sync_version(2).adapters_only
    assert not servers.sync_version(3, incarnation=1).adapters_only
    assert servers.sync_version(4, incarnation=1).adapters_only


@pytest.mark.parametrize("kept", [False, True])
def test_kept_weights_are_neither_released_nor_restored(kept: bool, tmp_path: Path) -> None:
    servers = fleet(tmp_path, **(KEPT if kept else COLOCATED))
    servers.sync_version(1)
    assert ("weights" in servers.tags) is not kept

    calls: list[tuple[str, dict[str, Any]]] = []

    class Client:
        async def call(self, path: str, body: dict[str, Any], seconds: float) -> None:
            calls.append((path, body))

    assert asyncio.run(servers._pause_server(Client())) is None
    released = dict(calls)["/release_memory_occupation"]["tags"]
    assert ("weights" in released) is not kept
    assert {"kv_cache", "cuda_graph"} <= set(released)


def test_kept_weights_count_as_memory_of_sleeping_servers() -> None:
    """The server's adapters have rank 16 in memory, and a rank of two has half of three of the four factors."""
    plain, kept = (
        SglangConfig(quantization="mxfp4", **settings).memory_on_trainer_gpus(
            MODEL_20B, "bf16", ADAPTER
        )
        for settings in (COLOCATED, KEPT)
    )
    assert kept.weight_bytes == 0
    assert kept.paused_bytes == plain.paused_bytes + plain.weight_bytes

    without = ServerNeeds.of(MODEL_20B, "bf16", 1, mxfp4_experts=True)
    factors = 24 * 32 * 16 * 2 * (2880 + 5760 + 2880 + 2880)
    assert plain.weight_bytes == without.weights + factors
    halves = [
        ServerNeeds.of(MODEL_20B, "bf16", 2, mxfp4_experts=True, adapter=a) for a in (None, ADAPTER)
    ]
    more = halves[1].weights - halves[0].weights
    assert more == 24 * 32 * 16 * 2 * (2880 + 2 * 1472 + 1472 + 2880)


def test_servers_get_rank_and_scale_of_unmerged_adapters() -> None:
    variables = adapter_environment(MODEL_20B, ADAPTER)
    assert json.loads(variables["GPTOSS_EXPERT_ADAPTER"]) == {"rank": 8, "scale": 4.0}
    assert adapter_environment(MODEL_20B, None) == {}
