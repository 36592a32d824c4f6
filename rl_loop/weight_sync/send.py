"""The trainer's side of a weight sync: Hugging Face tensors, bucket by bucket, to SGLang.

    pause by abort -> buckets, names and shapes checked -> compare a sample -> drop the prefix
    cache -> name the new version -> go on

A server is paused all the while, and only the last steps give its weights a version: every answer
comes wholly from before or wholly from after. If anything fails, the servers stay paused, and
whoever asked for the sync must not let them serve.
"""

import asyncio
import traceback
from collections import deque
from collections.abc import Iterator

import torch

from converters.errors import GatheringBroken
from converters.hf_directory import written_shapes
from megatron_gptoss.config import ModelConfig
from rl_loop.engines.backend import SyncFailed
from rl_loop.weight_sync.checksums import WeightSample
from rl_loop.weight_sync.plan import Servers, SyncPlan
from rl_loop.weight_sync.transports import (
    Bucket,
    NamedTensors,
    buckets,
    send_by_disk,
    server_group,
    share_memory,
)

BEGIN_SYNC = "gptoss_begin_sync"
END_SYNC = "gptoss_end_sync"
"""Actions of /weights_checker that servers with packed experts have from our plugin."""


class WeightMismatch(ValueError):
    """The weights do not belong to this model, or a server holds others than it was sent.

    The message names the tensor.
    """


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


async def _sync(named: NamedTensors, config: ModelConfig, servers: Servers) -> None:
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


async def _choose_sample(config: ModelConfig, servers: Servers) -> WeightSample:
    plan = servers.plan
    versions = range(plan.version, plan.version + 1)
    if plan.transport == "none":
        # Within so many versions every parameter has its turn: each layer, and of the three
        # outside the layers one per version.
        versions = range(plan.version, plan.version + 3 * config.num_layers)

    server_info = (await servers.call("/server_info", None))[0]
    return WeightSample(config, versions, plan.tensor_parallel, server_info, packed=plan.packed)


async def _transfer(tensors: NamedTensors, config: ModelConfig, servers: Servers) -> None:
    plan = servers.plan
    if plan.transport == "none":
        # They only pass the sample. A deque of no length keeps not even the last one.
        await asyncio.to_thread(deque, tensors, 0)
        return
    if plan.transport == "disk":
        await send_by_disk(tensors, config, servers)
        return

    parts: Iterator[Bucket] = buckets(tensors, plan.bucket_bytes)
    if plan.transport in ("nccl", "gloo"):
        await server_group.broadcast(parts, servers)
    else:
        await share_memory(parts, servers)


async def _compare(sample: WeightSample, servers: Servers) -> None:
    """Raise WeightMismatch if a server holds something else than what it was sent."""
    plan = servers.plan
    answers = await servers.call("/weights_checker", {"action": "checksum"})
    for url, answer in zip(plan.urls, answers, strict=True):
        if difference := sample.first_difference(answer):
            raise WeightMismatch(
                f"{url} was sent weights {plan.version} and holds something else in {difference}"
            )


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
