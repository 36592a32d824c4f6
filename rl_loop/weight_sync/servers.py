"""Syncs to server processes: the plan of one, and the interface that each kind of servers implements."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch

from rl_loop.weight_sync.checksums import RankChecksums, ServerLayout

TransportName = Literal["nccl", "gloo", "cuda_ipc", "shared_memory", "disk", "none"]
"""How weights travel. With "none" nothing is sent, and all that was sent before is compared."""


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """Which servers get which weights, and how."""

    urls: tuple[str, ...]
    """Addresses of the servers."""
    version: int
    """Version of the weights."""
    transport: TransportName
    """How weights travel."""
    tensor_parallel: int = 1
    """Ranks of each server."""
    bucket_bytes: int = 1 << 30
    """Bound of a bucket, or the largest tensor if that is larger: gate and up projections of a
    layer (20B: 1.06 GB). Besides its model a server holds one bucket, and the sender one
    (``nccl``, ``gloo``) or two."""
    directory: Path = Path("weights")
    """Directory of the transport "disk", which all servers see."""
    stores: Path | None = None
    """Directory for the store in which a group's processes meet, if all are on this machine; None
    for a store on a port."""
    authenticated: bool = True
    """True if servers have our plugin, with which they check the ranks of a group."""
    seconds: float = 120.0
    """Longest time that the servers may take for one bucket."""
    compare: bool = True
    """Whether to compare checksums of a sample afterwards."""
    packed: bool = False
    """Whether experts go as MXFP4 blocks and scales, to servers that hold them so."""
    api_key: str | None = field(default=None, repr=False)
    """Key of the servers; None if they have none."""


Bucket = list[tuple[str, torch.Tensor]]
"""Tensors by Hugging Face name that travel together."""


@dataclass(frozen=True)
class GroupPlace:
    """Place of one server in a process group with the sender."""

    first_rank: int
    """Rank of the server's first process. Its other processes follow."""
    world_size: int
    """Processes in the group. Rank 0 is the sender."""
    backend: str
    """Backend of torch.distributed."""
    host: str
    """Address of the sender."""
    port: int
    """Port of the store in which the group meets."""
    name: str
    """Name of the group. A server takes no name twice."""


class WeightServers(Protocol):
    """The servers of one SyncPlan. Every method asks all of them at the same time.

    Methods with ``work`` run it in a thread until all servers have answered, and return its result.
    ``work`` is the sender's end of a broadcast, or makes the next bucket.
    """

    plan: SyncPlan
    """Plan of the sync."""
    overwritten: tuple[str, ...]
    """Endings of the names of tensors that all ranks of a server but the first overwrite in shared
    memory. These ranks get copies."""

    async def begin(self) -> None:
        """Abort all requests and serve nothing until ``publish``."""
        ...

    async def begin_transfer(self) -> None:
        """Expect all tensors of the model."""
        ...

    async def join_group[T](self, places: Sequence[GroupPlace], work: Callable[[], T]) -> T:
        """Join a process group with the sender, each server at its place."""
        ...

    async def receive[T](self, group: str, bucket: Bucket, work: Callable[[], T]) -> T:
        """Receive the tensors of a bucket, in order, as broadcasts from rank 0 of a group."""
        ...

    async def open_memory[T](self, payloads: Sequence[Sequence[str]], work: Callable[[], T]) -> T:
        """Open shared tensors. ``payloads``: by server and rank, pickled handles in base64."""
        ...

    async def load_directory(self, directory: Path) -> None:
        """Load a Hugging Face directory."""
        ...

    async def end_transfer(self) -> None:
        """Raise unless every tensor has come since ``begin_transfer``."""
        ...

    async def layout(self) -> ServerLayout:
        """Return which parameters the servers hold, and made of which tensors."""
        ...

    async def checksums(self) -> list[list[RankChecksums]]:
        """Return the checksums of all parameters, by server."""
        ...

    async def publish(self, version: int) -> None:
        """Drop caches, answer with ``version`` from now on, and serve again."""
        ...
