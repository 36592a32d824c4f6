"""Plan of a weight sync to servers, and the interface that each kind of server implements."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch

from megatron_gptoss.config import AdapterConfig
from rl_loop.weight_sync.checksums import RankChecksums, ServerLayout

TransportName = Literal["nccl", "gloo", "cuda_ipc", "shared_memory", "disk", "none"]
"""Transport of weights. With "none" nothing is sent, and all earlier weights are compared."""


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """Weights, servers and transport of one sync."""

    urls: tuple[str, ...]
    """Addresses of the servers."""
    version: int
    """Version of the weights."""
    transport: TransportName
    """Transport of the weights."""
    tensor_parallel: int = 1
    """Number of ranks per server."""
    bucket_bytes: int = 1 << 30
    """Maximum size of a bucket, unless a tensor is larger.

    The gate and up projections of a layer are a large tensor (20B: 1.06 GB). In addition to its
    model, a server holds one bucket. The sender holds one (``nccl``, ``gloo``) or two.
    """
    directory: Path = Path("weights")
    """Directory of the transport "disk". All servers see it."""
    stores: Path | None = None
    """Directory of the rendezvous file for a group whose processes are all on this machine.

    None: the group uses a store on a port.
    """
    authenticated: bool = True
    """True if servers have the plugin, with which they authenticate the ranks of a group."""
    seconds: float = 120.0
    """Time limit of the servers for one bucket."""
    compare: bool = True
    """True to compare checksums of a sample afterwards."""
    mxfp4_experts: bool = False
    """True if experts are sent as MXFP4 blocks and scales, to servers that hold this format."""
    adapter: AdapterConfig | None = None
    """Adapters of experts that are sent in addition to blocks and scales, to servers that do not merge them.

    None: adapters are merged, or experts have none.
    """
    adapters_only: bool = False
    """True if only the tensors that training changes are sent, to servers that have all others.

    They are ``adapter``, and the weights into which adapters are merged.
    """
    # repr=False keeps the key out of logs and errors.
    api_key: str | None = field(default=None, repr=False)
    """Key of the servers. None if they have none."""


Bucket = list[tuple[str, torch.Tensor]]
"""Tensors that are sent together, with their Hugging Face names."""


@dataclass(frozen=True)
class GroupPlace:
    """Position of one server in a process group with the sender."""

    first_rank: int
    """Rank of the server's first process. Its other processes follow."""
    world_size: int
    """Number of processes in the group. Rank 0 is the sender."""
    backend: str
    """Backend of torch.distributed."""
    host: str
    """Address of the sender."""
    port: int
    """Port of the group's rendezvous store."""
    name: str
    """Name of the group. A server accepts each name once."""


class WeightServers(Protocol):
    """The servers of one SyncPlan. Every method sends its requests to all of them in parallel.

    Methods with ``work`` run it in a thread until all servers have responded, and return its
    result. ``work`` is the sender's part of a broadcast, or produces the next bucket.
    """

    plan: SyncPlan
    """Plan of the sync."""
    overwritten: tuple[str, ...]
    """Name endings of tensors that every rank except a server's first overwrites in shared memory.

    These ranks get copies.
    """

    async def begin(self) -> None:
        """Abort all requests and serve none until ``publish``."""
        ...

    async def begin_transfer(self) -> None:
        """Prepare to receive all tensors of the model."""
        ...

    async def join_group[T](self, places: Sequence[GroupPlace], work: Callable[[], T]) -> T:
        """Join a process group with the sender, each server at its position."""
        ...

    async def receive[T](self, group: str, bucket: Bucket, work: Callable[[], T]) -> T:
        """Receive the tensors of a bucket, in order, as broadcasts from rank 0 of a group."""
        ...

    async def open_memory[T](self, payloads: Sequence[Sequence[str]], work: Callable[[], T]) -> T:
        """Open shared tensors.

        Args:
            payloads: pickled handles in base64, by server and rank.
            work: function to run in parallel.
        """
        ...

    async def load_directory(self, directory: Path) -> None:
        """Load a Hugging Face directory."""
        ...

    async def end_transfer(self) -> None:
        """Raise an error unless every tensor has come since ``begin_transfer``."""
        ...

    async def layout(self) -> ServerLayout:
        """Return the parameters of the servers and their source tensors."""
        ...

    async def checksums(self) -> list[list[RankChecksums]]:
        """Return the checksums of all parameters, by server and rank."""
        ...

    async def publish(self, version: int) -> None:
        """Clear caches, mark responses with ``version``, and serve again."""
        ...
