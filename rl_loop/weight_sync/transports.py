"""Transports of weights to servers: a process group, shared memory or a disk.

Tensors are sent in buckets. A server responds to a request when it has received the bucket. The
next bucket is produced in parallel, often by gathering from other ranks.
"""

import asyncio
import base64
import io
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions, set_sharing_strategy

from converters.hf_directory import write_hf_directory
from converters.hf_layouts import Shape
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.rendezvous import file_store, tcp_store
from rl_loop.cluster.group_authentication import authenticate_groups
from rl_loop.cluster.placement import free_address
from rl_loop.weight_sync.servers import Bucket, GroupPlace, SyncPlan, WeightServers

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def split_into_buckets(named_tensors: NamedTensors, limit: int) -> Iterator[Bucket]:
    """Group tensors, in order, into buckets.

    A bucket ends when it has more than ``limit / 2`` bytes. It also ends before a tensor that would
    take it above ``limit`` bytes, unless it has at most ``limit / 8`` bytes so far. A bucket is
    therefore larger than ``limit`` only with a tensor of more than 7/8 of ``limit``.

    Args:
        named_tensors: (name, tensor).
        limit: size in bytes.
    """
    bucket: Bucket = []
    size = 0
    for name, tensor in named_tensors:
        # Without the first condition, a large tensor would leave a nearly empty bucket behind.
        if size > limit // 8 and size + tensor.nbytes > limit:
            yield bucket
            bucket = []
            size = 0

        bucket.append((name, tensor))
        size += tensor.nbytes
        del tensor  # otherwise it would outlive its bucket

        # Send a bucket that is half full before the next tensor is produced, which may be as large.
        if size > limit // 2:
            yield bucket
            bucket = []
            size = 0

    if bucket:
        yield bucket


async def send_by_disk(
    tensors: NamedTensors,
    config: ModelConfig,
    servers: WeightServers,
    further_shapes: Mapping[str, Shape],
) -> None:
    """Write a checkpoint and let servers load it. For machines that share only a disk.

    Args:
        tensors: tensors to write.
        config: configuration of the weights.
        servers: servers, with the plan of the sync.
        further_shapes: {name: shape} of tensors that the model does not have.
    """
    directory = servers.plan.directory
    # Writing takes long and would block the event loop, which runs the requests to the servers.
    await asyncio.to_thread(
        write_hf_directory,
        directory,
        config,
        tensors,
        overwrite=True,
        quantized=servers.plan.mxfp4_experts,
        further_shapes=further_shapes,
    )
    await servers.load_directory(directory)


class WeightBroadcastGroup:
    """Process group of this process (rank 0) and every rank of every server.

    It is kept while the servers do not change, because NCCL takes most of a second to create a
    group. A restarted server has another URL.
    """

    def __init__(self) -> None:
        self._urls: tuple[str, ...] = ()
        self._name = ""
        self._store_file: Path | None = None
        self._group: Any = None

    async def broadcast(self, buckets: Iterator[Bucket], servers: WeightServers) -> None:
        """Send all buckets. After a failure, leave the group. The next call creates another one."""
        plan = servers.plan
        try:
            if self._urls != plan.urls:
                await self._join(servers)

            bucket = next(buckets, None)
            while bucket:
                # Servers respond after they have received all tensors, so the broadcast runs while
                # this process waits for the responses.
                bucket = await servers.receive(
                    self._name, bucket, partial(self._send, bucket, buckets)
                )
        except BaseException:
            # Other ranks may be at any point of the broadcast, so this group cannot be used again.
            self._leave()
            raise

    def _send(self, bucket: Bucket, later_buckets: Iterator[Bucket]) -> Bucket | None:
        """Broadcast a bucket and return the next one."""
        # Begin all broadcasts before waiting. Servers receive them in the order of the bucket,
        # which the request lists.
        for work in [self._group.broadcast(tensor, 0) for _, tensor in bucket]:
            work.wait()

        # With NCCL, wait() only orders the stream after the broadcast. The memory must not be
        # reused before the broadcast is complete.
        device = bucket[0][1].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

        bucket.clear()  # servers have it, and the next bucket needs the memory
        return next(later_buckets, None)

    async def _join(self, servers: WeightServers) -> None:
        """Create a group with all server ranks of this sync."""
        self._leave()
        plan = servers.plan
        host, port = free_address()
        if plan.stores is not None:
            while store_path(plan.stores, port).exists():  # left by a run that was killed
                host, port = free_address()
            self._store_file = store_path(plan.stores, port)
            host = FILE_HOST
        world = 1 + len(plan.urls) * plan.tensor_parallel
        self._name = f"weights_{uuid.uuid4().hex}"  # a server accepts each name once

        # Rank 0 is this process. Each server has the tensor-parallel ranks from its first_rank on.
        places = [
            GroupPlace(
                first_rank=1 + number * plan.tensor_parallel,
                world_size=world,
                backend=plan.transport,
                host=host,
                port=port,
                name=self._name,
            )
            for number in range(len(plan.urls))
        ]
        self._group = await servers.join_group(
            places, partial(_make_group, self._name, host, port, world, plan)
        )
        # torch does this for the groups of new_group, and destroy_process_group reads it.
        dist.distributed_c10d._world.pg_group_ranks[self._group] = {r: r for r in range(world)}
        self._urls = plan.urls

    def _leave(self) -> None:
        """Leave the group without communication."""
        # Another rank may be dead, and a thread of this process may wait for it in a broadcast.
        if self._group is not None:
            with suppress(RuntimeError, ValueError):  # gloo cannot abort
                self._group.abort()
            with suppress(RuntimeError, ValueError):  # all groups may have been destroyed already
                dist.destroy_process_group(self._group)
        if self._store_file is not None:
            self._store_file.unlink(missing_ok=True)
            self._store_file = None
        self._urls = ()
        self._group = None


FILE_HOST = "file.invalid"
"""Host for which the plugin of servers opens a file (``bind_store`` in plugin/gptoss_sglang.py)."""


def store_path(directory: Path, port: int) -> Path:
    """Return the file that servers open for a port of FILE_HOST."""
    return directory / f"store-{port}"


def _make_group(name: str, host: str, port: int, world: int, plan: SyncPlan) -> Any:
    """Create rank 0 of a process group that is independent of this process's default group.

    Args:
        name: name of the group.
        host: address of the store.
        port: port of the store.
        world: number of processes.
        plan: plan of the sync.
    """
    timeout = timedelta(seconds=plan.seconds)
    store: dist.Store
    if plan.stores is not None:
        store = file_store(store_path(plan.stores, port), world, timeout)
    else:
        store = tcp_store(host, port, world, is_master=True, timeout=timeout)

    # torch has no public function for processes without a common default group. SGLang's servers
    # create their groups in the same way (init_custom_process_group in srt/utils/common.py).
    if plan.authenticated:
        authenticate_groups()
    new_group: Any = dist.distributed_c10d._new_process_group_helper
    if not plan.authenticated:
        # An earlier sync of this process may have replaced the function. Servers without the plugin
        # do not answer its check.
        new_group = getattr(new_group, "without_authentication", new_group)
    group, _ = new_group(
        world,
        0,  # rank of this process
        [],
        dist.Backend(plan.transport),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    return group


server_group = WeightBroadcastGroup()
"""Group of this process and the servers."""


async def share_memory(buckets: Iterator[Bucket], servers: WeightServers) -> None:
    """Let servers open the memory of the tensors: GPU memory of the same node, or host memory."""
    # torch's default strategy passes file descriptors, which only a process and its children can
    # share.
    set_sharing_strategy("file_system")
    plan = servers.plan

    bucket = next(buckets, None)
    while bucket:
        # Tensors must live until all servers have responded, while the next bucket is produced.
        shared = bucket
        if plan.transport != "cuda_ipc":
            # Pickling moves a host tensor into shared memory, but a GPU tensor would become a CUDA
            # handle.
            shared = [(name, tensor.cpu()) for name, tensor in bucket]

        # One handle per rank of each server: every rank gets whole tensors and selects its shard.
        # In torch a handle counts as one user, so two processes must not open the same handle.
        rank_buckets = _rank_buckets(shared, servers)
        handles = [[_Handles(rank_bucket) for rank_bucket in rank_buckets] for _ in plan.urls]
        payloads = [[handle.payload for handle in server_handles] for server_handles in handles]
        try:
            bucket = await servers.open_memory(payloads, partial(next, buckets, None))
        except BaseException:
            # A server that failed may never report that it is done with the memory, which would
            # then stay allocated.
            for server_handles in handles:
                for handle in server_handles:
                    handle.allow_free()
            raise


def _rank_buckets(bucket: Bucket, servers: WeightServers) -> list[Bucket]:
    """Return the tensors that each tensor-parallel rank of a server opens."""
    ranks = servers.plan.tensor_parallel
    if ranks == 1:
        return [bucket]

    # All ranks except the first overwrite these tensors with zeros. Without a copy, the first rank
    # could read the zeros.
    for_later_ranks = [
        (name, tensor.clone() if name.endswith(servers.overwritten) else tensor)
        for name, tensor in bucket
    ]
    return [bucket, *[for_later_ranks] * (ranks - 1)]


class _Handles:
    """Pickled handles with which one other process opens the tensors of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._tensors = [(name, _SharedTensor(tensor)) for name, tensor in bucket]
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(self._tensors)
        # Base64, because the request has a JSON body.
        self.payload = base64.b64encode(buffer.getvalue()).decode()

    def allow_free(self) -> None:
        """Let the memory be freed even if the process that should open it has ended."""
        for _, tensor in self._tensors:
            tensor.allow_free()


@dataclass
class _SharedTensor:
    """Tensor that is pickled, once, as a handle of its memory for ``rebuild_cuda_tensor``.

    The handle names the device by UUID, because processes with other visible GPUs number them
    differently. Servers must accept a UUID there.
    """

    tensor: torch.Tensor
    counter_location: tuple[bytes, int] | None = None
    """Location of torch's count of the memory's users: name of a file of counts, and an index."""

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.tensor.is_cuda:
            _move_to_shared_memory(self.tensor)
        rebuild, arguments = reductions.reduce_tensor(self.tensor)
        if self.tensor.is_cuda:
            # Argument 6 of rebuild_cuda_tensor is the device's number. SGLang also accepts a UUID
            # (srt/utils/patch_torch.py).
            device = str(torch.cuda.get_device_properties(self.tensor.device).uuid)
            arguments = (*arguments[:6], device, *arguments[7:])
            # ``ref_counter_handle`` and ``ref_counter_offset`` of rebuild_cuda_tensor.
            self.counter_location = (arguments[11], arguments[12])
        return rebuild, arguments

    def allow_free(self) -> None:
        """Let the memory be freed even if a process that has ended counts as its user.

        torch frees shared memory when the other process reports that it is done. A process that was
        killed never reports it.
        """
        if self.counter_location is None or memory_user_count(*self.counter_location) == 0:
            return
        # torch has no public function for this.
        torch.UntypedStorage._release_ipc_counter(*self.counter_location, device=self.tensor.device)


SHARING_ATTEMPTS = 5
"""Attempts to move a tensor into shared memory."""


def _move_to_shared_memory(tensor: torch.Tensor) -> None:
    """Move a host tensor into shared memory, in place.

    torch registers the memory at its manager process and waits one second for the response
    (lib/libshm/socket.h). On a busy machine the manager can take longer.

    Raises:
        RuntimeError: shared memory is full, or the manager did not respond in SHARING_ATTEMPTS
            attempts.
    """
    for attempt in range(1, SHARING_ATTEMPTS + 1):
        try:
            tensor.share_memory_()
            return
        except RuntimeError as error:
            if "timed out" not in str(error) or attempt == SHARING_ATTEMPTS:
                raise


COUNTER_HEADER_BYTES = 64
"""Size of torch's header in a file of counts, in bytes (RefcountedMapAllocator)."""


def memory_user_count(counter_file: bytes, index: int) -> int:
    """Return the number of processes that use shared GPU memory, according to torch.

    torch's count is unsigned. One release too many makes it 2^64 - 1, and the memory is never
    freed.

    Args:
        counter_file: name of torch's file of counts in shared memory.
        index: index of the memory's count.
    """
    try:
        with (Path("/dev/shm") / counter_file.decode().lstrip("/")).open("rb") as file:
            file.seek(COUNTER_HEADER_BYTES + 8 * index)
            return int(struct.unpack("=Q", file.read(8))[0])
    except FileNotFoundError:
        # torch deletes the file when all memory that it counts has been freed.
        return 0
