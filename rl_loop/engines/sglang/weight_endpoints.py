"""Weight syncs as requests to SGLang's servers (0.5.17): the WeightServers of ``rl_loop.weight_sync``."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_gptoss.config import ModelConfig
from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.server_layout import SglangLayout
from rl_loop.weight_sync.checksums import RankChecksums
from rl_loop.weight_sync.send import send_to_servers
from rl_loop.weight_sync.servers import Bucket, GroupPlace, SyncPlan

BEGIN_SYNC = "gptoss_begin_sync"
END_SYNC = "gptoss_end_sync"
"""Actions of /weights_checker that servers with packed experts have from our plugin."""


async def send_weights(
    named: Iterable[tuple[str, torch.Tensor]], model: ModelConfig, plan: SyncPlan
) -> None:
    """Give the servers of ``plan`` all weights. Raises as ``send_to_servers`` does."""
    servers = SglangServers(model, plan)
    try:
        await send_to_servers(named, model, servers)
    finally:
        await servers.close()


@dataclass(frozen=True)
class SglangSender:
    """A WeightSender that follows one SyncPlan on each of its ranks."""

    model: ModelConfig
    """Configuration of the weights."""
    plans: Mapping[int, SyncPlan]
    """Plan by trainer rank: what it sends, and to which servers."""

    @property
    def ranks(self) -> list[int]:
        return sorted(self.plans)

    @property
    def transposed(self) -> bool:
        # CUDA IPC shares the trainer's own memory, where Megatron keeps expert matrices the other
        # way round.
        return any(plan.transport == "cuda_ipc" for plan in self.plans.values())

    @property
    def packed(self) -> bool:
        return any(plan.packed for plan in self.plans.values())

    def send(self, named: Iterable[tuple[str, torch.Tensor]], rank: int) -> None:
        """Raises SyncFailed naming the server or WeightMismatch naming the tensor."""
        asyncio.run(send_weights(named, self.model, self.plans[rank]))

    def send_from_driver(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send through files, whatever the plan's transport: the driver has no GPU.
        Raises as ``send`` does."""
        plans = list(self.plans.values())
        urls = tuple(url for plan in plans for url in plan.urls)
        plan = replace(plans[0], urls=urls, transport="disk")
        asyncio.run(send_weights(named, self.model, plan))


class SglangServers:
    """The WeightServers of one SyncPlan: requests to all servers at the same time."""

    # All tensor-parallel ranks but the first fill these with zeros
    # (``GptOssForCausalLM._load_normal_weights`` in srt/models/gpt_oss.py): in host memory the shared
    # tensor. A rank with its own GPU has copied it before (``_unwrap_tensor``).
    overwritten: tuple[str, ...] = (".experts.down_proj_bias",)

    def __init__(self, model: ModelConfig, plan: SyncPlan) -> None:
        self.plan = plan
        self._model = model
        self._clients = [SglangClient(url, plan.seconds, api_key=plan.api_key) for url in plan.urls]

    async def begin(self) -> None:
        # By abort: in the other modes requests stay, and /flush_cache refuses for as long as they do.
        await self.call("/pause_generation", {"mode": "abort"})

    async def begin_transfer(self) -> None:
        # Servers with packed experts count what comes: SGLang itself would not miss a bucket.
        if self.plan.packed:
            await self.call("/weights_checker", {"action": BEGIN_SYNC})

    async def end_transfer(self) -> None:
        if self.plan.packed:
            await self.call("/weights_checker", {"action": END_SYNC})

    async def join_group[T](self, places: Sequence[GroupPlace], work: Callable[[], T]) -> T:
        bodies = [
            {
                "rank_offset": place.first_rank,
                "world_size": place.world_size,
                "backend": place.backend,
                "master_address": place.host,
                "master_port": place.port,
                "group_name": place.name,
            }
            for place in places
        ]
        return await self._call_while("/init_weights_update_group", bodies, work)

    async def receive[T](self, group: str, bucket: Bucket, work: Callable[[], T]) -> T:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "flush_cache": False,
            "group_name": group,
        }
        bodies = [body] * len(self._clients)
        return await self._call_while("/update_weights_from_distributed", bodies, work)

    async def open_memory[T](self, payloads: Sequence[Sequence[str]], work: Callable[[], T]) -> T:
        bodies = [
            {"serialized_named_tensors": list(of_server), "flush_cache": False}
            for of_server in payloads
        ]
        return await self._call_while("/update_weights_from_tensor", bodies, work)

    async def load_directory(self, directory: Path) -> None:
        body = {
            "model_path": str(directory),
            # Servers start with --load-format dummy, which would hold here too.
            "load_format": "auto",
            "flush_cache": False,
        }
        await self.call("/update_weights_from_disk", body)

    async def layout(self) -> SglangLayout:
        server_info = (await self.call("/server_info", None))[0]
        plan = self.plan
        return SglangLayout(self._model, plan.tensor_parallel, server_info, packed=plan.packed)

    async def checksums(self) -> list[list[RankChecksums]]:
        answers = await self.call("/weights_checker", {"action": "checksum"})
        return [
            [
                RankChecksums(rank["parallelism_info"]["tp_rank"], rank["checksums"])
                for rank in answer["ranks"]
            ]
            for answer in answers
        ]

    async def publish(self, version: int) -> None:
        # The prefix cache was computed with the old weights.
        await self.call("/flush_cache", {})
        body = {"new_version": str(version), "abort_all_requests": False}
        await self.call("/update_weight_version", body)
        await self.call("/continue_generation", {"torch_empty_cache": False})

    async def call(self, path: str, body: dict[str, Any] | None) -> list[Any]:
        """POST ``body`` to each server, or GET without one; return their answers."""
        async with asyncio.TaskGroup() as tasks:
            answers = self._ask_all(tasks, path, [body] * len(self._clients))
        return [answer.result() for answer in answers]

    async def _call_while[T](
        self, path: str, bodies: Sequence[dict[str, Any]], work: Callable[[], T]
    ) -> T:
        """POST each server its body and run ``work`` in a thread until all have answered.

        Returns the result of ``work``.
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
