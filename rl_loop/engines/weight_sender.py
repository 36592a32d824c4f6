"""The trainer's side of a weight sync: Hugging Face tensors, bucket by bucket, into SGLang servers.

    pause by abort -> buckets, names and shapes checked -> drop the prefix cache -> name the new version -> go on

A server is paused all the while, and only the last steps give its weights a version: answers come wholly from before or
wholly from after. If anything fails, the servers stay paused, and whoever asked must not let them serve.
"""

from __future__ import annotations

import asyncio
import base64
import io
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions, set_sharing_strategy

from converters.hf_directory import write_hf_directory
from converters.names import hf_shapes
from megatron_gptoss.config import ModelConfig
from rl_loop.engines.sglang_client import SglangClient

TransportName = Literal["nccl", "gloo", "cuda_ipc", "shared_memory", "disk"]
Bucket = list[tuple[str, torch.Tensor]]


class SyncFailed(RuntimeError):
    """The servers may hold a mixture of old and new weights."""


class WeightMismatch(ValueError):
    """The weights are none of this model; the message names the tensor."""


@dataclass(frozen=True)
class SyncPlan:
    """Which servers get weights ``version``, and how.

    ``bucket_bytes`` bounds what sender and server hold besides their models, or the largest tensor if that is larger:
    the gate and up projections of one layer's experts, 1.06 GB in the 20B. ``directory`` is for ``disk`` and must be
    seen by all. ``seconds``: for one bucket. ``host``, ``port``: where the sender listens for a process group.
    """

    urls: tuple[str, ...]
    version: int
    transport: TransportName
    tensor_parallel: int = 1
    bucket_bytes: int = 1 << 30
    directory: Path = Path("weights")
    seconds: float = 120.0
    host: str = "127.0.0.1"
    port: int = 0


async def send_weights(
    named: Iterable[tuple[str, torch.Tensor]], config: ModelConfig, plan: SyncPlan
) -> dict[str, float]:
    """Returns bytes and seconds. Raises SyncFailed naming the server or WeightMismatch naming the tensor; ``named`` is
    not read further then."""
    clients = [SglangClient(url, plan.seconds) for url in plan.urls]
    clock = asyncio.get_running_loop().time
    began = clock()

    async def all_servers(path: str, body: dict[str, Any]) -> None:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.call(path, body, seconds=plan.seconds))

    transport: Transport = (
        Broadcast(plan, clients) if plan.transport in ("nccl", "gloo") else Handles(plan, all_servers)
    )
    sent = 0
    try:
        await all_servers("/pause_generation", {"mode": "abort"})
        if plan.transport == "disk":
            sent = await _through_disk(checked(named, config), config, plan, all_servers)
        else:
            await transport.open()
            for bucket in buckets(checked(named, config), plan.bucket_bytes):
                await transport.send(bucket)
                sent += sum(tensor.nbytes for _, tensor in bucket)
            await transport.finish()
        await all_servers("/flush_cache", {})
        await all_servers("/update_weight_version", {"new_version": str(plan.version), "abort_all_requests": False})
        await all_servers("/continue_generation", {"torch_empty_cache": False})
    except* Exception as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, WeightMismatch):
            raise first from None
        raise SyncFailed(f"weights {plan.version} did not reach all servers: {first}") from first
    finally:
        transport.close()
        for client in clients:
            await client.close()
    return {"bytes": sent, "seconds": clock() - began}


def checked(named: Iterable[tuple[str, torch.Tensor]], config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors. Raises WeightMismatch at the first that is unknown, repeated or wrongly shaped, and at the end
    if one is missing: SGLang itself answers "success" to names that it does not know."""
    missing = hf_shapes(config)
    known = set(missing)
    for name, tensor in named:
        if name not in known:
            raise WeightMismatch(f"tensor {name} is none of GPT-OSS with {config.num_layers} layers")
        expected = missing.pop(name, None)
        if expected is None:
            raise WeightMismatch(f"tensor {name} came twice")
        if tuple(tensor.shape) != tuple(expected):
            raise WeightMismatch(f"tensor {name} has shape {list(tensor.shape)}, the engine expects {list(expected)}")
        yield name, tensor
    if missing:
        raise WeightMismatch(f"{len(missing)} tensors are missing, the first is {next(iter(missing))}")


def buckets(named: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[Bucket]:
    """In order; each at most ``limit`` bytes or one tensor."""
    bucket: Bucket = []
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
        del tensor  # or it would outlive its bucket
    if bucket:
        yield bucket


class Transport(Protocol):
    async def open(self) -> None: ...

    async def send(self, bucket: Bucket) -> None:
        """Returns when every server has loaded the bucket."""
        ...

    async def finish(self) -> None: ...

    def close(self) -> None: ...


class Broadcast:
    """Over a process group of this process (rank 0) and every rank of every server."""

    def __init__(self, plan: SyncPlan, clients: list[SglangClient]) -> None:
        self._plan, self._clients = plan, clients
        self._group: Any = None
        self._finished = False
        self._name = f"weights_{plan.version}_{uuid.uuid4().hex[:8]}"

    async def open(self) -> None:
        plan = self._plan
        world = 1 + len(self._clients) * plan.tensor_parallel
        async with asyncio.TaskGroup() as tasks:
            for i, client in enumerate(self._clients):
                body = {
                    "master_address": plan.host,
                    "master_port": plan.port,
                    "rank_offset": 1 + i * plan.tensor_parallel,
                    "world_size": world,
                    "group_name": self._name,
                    "backend": plan.transport,
                }
                tasks.create_task(client.call("/init_weights_update_group", body, seconds=plan.seconds))
            self._group = await asyncio.to_thread(self._join, world)

    def _join(self, world: int) -> Any:
        # torch has no public call for a group of processes that share no default group; servers make theirs like this
        helper: Any = dist.distributed_c10d._new_process_group_helper
        timeout = timedelta(seconds=self._plan.seconds)
        store = dist.TCPStore(self._plan.host, self._plan.port, world, is_master=True, timeout=timeout)
        prefixed = dist.PrefixStore(self._name, store)
        backend = dist.Backend(self._plan.transport)
        group, _ = helper(world, 0, [], backend, prefixed, group_name=self._name, timeout=timeout)
        dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
        return group

    async def send(self, bucket: Bucket) -> None:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
            "flush_cache": False,
        }
        async with asyncio.TaskGroup() as tasks:
            for client in self._clients:
                call = client.call("/update_weights_from_distributed", body, seconds=self._plan.seconds)
                tasks.create_task(call)
            await asyncio.to_thread(self._broadcast, bucket)

    async def finish(self) -> None:
        for client in self._clients:
            await client.call("/destroy_weights_update_group", {"group_name": self._name}, seconds=self._plan.seconds)
        self._finished = True

    def _broadcast(self, bucket: Bucket) -> None:
        for work in [self._group.broadcast(tensor.contiguous(), 0) for _, tensor in bucket]:
            work.wait()
        if self._plan.transport == "nccl":
            torch.cuda.synchronize()

    def close(self) -> None:
        if self._group is None:
            return
        with suppress(RuntimeError):
            if not self._finished:  # a member may be dead, and the thread that broadcasts waits for it
                self._group.abort()
            dist.destroy_process_group(self._group)


class Handles:
    """The server opens the memory of the tensors: GPU memory of the same node, or host memory."""

    def __init__(self, plan: SyncPlan, all_servers: Callable[[str, dict[str, Any]], Awaitable[None]]) -> None:
        self._plan, self._all_servers = plan, all_servers

    async def open(self) -> None:
        set_sharing_strategy("file_system")  # with file descriptors the server would have to be our child

    async def send(self, bucket: Bucket) -> None:
        kept = bucket if self._plan.transport == "cuda_ipc" else [(name, tensor.cpu()) for name, tensor in bucket]
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump([(name, _Handle(tensor.contiguous())) for name, tensor in kept])
        payload = base64.b64encode(buffer.getvalue()).decode()
        body = {"serialized_named_tensors": [payload] * self._plan.tensor_parallel, "flush_cache": False}
        await self._all_servers("/update_weights_from_tensor", body)

    async def finish(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class _Handle:
    """Pickles as a tensor in shared memory, on a device that is named by UUID: numbers differ between processes."""

    tensor: torch.Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = reductions.reduce_tensor(self.tensor)
        if self.tensor.is_cuda:
            device = str(torch.cuda.get_device_properties(self.tensor.device).uuid)
            arguments = (*arguments[:6], device, *arguments[7:])
        return rebuild, arguments


async def _through_disk(
    named: Iterator[tuple[str, torch.Tensor]],
    config: ModelConfig,
    plan: SyncPlan,
    all_servers: Callable[[str, dict[str, Any]], Awaitable[None]],
) -> int:
    await asyncio.to_thread(write_hf_directory, plan.directory, config, named, overwrite=True)
    # servers start with --load-format dummy, which would hold here too
    body = {"model_path": str(plan.directory), "load_format": "auto", "flush_cache": False}
    await all_servers("/update_weights_from_disk", body)
    return sum(file.stat().st_size for file in plan.directory.glob("*.safetensors"))
