"""Steps of a sync to servers other than SGLang."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.hf_directory import HfDirectory
from converters.names import hf_shapes
from converters.random_weights import random_hf_weights
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.tensor_hash import digest_of_bits
from rl_loop.weight_sync.checksums import RankChecksums
from rl_loop.weight_sync.send import send_to_servers
from rl_loop.weight_sync.servers import Bucket, GroupPlace, SyncPlan, TransportName
from rl_loop.weight_sync.source import SyncError, WeightMismatchError

MODEL = GptOssModelConfig(
    num_layers=2, num_experts=2, experts_per_token=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
    num_key_value_heads=2, head_size=16, vocab_size=640, max_length=1024,
)  # fmt: skip


def draw_weights(seed: int) -> dict[str, torch.Tensor]:
    get = random_hf_weights(MODEL, seed)
    return {name: get(name).to(torch.bfloat16) for name in hf_shapes(MODEL)}


class WholeTensors:
    """Layout of servers that hold Hugging Face's tensors unchanged."""

    def parameters(self, versions: range) -> dict[str, list[str]]:
        return {name: [name] for name in hf_shapes(MODEL)}

    def checksums(self, parameter: str, parts: Sequence[torch.Tensor]) -> list[str]:
        return [digest_of_bits(*parts)]


class MemoryServer:
    """A server in this process that records the steps."""

    overwritten = ()

    def __init__(self, plan: SyncPlan, drops: str = "", fails_at: str = "") -> None:
        self.plan = plan
        self.drops = drops
        self.fails_at = fails_at
        self.held = draw_weights(1)
        self.steps: list[str] = []
        self.version = 1

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if name == self.fails_at:
            raise ConnectionError(f"gone at {name}")

    def _hold(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.held |= {name: tensor.clone() for name, tensor in named if name != self.drops}

    async def begin(self) -> None:
        self._step("begin")

    async def begin_transfer(self) -> None:
        self._step("begin_transfer")

    async def join_group[T](self, places: Sequence[GroupPlace], work: Callable[[], T]) -> T:
        raise NotImplementedError

    async def receive[T](self, group: str, bucket: Bucket, work: Callable[[], T]) -> T:
        raise NotImplementedError

    async def open_memory[T](self, payloads: Sequence[Sequence[str]], work: Callable[[], T]) -> T:
        if self.steps[-1] != "open_memory":
            self._step("open_memory")
        ((payload,),) = payloads
        self._hold(pickle.loads(base64.b64decode(payload)))
        return await asyncio.to_thread(work)

    async def load_directory(self, directory: Path) -> None:
        self._step("load_directory")
        source = HfDirectory(directory)
        self._hold([(name, source.get(name)) for name in source.names()])

    async def end_transfer(self) -> None:
        self._step("end_transfer")

    async def layout(self) -> WholeTensors:
        return WholeTensors()

    async def checksums(self) -> list[list[RankChecksums]]:
        self._step("checksums")
        return [[RankChecksums(0, {name: digest_of_bits(t) for name, t in self.held.items()})]]

    async def publish(self, version: int) -> None:
        self._step("publish")
        self.version = version


def sync(transport: TransportName, directory: Path, **faults: str) -> tuple[MemoryServer, Any]:
    """Send weights 2. Return the server and the error, if any."""
    plan = SyncPlan(
        urls=("memory",), version=2, transport=transport, bucket_bytes=20_000, directory=directory
    )
    server = MemoryServer(plan, **faults)
    try:
        asyncio.run(send_to_servers(draw_weights(2).items(), MODEL, server))
    except (SyncError, WeightMismatchError) as error:
        return server, error
    return server, None


@pytest.mark.parametrize(
    ("transport", "step"), [("shared_memory", "open_memory"), ("disk", "load_directory")]
)
def test_send_publishes_after_transfer_and_checksums(
    transport: TransportName, step: str, tmp_path: Path
) -> None:
    server, error = sync(transport, tmp_path / "weights")
    assert error is None
    assert server.steps == ["begin", "begin_transfer", step, "end_transfer", "checksums", "publish"]
    assert server.version == 2
    assert all(torch.equal(server.held[name], tensor) for name, tensor in draw_weights(2).items())


def test_send_names_a_dropped_tensor_and_publishes_nothing(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    server, error = sync("shared_memory", tmp_path, drops=name)
    assert isinstance(error, WeightMismatchError)
    assert str(error) == f"memory received weights 2, but its content differs in {name}"
    assert server.steps[-1] == "checksums"


@pytest.mark.parametrize(
    "step", ["begin", "begin_transfer", "open_memory", "end_transfer", "checksums"]
)
def test_send_publishes_nothing_after_a_failed_step(step: str, tmp_path: Path) -> None:
    server, error = sync("shared_memory", tmp_path, fails_at=step)
    assert isinstance(error, SyncError)
    assert str(error) == f"weights 2 did not reach all servers: gone at {step}"
    assert server.steps[-1] == step
    assert server.version == 1
