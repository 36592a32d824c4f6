"""The plan of a weight sync to servers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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
    seconds: float = 120.0
    """Longest time that the servers may take for one bucket."""
    compare: bool = True
    """Whether to compare checksums of a sample afterwards."""
    packed: bool = False
    """Whether experts go as MXFP4 blocks and scales, to servers that hold them so."""
    api_key: str | None = field(default=None, repr=False)
    """Key of the servers; None if they have none."""
