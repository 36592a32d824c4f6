"""Steps of a weight sync to servers, run by the process that has the weights.

    begin -> buckets, names and shapes checked -> compare a sample at times -> publish the version

Servers are paused from the first step to the last, and only the last step gives their weights a
version. Therefore every response comes entirely from the old or entirely from the new weights. If a
step fails, the servers stay paused, and the caller must not let them serve.
"""

import asyncio
import traceback
from collections import deque

from converters.errors import GatheringError
from megatron_gptoss.config import ModelConfig
from rl_loop.weight_sync.checksums import WeightSample
from rl_loop.weight_sync.expected import ExpectedTensors
from rl_loop.weight_sync.servers import WeightServers
from rl_loop.weight_sync.shapes import synced_shapes, unmerged_shapes
from rl_loop.weight_sync.source import SyncError, WeightMismatchError
from rl_loop.weight_sync.transports import (
    NamedTensors,
    send_by_disk,
    server_group,
    share_memory,
    split_into_buckets,
)


async def send_to_servers(
    named_tensors: NamedTensors, config: ModelConfig, servers: WeightServers
) -> None:
    """Send all weights to servers, as their plan specifies.

    Args:
        named_tensors: (Hugging Face name, tensor). Not read to its end if the sync fails.
        config: configuration of the weights.
        servers: servers, with the plan of the sync.

    Raises:
        SyncError: if a server fails. The message names it.
        WeightMismatchError: if a tensor does not fit the model or differs on a server. The message names
            it.
        GatheringError: if ``named_tensors`` raises it.
    """
    try:
        await _sync(named_tensors, config, servers)
    except Exception as error:
        # Requests run in task groups, which wrap errors. The first error comes first.
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        _clear_locals(error)
        if isinstance(cause, WeightMismatchError | GatheringError):
            raise cause from None
        version = servers.plan.version
        raise SyncError(f"weights {version} did not reach all servers: {cause}") from cause


def _clear_locals(error: BaseException) -> None:
    """Clear the variables of the failed calls, because they would keep the last bucket alive."""
    traceback.clear_frames(error.__traceback__)
    for earlier in (error.__cause__, error.__context__):
        if earlier is not None:
            _clear_locals(earlier)
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            _clear_locals(part)


async def _sync(named_tensors: NamedTensors, config: ModelConfig, servers: WeightServers) -> None:
    plan = servers.plan
    # Before the first tensor: no response may come from a mixture of old and new weights.
    await servers.begin()

    # A chain of generators: tensors are gathered, checked, hashed and sent one bucket at a time.
    # Nothing happens before ``_transfer`` requests the first tensor.
    described = f"a {config.model_type} model with {config.num_layers} layers"
    expected = ExpectedTensors(synced_shapes(config, plan), described)
    tensors: NamedTensors = expected.check_each(named_tensors)
    sample: WeightSample | None = None
    if plan.compare:
        sample = WeightSample(await servers.layout(), _compared_versions(config, servers))
        tensors = sample.watch(tensors)

    await _transfer(tensors, config, servers)

    # A server may report success but hold different weights. The checksums cover the weights it holds.
    if sample is not None:
        await _compare(sample, servers)

    # Last, so that a server that responds with the version has passed all other steps.
    await servers.publish(plan.version)


def _compared_versions(config: ModelConfig, servers: WeightServers) -> range:
    """Return the versions whose samples are compared."""
    plan = servers.plan
    if plan.transport == "none":
        # Within this many versions every parameter is chosen: each layer, and each of the up to
        # three parameters outside the layers, one per version.
        return range(plan.version, plan.version + 3 * config.num_layers)
    # Every compared version has another sample, so that a run compares many parameters.
    return range(plan.version, plan.version + 1)


async def _transfer(tensors: NamedTensors, config: ModelConfig, servers: WeightServers) -> None:
    plan = servers.plan
    if plan.transport == "none":
        # Let the tensors pass the sample. A deque of length 0 keeps none of them alive.
        await asyncio.to_thread(deque, tensors, 0)
        return

    await servers.begin_transfer()
    if plan.transport == "disk":
        await send_by_disk(tensors, config, servers, unmerged_shapes(config, plan))
    elif plan.transport in ("nccl", "gloo"):
        await server_group.broadcast(split_into_buckets(tensors, plan.bucket_bytes), servers)
    else:
        await share_memory(split_into_buckets(tensors, plan.bucket_bytes), servers)
    await servers.end_transfer()


async def _compare(sample: WeightSample, servers: WeightServers) -> None:
    """Compare the servers' checksums with those of the sent weights.

    Raises:
        WeightMismatchError: if a server holds different weights.
    """
    plan = servers.plan
    for url, ranks in zip(plan.urls, await servers.checksums(), strict=True):
        if difference := sample.first_difference(ranks):
            raise WeightMismatchError(
                f"{url} received weights {plan.version}, but its content differs in {difference}"
            )
