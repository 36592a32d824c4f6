"""Weight syncs as HTTP requests to SGLang servers (0.5.17).

``SglangServers`` implements the WeightServers of ``rl_loop.weight_sync``.
"""

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
from rl_loop.weight_sync.shapes import synced_shapes

BEGIN_SYNC = "gptoss_begin_sync"
END_SYNC = "gptoss_end_sync"
"""Actions of /weights_checker that the plugin adds to servers with MXFP4 experts."""


async def send_weights(
    named_tensors: Iterable[tuple[str, torch.Tensor]], model: ModelConfig, plan: SyncPlan
) -> None:
    """Send all weights to the servers of a plan.

    Args:
        named_tensors: weights as (Hugging Face name, tensor in the shape of this name).
        model: configuration of the weights.
        plan: servers and transport.

    Raises:
        SyncError: if a server fails. The message names it.
        WeightMismatchError: if the weights do not fit the model, or a server holds different weights
            afterwards. The message names the tensor.
        GatheringError: if ``named_tensors`` raises it.
    """
    servers = SglangServers(model, plan)
    try:
        await send_to_servers(named_tensors, model, servers)
    finally:
        await servers.close()


@dataclass(frozen=True)
class SglangSender:
    """A WeightSender with one SyncPlan per trainer rank."""

    model: ModelConfig
    """Configuration of the weights."""
    plans: Mapping[int, SyncPlan]
    """Plan by trainer rank: servers that the rank sends to, and transport."""

    @property
    def ranks(self) -> list[int]:
        return sorted(self.plans)

    @property
    def transposed(self) -> bool:
        # CUDA IPC shares the trainer's memory, where Megatron keeps expert matrices transposed.
        return any(plan.transport == "cuda_ipc" for plan in self.plans.values())

    @property
    def mxfp4_experts(self) -> bool:
        return any(plan.mxfp4_experts for plan in self.plans.values())

    @property
    def adapters_only(self) -> bool:
        # One gathering serves all plans, so they agree.
        return any(plan.adapters_only for plan in self.plans.values())

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]], rank: int) -> None:
        """Send the weights of ``rank`` to its servers.

        Args:
            named_tensors: (Hugging Face name, tensor in the shape of this name).
            rank: trainer rank of this process.

        Raises:
            SyncError: if a server fails. The message names it.
            WeightMismatchError: if the weights do not fit the model, or a server holds different weights
                afterwards. The message names the tensor.
            GatheringError: if ``named_tensors`` raises it.
        """
        asyncio.run(send_weights(named_tensors, self.model, self.plans[rank]))

    def send_from_driver(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send through files to the servers of all plans.

        The plans' transport is ignored. Raises the errors of ``send``.

        Args:
            named_tensors: (Hugging Face name, tensor in the shape of this name).
        """
        plans = list(self.plans.values())
        urls = tuple(url for plan in plans for url in plan.urls)
        # The transport of the plans may need a GPU, which the driver does not have. The plans
        # differ in servers and rendezvous files. A disk needs no rendezvous.
        plan = replace(plans[0], urls=urls, transport="disk")
        asyncio.run(send_weights(named_tensors, self.model, plan))


class SglangServers:
    """WeightServers of one SyncPlan. Every request goes to all servers in parallel."""

    # Every tensor-parallel rank except the first fills these tensors with zeros
    # (``GptOssForCausalLM._load_normal_weights`` in srt/models/gpt_oss.py). In host memory that
    # would overwrite the shared tensor. A rank with a separate GPU has copied the tensor before
    # (``_unwrap_tensor``).
    overwritten: tuple[str, ...] = (".experts.down_proj_bias",)

    def __init__(self, model: ModelConfig, plan: SyncPlan) -> None:
        self.plan = plan
        self._model = model
        self._clients = [SglangClient(url, plan.seconds, api_key=plan.api_key) for url in plan.urls]

    async def begin(self) -> None:
        # Mode "abort", because the other modes keep requests and /flush_cache fails while any
        # exist.
        await self.call("/pause_generation", {"mode": "abort"})

    async def begin_transfer(self) -> None:
        # Servers with MXFP4 experts count all tensors: SGLang would not notice a missing bucket.
        if self.plan.mxfp4_experts:
            await self.call("/weights_checker", {"action": BEGIN_SYNC})

    async def end_transfer(self) -> None:
        if not self.plan.mxfp4_experts:
            return
        action = END_SYNC
        if self.plan.adapters_only:
            action += f":{len(synced_shapes(self._model, self.plan))}"
        await self.call("/weights_checker", {"action": action})

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
            # ``publish`` flushes the cache once, after all buckets.
            "flush_cache": False,
            "group_name": group,
        }
        bodies = [body] * len(self._clients)
        return await self._call_while("/update_weights_from_distributed", bodies, work)

    async def open_memory[T](self, payloads: Sequence[Sequence[str]], work: Callable[[], T]) -> T:
        bodies = [
            {"serialized_named_tensors": list(server_payloads), "flush_cache": False}
            for server_payloads in payloads
        ]
        return await self._call_while("/update_weights_from_tensor", bodies, work)

    async def load_directory(self, directory: Path) -> None:
        body = {
            "model_path": str(directory),
            # Servers are started with --load-format dummy, which would also apply here.
            "load_format": "auto",
            "flush_cache": False,
        }
        await self.call("/update_weights_from_disk", body)

    async def layout(self) -> SglangLayout:
        server_info = (await self.call("/server_info", None))[0]
        plan = self.plan
        has_adapters = plan.adapter is not None
        return SglangLayout(
            self._model,
            plan.tensor_parallel,
            server_info,
            mxfp4_experts=plan.mxfp4_experts,
            adapted=has_adapters,
        )

    async def checksums(self) -> list[list[RankChecksums]]:
        responses = await self.call("/weights_checker", {"action": "checksum"})
        return [
            [
                RankChecksums(rank["parallelism_info"]["tp_rank"], rank["checksums"])
                for rank in response["ranks"]
            ]
            for response in responses
        ]

    async def publish(self, version: int) -> None:
        # The prefix cache was computed with the old weights.
        await self.call("/flush_cache", {})
        body = {"new_version": str(version), "abort_all_requests": False}
        await self.call("/update_weight_version", body)
        await self.call("/continue_generation", {"torch_empty_cache": False})

    async def call(self, path: str, body: dict[str, Any] | None) -> list[Any]:
        """Send a request to every server.

        Args:
            path: path of the endpoint.
            body: JSON object for POST. None: send a GET request.

        Returns:
            The decoded responses, in the order of the plan's servers.
        """
        async with asyncio.TaskGroup() as tasks:
            # If one server fails, the others are not waited for, because the whole sync is
            # repeated.
            responses = self._ask_all(tasks, path, [body] * len(self._clients))
        return [response.result() for response in responses]

    async def _call_while[T](
        self, path: str, bodies: Sequence[dict[str, Any]], work: Callable[[], T]
    ) -> T:
        """Send each server its body with POST, and run ``work`` in a thread at the same time.

        Returns:
            The result of ``work``, after all servers have responded.
        """
        async with asyncio.TaskGroup() as tasks:
            self._ask_all(tasks, path, bodies)
            # ``work`` blocks in a broadcast or while weights are gathered. It runs in a thread,
            # because the requests to the servers need the event loop.
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
