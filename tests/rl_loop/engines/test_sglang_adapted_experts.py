"""Unmerged adapters of MXFP4 experts sent to SGLang servers: values, shards, faults.

The plugin's code runs as in a server, in main memory.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from converters.expert_adapters import changed_names, expert_adapter_shapes
from megatron_gptoss.config import AdapterConfig
from rl_loop.engines.sglang.server_layout import EXPERT_ADAPTERS
from rl_loop.engines.sglang.weight_endpoints import SglangServers, send_weights
from rl_loop.weight_sync.source import SyncError, WeightMismatchError
from tests.support.rl_loop.mxfp4_server import (
    Mxfp4Server,
    ServedModel,
    SyncedModel,
    expert_storage,
)
from tests.support.rl_loop.mxfp4_sync import MODEL, mxfp4_weights, plan_for, run_with_server

RANK = 3
ADAPTER = AdapterConfig(
    rank=8, expert_rank=RANK, targets=("q", "router", "experts"), merge_experts=False
)
PREFIX = "model.layers.0.mlp.experts."


@pytest.fixture(autouse=True)
def adapted_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTOSS_EXPERT_ADAPTER", json.dumps({"rank": RANK, "scale": 4.0}))


def adapters(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = expert_adapter_shapes(MODEL, RANK)
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    return mxfp4_weights(1) | adapters(seed)


def test_trainer_and_server_name_adapters_equally() -> None:
    assert expert_storage.ADAPTER_SYNC_NAMES == EXPERT_ADAPTERS


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_servers_hold_the_adapters_that_were_sent(
    transport: str, ranks: int, tmp_path: Path
) -> None:
    """Checksums cover all adapters of every rank, also after a sleep, and other adapters differ."""

    async def work(server: Mxfp4Server) -> None:
        plan = plan_for(server.url, ranks, transport=transport, directory=tmp_path / "weights")
        plan = replace(plan, adapter=ADAPTER)
        everything = replace(plan, transport="none")
        await send_weights(weights().items(), MODEL, plan)
        await send_weights(weights().items(), MODEL, everything)
        with pytest.raises(WeightMismatchError, match=r"differs in model\.layers\.\d\.mlp.*lora_A"):
            await send_weights(weights(seed=1).items(), MODEL, everything)

        servers = SglangServers(MODEL, plan)
        await servers.call("/release_memory_occupation", {})
        await servers.call("/resume_memory_occupation", {})
        await servers.close()
        await send_weights(weights(seed=1).items(), MODEL, plan)
        await send_weights(weights(seed=1).items(), MODEL, everything)

    run_with_server(ranks, work)


def test_adapters_of_all_ranks_make_the_whole() -> None:
    sent = weights()
    parts: list[dict[str, torch.Tensor]] = []
    for rank in range(2):
        synced = SyncedModel(ServedModel(MODEL, rank, 2))
        for _ in synced.load_experts(sent.items()):
            pass
        experts = synced.experts[0]
        for name in expert_storage.ADAPTER_SYNC_NAMES:
            # Kernels read all of the memory, whose rest must be zero.
            storage = experts.storage[name]
            assert storage.count_nonzero() == experts.read(name)[0].count_nonzero()
        parts.append({name: experts.read(name)[0] for name in expert_storage.ADAPTER_SYNC_NAMES})

    first, second = parts
    for name, dimension in {"w13_lora_b": 1, "w2_lora_a": 2}.items():
        whole = torch.cat([first[name], second[name]], dimension)
        assert torch.equal(whole, sent[PREFIX + EXPERT_ADAPTERS[name]])
    for name in ("w13_lora_a", "w2_lora_b"):
        for part in parts:
            assert torch.equal(part[name], sent[PREFIX + EXPERT_ADAPTERS[name]])


def test_gemms_of_a_layer_get_the_loaded_adapters() -> None:
    model = ServedModel(MODEL)
    synced = SyncedModel(model)
    for _ in synced.load_experts(weights().items()):
        pass
    method = model.get_submodule("model.layers.0.mlp.experts").quant_method
    for name in ("w13", "w2"):
        adapter = getattr(method, f"{name}_precision_config").gptoss_adapter
        assert adapter.scale == 4.0
        assert adapter.a is synced.experts[0].storage[f"{name}_lora_a"]
        assert adapter.b is synced.experts[0].storage[f"{name}_lora_b"]


@pytest.mark.parametrize("name", list(EXPERT_ADAPTERS))
def test_wrong_padding_of_an_adapter_is_named(name: str) -> None:
    async def work(server: Mxfp4Server) -> None:
        plan = replace(plan_for(server.url, ranks=2), adapter=ADAPTER)
        await send_weights(weights().items(), MODEL, plan)
        server.synced[1].experts[0].storage[name][0, -1, -1] = 1
        with pytest.raises(WeightMismatchError, match=r"wrong padding: 1 elements"):
            await send_weights(weights().items(), MODEL, replace(plan, transport="none"))

    run_with_server(2, work)


def test_missing_adapter_is_named_and_the_server_does_not_serve() -> None:
    lost = f"{PREFIX}down_proj.lora_B"

    async def work(server: Mxfp4Server) -> None:
        some = {name: tensor for name, tensor in weights().items() if name != lost}
        plan = replace(plan_for(server.url), adapter=ADAPTER)
        with pytest.raises(WeightMismatchError, match=f"lack the tensor {lost}"):
            await send_weights(some.items(), MODEL, plan)
        # A trainer that sends no adapters.
        with pytest.raises(SyncError, match=r"8 tensors are missing"):
            await send_weights(mxfp4_weights(1).items(), MODEL, plan_for(server.url))
        assert server.version == "default"
        assert not server.paused.is_set()

    run_with_server(1, work)


def test_server_without_adapters_rejects_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPTOSS_EXPERT_ADAPTER")
    synced = SyncedModel(ServedModel(MODEL))
    with pytest.raises(expert_storage.WrongWeightsError, match=r"has no tensor .*lora_A"):
        list(synced.load_experts(adapters().items()))


def test_adapter_of_another_rank_is_rejected() -> None:
    synced = SyncedModel(ServedModel(MODEL))
    name = f"{PREFIX}gate_up_proj.lora_A"
    wrong = torch.zeros(MODEL.num_experts, RANK + 1, MODEL.hidden_size)
    with pytest.raises(expert_storage.WrongWeightsError, match=r"lora_A has .*\[3, 4, 96\]"):
        list(synced.load_experts([(name, wrong)]))


def test_rank_above_16_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTOSS_EXPERT_ADAPTER", json.dumps({"rank": 17, "scale": 4.0}))
    with pytest.raises(ValueError, match="ranks from 1 to 16 are supported, not 17"):
        ServedModel(MODEL)


def adapters_alone(seed: int) -> dict[str, torch.Tensor]:
    """Return a sync without the base: adapters, and weights with merged adapters of ``seed``."""
    merged = mxfp4_weights(seed)
    return {name: merged[name] for name in changed_names(MODEL, ADAPTER)} | adapters(seed)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sync_of_adapters_keeps_the_base(ranks: int) -> None:
    async def work(server: Mxfp4Server) -> None:
        plan = replace(plan_for(server.url, ranks), adapter=ADAPTER)
        await send_weights(weights().items(), MODEL, plan)
        await send_weights(adapters_alone(2).items(), MODEL, replace(plan, adapters_only=True))
        expected = weights() | adapters_alone(2)
        await send_weights(expected.items(), MODEL, replace(plan, transport="none"))
        with pytest.raises(WeightMismatchError, match="differs in"):
            await send_weights(weights().items(), MODEL, replace(plan, transport="none"))

    run_with_server(ranks, work)


def test_sync_of_adapters_needs_the_base_first() -> None:
    async def work(server: Mxfp4Server) -> None:
        plan = replace(plan_for(server.url), adapter=ADAPTER, adapters_only=True)
        with pytest.raises(SyncError, match="came before one with all tensors"):
            await send_weights(adapters_alone(2).items(), MODEL, plan)

    run_with_server(1, work)


@pytest.mark.parametrize("lost", [f"{PREFIX}down_proj.lora_B", "model.layers.0.mlp.router.weight"])
def test_sync_of_adapters_notices_a_lost_tensor(lost: str) -> None:
    """Both sides count the tensors. Here the server loses one that the trainer has sent."""

    async def work(server: Mxfp4Server) -> None:
        plan = replace(plan_for(server.url), adapter=ADAPTER)
        await send_weights(weights().items(), MODEL, plan)
        some = replace(plan, adapters_only=True)
        sent = {name: tensor for name, tensor in adapters_alone(2).items() if name != lost}
        with pytest.raises(WeightMismatchError, match=f"lack the tensor {lost}"):
            await send_weights(sent.items(), MODEL, some)

        load = server._load
        server._load = lambda tensors: load({k: v for k, v in tensors.items() if k != lost})
        with pytest.raises(SyncError, match="the sync is incomplete"):
            await send_weights(adapters_alone(2).items(), MODEL, some)

    run_with_server(1, work)
