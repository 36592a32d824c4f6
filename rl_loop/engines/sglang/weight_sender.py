"""The trainer's side of a weight sync: Hugging Face tensors, bucket by bucket, to SGLang.

    pause by abort -> buckets, names and shapes checked -> compare a sample -> drop the prefix
    cache -> name the new version -> go on

A server is paused all the while, and only the last steps give its weights a version: every answer
comes wholly from before or wholly from after. If anything fails, the servers stay paused, and
whoever asked for the sync must not let them serve.
"""

import asyncio
import base64
import io
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from converters.errors import GatheringBroken
from converters.hf_directory import write_hf_directory, written_shapes
from megatron_gptoss.config import ModelConfig
from rl_loop.cluster.placement import free_address
from rl_loop.engines.backend import SyncFailed
from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.weight_checksums import WeightSample

BEGIN_SYNC = "gptoss_begin_sync"
END_SYNC = "gptoss_end_sync"
"""Actions of /weights_checker that servers with packed experts have from our plugin."""

TransportName = Literal["nccl", "gloo", "cuda_ipc", "shared_memory", "disk", "none"]
"""How weights travel; none: nothing is sent, and all that was sent before is compared."""
NamedTensors = Iterable[tuple[str, torch.Tensor]]
Bucket = list[tuple[str, torch.Tensor]]


class WeightMismatch(ValueError):
    """The weights do not belong to this model, or a server holds others than it was sent.

    The message names the tensor.
    """


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """Which servers get which weights, and how."""

    urls: tuple[str, ...]
    """Of the servers."""
    version: int
    """Of the weights."""
    transport: TransportName
    tensor_parallel: int = 1
    """Ranks of each server."""
    bucket_bytes: int = 1 << 30
    """Bound of a bucket, or the largest tensor if that is larger: gate and up projections of a
    layer (20B: 1.06 GB). Besides its model a server holds one bucket, and the sender one
    (``nccl``, ``gloo``) or two."""
    directory: Path = Path("weights")
    """For ``disk``; all servers must see it."""
    seconds: float = 120.0
    """Longest that the servers may take for one bucket."""
    compare: bool = True
    """Whether to compare checksums of a sample afterwards."""
    packed: bool = False
    """Whether experts go as MXFP4 blocks and scales, to servers that hold them so."""


async def send_weights(named: NamedTensors, config: ModelConfig, plan: SyncPlan) -> None:
    """Give the servers of ``plan`` all weights, by Hugging Face name.

    Raises:
        SyncFailed: naming the server; ``named`` is not read further then.
        WeightMismatch: naming the tensor; ``named`` is not read further then.
        GatheringBroken: as ``named`` does.
    """
    servers = Servers(plan)
    try:
        await _sync(named, config, servers)
    except Exception as error:
        # Servers are asked in task groups, which wrap what goes wrong, the first fault first.
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        _forget_locals(error)
        if isinstance(cause, WeightMismatch | GatheringBroken):
            raise cause from None
        raise SyncFailed(f"weights {plan.version} did not reach all servers: {cause}") from cause
    finally:
        await servers.close()


def _forget_locals(error: BaseException) -> None:
    """Clear the variables of the calls that failed: the last bucket would live as long as the
    exception does."""
    traceback.clear_frames(error.__traceback__)
    for earlier in (error.__cause__, error.__context__):
        if earlier is not None:
            _forget_locals(earlier)
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            _forget_locals(part)


async def _sync(named: NamedTensors, config: ModelConfig, servers: "Servers") -> None:
    plan = servers.plan
    # By abort: in the other modes requests stay, and /flush_cache refuses for as long as they do.
    await servers.call("/pause_generation", {"mode": "abort"})

    # A chain of generators: tensors are gathered, checked, hashed and sent one bucket at a time, and
    # none of it happens before ``_transfer`` asks for the first.
    tensors: NamedTensors = _check_names_and_shapes(named, config, packed=plan.packed)
    sample: WeightSample | None = None
    if plan.compare:
        sample = await _choose_sample(config, servers)
        tensors = sample.watch(tensors)

    # Servers with packed experts count what comes: SGLang itself would not miss a bucket.
    counted = plan.packed and plan.transport != "none"
    if counted:
        await servers.call("/weights_checker", {"action": BEGIN_SYNC})
    await _transfer(tensors, config, servers)
    if counted:
        await servers.call("/weights_checker", {"action": END_SYNC})

    # A server may have answered "success" and hold something else: this looks at what it holds.
    if sample is not None:
        await _compare(sample, servers)

    # What is cached was computed with the old weights. The version comes last: a server that
    # answers with it has been through everything above.
    await servers.call("/flush_cache", {})
    version = {"new_version": str(plan.version), "abort_all_requests": False}
    await servers.call("/update_weight_version", version)
    await servers.call("/continue_generation", {"torch_empty_cache": False})


async def _choose_sample(config: ModelConfig, servers: "Servers") -> WeightSample:
    plan = servers.plan
    versions = range(plan.version, plan.version + 1)
    if plan.transport == "none":
        # Within so many versions every parameter has its turn: each layer, and of the three
        # outside the layers one per version.
        versions = range(plan.version, plan.version + 3 * config.num_layers)

    server_info = (await servers.call("/server_info", None))[0]
    return WeightSample(config, versions, plan.tensor_parallel, server_info, packed=plan.packed)


async def _transfer(tensors: NamedTensors, config: ModelConfig, servers: "Servers") -> None:
    plan = servers.plan
    match plan.transport:
        case "none":
            # They only pass the sample. A deque of no length keeps not even the last one.
            await asyncio.to_thread(deque, tensors, 0)
        case "disk":
            await _send_by_disk(tensors, config, servers)
        case "nccl" | "gloo":
            await _server_group.broadcast(buckets(tensors, plan.bucket_bytes), servers)
        case "cuda_ipc" | "shared_memory":
            await _share_memory(buckets(tensors, plan.bucket_bytes), servers)


async def _send_by_disk(
    tensors: NamedTensors,
    config: ModelConfig,
    servers: "Servers",
) -> None:
    """Write a checkpoint and let servers load it, for machines that share nothing but a disk."""
    directory = servers.plan.directory
    await asyncio.to_thread(
        write_hf_directory,
        directory,
        config,
        tensors,
        overwrite=True,
        quantized=servers.plan.packed,
    )
    body = {
        "model_path": str(directory),
        # Servers start with --load-format dummy, which would hold here too.
        "load_format": "auto",
        "flush_cache": False,
    }
    await servers.call("/update_weights_from_disk", body)


async def _compare(sample: WeightSample, servers: "Servers") -> None:
    """Raise WeightMismatch if a server holds something else than what it was sent."""
    plan = servers.plan
    answers = await servers.call("/weights_checker", {"action": "checksum"})
    for url, answer in zip(plan.urls, answers, strict=True):
        if difference := sample.first_difference(answer):
            raise WeightMismatch(
                f"{url} was sent weights {plan.version} and holds something else in {difference}"
            )


class Servers:
    """Asks all servers of a plan at once."""

    def __init__(self, plan: SyncPlan) -> None:
        self.plan = plan
        self._clients = [SglangClient(url, plan.seconds) for url in plan.urls]

    async def call(self, path: str, body: dict[str, Any] | None) -> list[Any]:
        """POST ``body`` to each server, or GET without one; return their answers."""
        async with asyncio.TaskGroup() as tasks:
            answers = self._ask_all(tasks, path, [body] * len(self._clients))
        return [answer.result() for answer in answers]

    async def call_while[T](
        self,
        path: str,
        bodies: list[dict[str, Any]],
        work: Callable[[], T],
    ) -> T:
        """POST each server its body and run ``work`` in a thread until all have answered.

        Returns the result of ``work``, which is the other end of what the servers do.
        """
        async with asyncio.TaskGroup() as tasks:
            self._ask_all(tasks, path, bodies)
            # In a thread, because ``work`` blocks, in a broadcast or while weights are gathered,
            # and the requests to the servers need the event loop meanwhile.
            return await asyncio.to_thread(work)

    def _ask_all(
        self,
        tasks: asyncio.TaskGroup,
        path: str,
        bodies: Sequence[dict[str, Any] | None],
    ) -> list[asyncio.Task[Any]]:
        return [
            tasks.create_task(client.call(path, body, seconds=self.plan.seconds))
            for client, body in zip(self._clients, bodies, strict=True)
        ]

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.close()


def _check_names_and_shapes(
    named: NamedTensors,
    config: ModelConfig,
    *,
    packed: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same tensors if they are all of the model's, each once and of its shape.

    Raises WeightMismatch at the first that is not, and at the end if one is missing: SGLang itself
    answers "success" to names that it does not know.
    """
    # Each tensor before its bucket leaves; what is missing is known only in the end.
    missing = written_shapes(config, packed)
    known = set(missing)
    for name, tensor in named:
        if name not in known:
            raise WeightMismatch(
                f"tensor {name} is none of a {config.model_type} model with {config.num_layers} layers"
            )
        expected = missing.pop(name, None)
        if expected is None:
            raise WeightMismatch(f"tensor {name} came twice")
        if tuple(tensor.shape) != tuple(expected):
            raise WeightMismatch(
                f"tensor {name} has shape {list(tensor.shape)}, the engine expects {list(expected)}"
            )
        yield name, tensor

    if missing:
        first = next(iter(missing))
        raise WeightMismatch(f"{len(missing)} tensors are missing, the first is {first}")


def buckets(named: NamedTensors, limit: int) -> Iterator[Bucket]:
    """Collect tensors, in order, into buckets of at most ``limit`` bytes.

    A tensor that does not fit goes with others of up to an eighth of ``limit``: so a large one
    does not leave a bucket of next to nothing behind.
    """
    bucket: Bucket = []
    size = 0
    for name, tensor in named:
        if size > limit // 8 and size + tensor.nbytes > limit:
            yield bucket
            bucket = []
            size = 0

        bucket.append((name, tensor))
        size += tensor.nbytes
        del tensor  # or it would outlive its bucket

        # What is half full goes before the next tensor is made, which may take as much again.
        if size > limit // 2:
            yield bucket
            bucket = []
            size = 0

    if bucket:
        yield bucket


class ServerGroup:
    """A process group of this process (rank 0) and every rank of every server.

    Kept while the servers stay the same, as NCCL takes most of a second to make one. A server that
    was started anew has another URL.
    """

    def __init__(self) -> None:
        self._urls: tuple[str, ...] = ()
        self._name = ""
        self._group: Any = None

    async def broadcast(self, parts: Iterator[Bucket], servers: Servers) -> None:
        """Send all buckets. If anything fails the group is left, and made anew the next time."""
        plan = servers.plan
        try:
            if self._urls != plan.urls:
                await self._join(servers)

            bucket = next(parts, None)
            while bucket:
                dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
                body = {
                    "names": [name for name, _ in bucket],
                    "dtypes": dtypes,
                    "shapes": [list(tensor.shape) for _, tensor in bucket],
                    "flush_cache": False,
                    "group_name": self._name,
                }
                # Servers answer when they have received everything, so both sides must go at once.
                bucket = await servers.call_while(
                    "/update_weights_from_distributed",
                    [body] * len(plan.urls),
                    partial(self._send, bucket, parts),
                )
        except BaseException:
            # The others may be anywhere in the broadcast: this group is of no further use.
            self._leave()
            raise

    def _send(self, bucket: Bucket, following: Iterator[Bucket]) -> Bucket | None:
        """Broadcast a bucket and return the next one."""
        # All begin before the first is waited for; servers receive them in the order of ``names``.
        for work in [self._group.broadcast(tensor, 0) for _, tensor in bucket]:
            work.wait()

        # With NCCL, wait() only orders the stream behind the broadcast. The memory must not be
        # reused before the last byte has left.
        device = bucket[0][1].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

        bucket.clear()  # servers have it, and the next one needs the room
        return next(following, None)

    async def _join(self, servers: Servers) -> None:
        """Make a group with all ranks of the servers of this sync."""
        self._leave()
        plan = servers.plan
        host, port = free_address()
        world = 1 + len(plan.urls) * plan.tensor_parallel
        self._name = f"weights_{uuid.uuid4().hex}"  # a server takes no name twice

        # Rank 0 is this process; server n has the tensor-parallel ranks from rank_offset on.
        bodies = [
            {
                "rank_offset": 1 + number * plan.tensor_parallel,
                "world_size": world,
                "backend": plan.transport,
                "master_address": host,
                "master_port": port,
                "group_name": self._name,
            }
            for number in range(len(plan.urls))
        ]
        self._group = await servers.call_while(
            "/init_weights_update_group",
            bodies,
            partial(_make_group, self._name, host, port, world, plan),
        )
        # What torch keeps of groups that it made itself; destroy_process_group looks for it.
        dist.distributed_c10d._world.pg_group_ranks[self._group] = {r: r for r in range(world)}
        self._urls = plan.urls

    def _leave(self) -> None:
        """Leave the group without asking the others.

        One of them may be dead, and a thread of ours may wait for it in a broadcast.
        """
        if self._group is not None:
            with suppress(RuntimeError, ValueError):  # gloo cannot abort
                self._group.abort()
            with suppress(RuntimeError, ValueError):  # all groups may be gone already
                dist.destroy_process_group(self._group)
        self._urls = ()
        self._group = None


def _make_group(name: str, host: str, port: int, world: int, plan: SyncPlan) -> Any:
    """Make rank 0 of a process group that is not part of this process's default one."""
    timeout = timedelta(seconds=plan.seconds)
    store = dist.TCPStore(host, port, world, is_master=True, timeout=timeout)

    # torch has no public call for processes that share no default group; SGLang's servers make
    # theirs in the same way (init_custom_process_group in srt/utils/common.py).
    new_group: Any = dist.distributed_c10d._new_process_group_helper
    group, _ = new_group(
        world,
        0,  # our rank
        [],
        dist.Backend(plan.transport),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    return group


_server_group = ServerGroup()  # this process has one


async def _share_memory(parts: Iterator[Bucket], servers: Servers) -> None:
    """Let servers open the memory of the tensors: GPU memory of the same node, or host memory."""
    # With the default, file descriptors, a server would have to be our child.
    set_sharing_strategy("file_system")
    plan = servers.plan

    bucket = next(parts, None)
    while bucket:
        # Tensors must live until all servers have answered; the next bucket is made meanwhile.
        shared = bucket
        if plan.transport != "cuda_ipc":
            shared = [(name, tensor.cpu()) for name, tensor in bucket]

        handles = [(name, _SharedTensor(tensor)) for name, tensor in shared]
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(handles)
        payload = base64.b64encode(buffer.getvalue()).decode()
        body = {
            # One for each rank of the server: all get whole tensors and cut out their own shard.
            "serialized_named_tensors": [payload] * plan.tensor_parallel,
            "flush_cache": False,
        }
        try:
            bucket = await servers.call_while(
                "/update_weights_from_tensor",
                [body] * len(plan.urls),
                partial(next, parts, None),
            )
        # A server that died in the middle never gives its share back (``disown``). One that
        # answered has.
        except BaseException:
            for _, handle in handles:
                handle.disown()
            raise


@dataclass
class _SharedTensor:
    """Pickles as a handle of its tensor's memory, for ``rebuild_cuda_tensor`` in another process.

    The device is named by UUID, because processes that see other GPUs number them differently.
    """

    tensor: torch.Tensor
    use_count: tuple[bytes, int] | None = None
    """Where torch counts the processes that use the memory: a file of such counts, and which of
    them."""

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = reductions.reduce_tensor(self.tensor)
        if self.tensor.is_cuda:
            # Argument 6 of rebuild_cuda_tensor is the device's number. SGLang takes a UUID there
            # too (srt/utils/patch_torch.py).
            device = str(torch.cuda.get_device_properties(self.tensor.device).uuid)
            arguments = (*arguments[:6], device, *arguments[7:])
            self.use_count = (arguments[11], arguments[12])
        return rebuild, arguments

    def disown(self) -> None:
        """Let the memory be freed although a server that ended counts as a user of it.

        torch frees what it shared when the other process has said that it is done, which one that
        was killed never does.
        """
        if self.use_count is not None:
            torch.UntypedStorage._release_ipc_counter(*self.use_count, device=self.tensor.device)
