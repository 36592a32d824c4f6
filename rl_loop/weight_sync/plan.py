"""What a weight sync is to do, and the servers that it asks."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl_loop.engines.sglang.client import SglangClient

TransportName = Literal["nccl", "gloo", "cuda_ipc", "shared_memory", "disk", "none"]
"""How weights travel; none: nothing is sent, and all that was sent before is compared."""


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
    api_key: str | None = field(default=None, repr=False)
    """Key of the servers; None if they have none."""


class Servers:
    """Asks all servers of a plan at once."""

    def __init__(self, plan: SyncPlan) -> None:
        self.plan = plan
        self._clients = [SglangClient(url, plan.seconds, api_key=plan.api_key) for url in plan.urls]

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
