"""The trainer's side of a weight sync: Hugging Face tensors, bucket by bucket, into SGLang servers.

    pause by abort -> buckets, names and shapes checked -> compare a sample -> drop the prefix cache
    -> name the new version -> go on

A server is paused all the while, and only the last steps give its weights a version: answers come wholly from before or
wholly from after. If anything fails, the servers stay paused, and whoever asked must not let them serve."""

import asyncio
import base64
import io
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions, set_sharing_strategy

from converters.hf_directory import write_hf_directory
from converters.names import hf_shapes
from megatron_gptoss.config import ModelConfig
from rl_loop.engines.sglang_client import SglangClient
from rl_loop.engines.weight_checksums import WeightSample

TransportName = Literal["nccl", "gloo", "cuda_ipc", "shared_memory", "disk"]
Body = dict[str, Any] | Callable[[int], dict[str, Any]]
NamedTensors = Iterable[tuple[str, torch.Tensor]]
Bucket = list[tuple[str, torch.Tensor]]


class SyncFailed(RuntimeError):
    """The servers may hold a mixture of old and new weights."""


class WeightMismatch(ValueError):
    """The weights are none of this model, or a server holds others than it was sent; the message names the tensor."""


@dataclass(frozen=True)
class SyncPlan:
    """Which servers get weights ``version``, and how.

    ``bucket_bytes`` bounds a bucket, or the largest tensor if that is larger: gate and up projections of a layer
    (20B: 1.06 GB). Besides its model a server holds one and the sender two, as the next is made while servers load one.
    ``directory`` is for ``disk`` and must be seen by all. ``seconds``: for one bucket. ``compare``: a sample, by
    checksums. ``host``, ``port``: where the sender listens for a process group."""

    urls: tuple[str, ...]
    version: int
    transport: TransportName
    tensor_parallel: int = 1
    bucket_bytes: int = 1 << 30
    directory: Path = Path("weights")
    seconds: float = 120.0
    compare: bool = True
    host: str = "127.0.0.1"
    port: int = 0


async def send_weights(named: NamedTensors, config: ModelConfig, plan: SyncPlan) -> None:
    """Raises SyncFailed naming the server or WeightMismatch naming the tensor; ``named`` is not read further then."""
    servers = Servers(plan)
    try:
        await servers.call("/pause_generation", {"mode": "abort"})
        watched, sample = checked(named, config), None
        if plan.compare:
            (info, *_), _ = await servers.call("/server_info", None)
            sample = WeightSample(config, plan.version, plan.tensor_parallel, info)
            watched = sample.watch(watched)
        if plan.transport == "disk":
            await asyncio.to_thread(write_hf_directory, plan.directory, config, watched, overwrite=True)
            # servers start with --load-format dummy, which would hold here too
            body = {"model_path": str(plan.directory), "load_format": "auto", "flush_cache": False}
            await servers.call("/update_weights_from_disk", body)
        else:
            send = _broadcast if plan.transport in ("nccl", "gloo") else _share_memory
            await send(buckets(watched, plan.bucket_bytes), servers)
        if sample is not None:
            held, _ = await servers.call("/weights_checker", {"action": "checksum"})
            for url, answer in zip(plan.urls, held, strict=True):
                if lost := sample.first_difference(answer):
                    raise WeightMismatch(f"{url} was sent weights {plan.version} and holds something else in {lost}")
        await servers.call("/flush_cache", {})
        await servers.call("/update_weight_version", {"new_version": str(plan.version), "abort_all_requests": False})
        await servers.call("/continue_generation", {"torch_empty_cache": False})
    except* Exception as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, WeightMismatch):
            raise first from None
        raise SyncFailed(f"weights {plan.version} did not reach all servers: {first}") from first
    finally:
        for client in servers.clients:
            await client.close()


class Servers:
    """Those of a plan, asked all at once."""

    def __init__(self, plan: SyncPlan) -> None:
        self.plan, self.clients = plan, [SglangClient(url, plan.seconds) for url in plan.urls]

    async def call[T](
        self, path: str, body: Body | None, meanwhile: Callable[[], T | None] = lambda: None
    ) -> tuple[list[Any], T | None]:
        """POST ``body``, or what it makes of the server's number, to each, or GET without one; the answers, and the
        result of ``meanwhile``, which runs in a thread at the same time."""
        async with asyncio.TaskGroup() as tasks:
            answers = []
            for number, client in enumerate(self.clients):
                own = body(number) if callable(body) else body
                answers.append(tasks.create_task(client.call(path, own, seconds=self.plan.seconds)))
            result = await asyncio.to_thread(meanwhile)
        return [answer.result() for answer in answers], result


def checked(named: NamedTensors, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
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


def buckets(named: NamedTensors, limit: int) -> Iterator[Bucket]:
    """In order; each at most ``limit`` bytes or one tensor. What is half full goes before the next tensor is made."""
    bucket: Bucket = []
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
        del tensor  # or it would outlive its bucket
        if size > limit // 2:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


async def _broadcast(parts: Iterator[Bucket], servers: Servers) -> None:
    """Over a process group of this process (rank 0) and every rank of every server."""
    plan, finished = servers.plan, False
    world = 1 + len(servers.clients) * plan.tensor_parallel
    group: Any = None
    name = f"weights_{plan.version}_{uuid.uuid4().hex[:8]}"

    def member(number: int) -> dict[str, Any]:
        address = {"master_address": plan.host, "master_port": plan.port, "group_name": name, "backend": plan.transport}
        return address | {"rank_offset": 1 + number * plan.tensor_parallel, "world_size": world}

    def send(bucket: Bucket, following: Iterator[Bucket]) -> Bucket | None:
        for work in [group.broadcast(tensor.contiguous(), 0) for _, tensor in bucket]:
            work.wait()
        if plan.transport == "nccl":
            torch.cuda.synchronize(bucket[0][1].device)
        return next(following, None)

    try:
        joining = partial(_process_group, plan, name, world)
        _, group = await servers.call("/init_weights_update_group", member, joining)
        bucket = next(parts, None)
        while bucket:
            shapes = [list(tensor.shape) for _, tensor in bucket]
            dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
            body = {"names": [name for name, _ in bucket], "dtypes": dtypes, "shapes": shapes, "group_name": name}
            body["flush_cache"] = False
            _, bucket = await servers.call("/update_weights_from_distributed", body, partial(send, bucket, parts))
        await servers.call("/destroy_weights_update_group", {"group_name": name})
        finished = True
    finally:
        if group is not None:
            with suppress(RuntimeError):
                if not finished:  # a member may be dead, and the thread that broadcasts waits for it
                    group.abort()
                dist.destroy_process_group(group)


def _process_group(plan: SyncPlan, name: str, world: int) -> Any:
    # torch has no public call for a group of processes that share no default group; servers make theirs like this
    helper: Any = dist.distributed_c10d._new_process_group_helper
    timeout = timedelta(seconds=plan.seconds)
    store = dist.TCPStore(plan.host, plan.port, world, is_master=True, timeout=timeout)
    backend = dist.Backend(plan.transport)
    group, _ = helper(world, 0, [], backend, dist.PrefixStore(name, store), group_name=name, timeout=timeout)
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


async def _share_memory(parts: Iterator[Bucket], servers: Servers) -> None:
    """The server opens the memory of the tensors: GPU memory of the same node, or host memory."""
    set_sharing_strategy("file_system")  # with file descriptors the server would have to be our child
    plan = servers.plan
    bucket = next(parts, None)
    while bucket:
        kept = bucket if plan.transport == "cuda_ipc" else [(name, tensor.cpu()) for name, tensor in bucket]
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump([(name, _Handle(tensor.contiguous())) for name, tensor in kept])
        payload = base64.b64encode(buffer.getvalue()).decode()
        body = {"serialized_named_tensors": [payload] * plan.tensor_parallel, "flush_cache": False}
        _, bucket = await servers.call("/update_weights_from_tensor", body, partial(next, parts, None))


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
