"""The trainer's side of a weight sync: Hugging Face tensors, bucket by bucket, into SGLang servers.

    pause by abort -> buckets, names and shapes checked -> compare a sample -> drop the prefix cache
    -> name the new version -> go on

A server is paused all the while, and only the last steps give its weights a version: answers come wholly from before or
wholly from after. If anything fails, the servers stay paused, and whoever asked must not let them serve."""

import asyncio
import base64
import io
import uuid
from collections import deque
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
from rl_loop.cluster.placement import free_address
from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.weight_checksums import WeightSample

TransportName = Literal["nccl", "gloo", "cuda_ipc", "shared_memory", "disk", "none"]
"""none: nothing is sent, and all that was sent before is compared."""
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
    (20B: 1.06 GB). Besides its model a server holds one, and the sender one (``nccl``, ``gloo``) or two.
    ``directory`` is for ``disk`` and must be seen by all. ``seconds``: for one bucket. ``compare``: some checksums."""

    urls: tuple[str, ...]
    version: int
    transport: TransportName
    tensor_parallel: int = 1
    bucket_bytes: int = 1 << 30
    directory: Path = Path("weights")
    seconds: float = 120.0
    compare: bool = True


async def send_weights(named: NamedTensors, config: ModelConfig, plan: SyncPlan) -> None:
    """Raises SyncFailed naming the server or WeightMismatch naming the tensor; ``named`` is not read further then."""
    servers = Servers(plan)
    try:
        await servers.call("/pause_generation", {"mode": "abort"})
        watched, sample = checked(named, config), None
        if plan.compare:
            (info, *_), _ = await servers.call("/server_info", None)
            turns = 3 * config.num_layers if plan.transport == "none" else 1  # in so many versions all have theirs
            sample = WeightSample(config, range(plan.version, plan.version + turns), plan.tensor_parallel, info)
            watched = sample.watch(watched)
        if plan.transport == "none":
            await asyncio.to_thread(deque, watched, 0)
        elif plan.transport == "disk":
            await asyncio.to_thread(write_hf_directory, plan.directory, config, watched, overwrite=True)
            # servers start with --load-format dummy, which would hold here too
            body = {"model_path": str(plan.directory), "load_format": "auto", "flush_cache": False}
            await servers.call("/update_weights_from_disk", body)
        else:
            send = _server_group.broadcast if plan.transport in ("nccl", "gloo") else _share_memory
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
    """In order; each at most ``limit`` bytes, or one tensor after others of an eighth of that. What is half full goes
    before the next tensor is made."""
    bucket: Bucket = []
    size = 0
    for name, tensor in named:
        if size > limit // 8 and size + tensor.nbytes > limit:
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


class ServerGroup:
    """A process group of this process (rank 0) and every rank of every server. Kept while the servers stay the same,
    as NCCL takes most of a second to make one; a server that was started anew has another URL."""

    _urls: tuple[str, ...] = ()
    _name = ""
    _group: Any = None

    async def broadcast(self, parts: Iterator[Bucket], servers: Servers) -> None:
        try:
            if self._urls != servers.plan.urls:
                await self._join(servers)
            bucket = next(parts, None)
            while bucket:
                shapes = [list(tensor.shape) for _, tensor in bucket]
                dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
                body = {"names": [name for name, _ in bucket], "dtypes": dtypes, "shapes": shapes, "flush_cache": False}
                body["group_name"], send = self._name, partial(self._send, bucket, parts)
                _, bucket = await servers.call("/update_weights_from_distributed", body, send)
        except BaseException:
            self._leave()
            raise

    def _send(self, bucket: Bucket, following: Iterator[Bucket]) -> Bucket | None:
        for work in [self._group.broadcast(tensor, 0) for _, tensor in bucket]:
            work.wait()
        if bucket[0][1].is_cuda:
            torch.cuda.synchronize(bucket[0][1].device)
        bucket.clear()  # servers have it, and the next one needs the room
        return next(following, None)

    async def _join(self, servers: Servers) -> None:
        self._leave()
        plan, (host, port) = servers.plan, free_address()
        world, self._name = 1 + len(plan.urls) * plan.tensor_parallel, f"weights_{uuid.uuid4().hex}"

        def member(number: int) -> dict[str, Any]:
            place = {"rank_offset": 1 + number * plan.tensor_parallel, "world_size": world, "backend": plan.transport}
            return place | {"master_address": host, "master_port": port, "group_name": self._name}

        def own() -> Any:
            timeout = timedelta(seconds=plan.seconds)
            store = dist.PrefixStore(self._name, dist.TCPStore(host, port, world, is_master=True, timeout=timeout))
            # torch has no public call for processes that share no default group; servers make theirs like this
            helper: Any = dist.distributed_c10d._new_process_group_helper
            backend = dist.Backend(plan.transport)
            return helper(world, 0, [], backend, store, group_name=self._name, timeout=timeout)[0]

        _, self._group = await servers.call("/init_weights_update_group", member, own)
        dist.distributed_c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world)}
        self._urls = plan.urls

    def _leave(self) -> None:
        """Without asking the others: one may be dead, and a thread of ours may wait for it in a broadcast."""
        if self._group is not None:
            for leave in (self._group.abort, partial(dist.destroy_process_group, self._group)):
                with suppress(RuntimeError, ValueError):  # gloo can not abort; all groups may be gone already
                    leave()
        self._urls, self._group = (), None


_server_group = ServerGroup()  # this process has one


async def _share_memory(parts: Iterator[Bucket], servers: Servers) -> None:
    """The server opens the memory of the tensors: GPU memory of the same node, or host memory."""
    set_sharing_strategy("file_system")  # with file descriptors the server would have to be our child
    plan = servers.plan
    bucket = next(parts, None)
    while bucket:
        kept = bucket if plan.transport == "cuda_ipc" else [(name, tensor.cpu()) for name, tensor in bucket]
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump([(name, _Handle(tensor)) for name, tensor in kept])
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
