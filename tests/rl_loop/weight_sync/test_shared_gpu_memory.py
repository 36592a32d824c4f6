"""Reference counts of GPU memory that servers open during a sync.

torch counts in a file of shared memory, which needs no GPU. The tests use the counts and releases
of torch. Only the counted memory is on the host.
"""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from aiohttp import web
from torch.multiprocessing import reductions, set_sharing_strategy

from converters.names import hf_shapes
from converters.random_weights import random_hf_weights
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.engines.sglang.weight_endpoints import send_weights
from rl_loop.weight_sync.servers import SyncPlan
from rl_loop.weight_sync.source import SyncError
from rl_loop.weight_sync.transports import SHARING_ATTEMPTS, _SharedTensor, memory_user_count
from tests.support.rl_loop.sglang_protocol import LocalServer

MODEL = GptOssModelConfig(
    num_layers=2, num_experts=2, experts_per_token=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
    num_key_value_heads=2, head_size=16, vocab_size=640, max_length=1024,
)  # fmt: skip
COUNTS_OF_A_FILE = 10_000
"""Counts per file of torch (CUDA_IPC_REF_COUNTER_FILE_SIZE)."""


class Counts:
    """torch's reference counts of memory that other processes use."""

    def __init__(self) -> None:
        self.values = torch.zeros(COUNTS_OF_A_FILE, dtype=torch.int64)
        _, self.file, _ = self.values.untyped_storage()._share_filename_cpu_()
        self._next = itertools.count()

    def new(self) -> int:
        """Return the index of a new count with one user, as for each new handle."""
        index = next(self._next)
        self.values[index] = 1
        return index


class OnGpu(torch.Tensor):
    """A host tensor that reports to be on a GPU."""

    is_cuda = True


def open_counted(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Open memory counted by ``counts`` like a server. Return a copy and release the memory."""
    file, index = rest[-2:]
    copy = tensor.clone()
    torch.UntypedStorage._release_ipc_counter(file, index, device=torch.device("cuda"))
    return copy


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    set_sharing_strategy("file_system")
    counts = Counts()

    def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
        nothing = (None,) * 10
        arguments = (tensor.as_subclass(torch.Tensor), *nothing, counts.file, counts.new())
        return open_counted, arguments

    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU"))
    yield counts


class Server(LocalServer):
    """A server that may reject a bucket before or after it has opened the memory."""

    refuses = ""

    async def update_weights_from_tensor(self, request: web.Request) -> web.Response:
        if self.refuses != "unopened":
            answer = await super().update_weights_from_tensor(request)
        if self.refuses:
            return web.json_response({"success": False, "message": "no"}, status=400)
        return answer


async def sync(
    servers: list[Server], ranks: int, transport: Literal["cuda_ipc", "shared_memory"] = "cuda_ipc"
) -> None:
    get = random_hf_weights(MODEL, 1)
    # Biases begin as zeros, and later ranks overwrite tensors with zeros, so shift all values.
    weights = {name: get(name).bfloat16() + 0.5 for name in hf_shapes(MODEL)}
    sent = {name: tensor.clone() for name, tensor in weights.items()}
    if transport == "cuda_ipc":
        sent = {name: tensor.as_subclass(OnGpu) for name, tensor in sent.items()}
    for server in servers:
        server.ranks = ranks
    plan = SyncPlan(
        urls=tuple([await server.start() for server in servers]),
        version=2,
        transport=transport,
        bucket_bytes=20_000,
        tensor_parallel=ranks,
        compare=False,
    )
    try:
        await send_weights(sent.items(), MODEL, plan)
    finally:
        for server in servers:
            await server.stop()

    for server in servers:
        assert server.version == "2"
        assert all(torch.equal(server.weights[name], weights[name]) for name in weights)
    assert all(torch.equal(sent[name], weights[name]) for name in weights)


@pytest.mark.parametrize(("servers", "ranks"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_each_rank_of_each_server_is_counted_once_and_released(
    servers: int, ranks: int, counts: Counts
) -> None:
    asyncio.run(sync([Server() for _ in range(servers)], ranks))
    handles = next(counts._next)
    assert handles == len(hf_shapes(MODEL)) * servers * ranks
    assert counts.values.tolist() == [0] * COUNTS_OF_A_FILE


def test_overwriting_by_later_ranks_does_not_change_the_weights() -> None:
    asyncio.run(sync([Server(), Server()], ranks=2, transport="shared_memory"))


@pytest.mark.parametrize("timeouts", [2, SHARING_ATTEMPTS])
def test_timeouts_of_torchs_manager_are_retried(
    timeouts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = torch.UntypedStorage._share_filename_cpu_
    calls = itertools.count()

    def time_out_first(storage: torch.UntypedStorage) -> Any:
        if next(calls) < timeouts:
            raise RuntimeError("Shared memory manager connection has timed out")
        return share(storage)

    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", time_out_first)
    transfer = sync([Server()], ranks=1, transport="shared_memory")
    if timeouts < SHARING_ATTEMPTS:
        asyncio.run(transfer)
    else:
        with pytest.raises(RuntimeError, match="timed out"):
            asyncio.run(transfer)
        assert next(calls) == SHARING_ATTEMPTS


@pytest.mark.parametrize("refuses", ["unopened", "opened"])
def test_counts_are_zero_after_a_failed_sync(refuses: str, counts: Counts) -> None:
    """A dead server has opened none or all of the memory. Its counts must be released once."""
    good, bad = Server(), Server()
    bad.refuses = refuses
    with pytest.raises(SyncError):
        asyncio.run(sync([good, bad], ranks=2))
    assert next(counts._next) > 0
    assert counts.values.tolist() == [0] * COUNTS_OF_A_FILE


def test_users_of_a_deleted_count_file_are_zero() -> None:
    assert memory_user_count(b"/torch_no_such_file", 3) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("opened", [False, True])
def test_memory_shared_with_a_killed_server_is_freed(opened: bool) -> None:
    tensor = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated() - tensor.nbytes
    handles = [_SharedTensor(tensor), _SharedTensor(tensor)]
    for handle in handles:
        ForkingPickler(io.BytesIO()).dump(handle)
        assert memory_user_count(*handle.counter_location) == 1

    for handle in handles:
        if opened:
            torch.UntypedStorage._release_ipc_counter(
                *handle.counter_location, device=tensor.device
            )
        handle.allow_free()
        assert memory_user_count(*handle.counter_location) == 0
    del tensor, handles, handle
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before
