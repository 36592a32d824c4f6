"""Evaluation of a policy on held-out tasks: during training, and ``gptoss eval`` for any
checkpoint or endpoint."""

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.megatron_checkpoint import MegatronCheckpoint
from megatron_gptoss.checkpoint.directory import latest_checkpoint
from rl_loop.cluster.ray_session import ray_session
from rl_loop.config.run import RlConfig
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.engines.backend import LoadedWeights
from rl_loop.engines.completions import CompletionsEngine
from rl_loop.environments import Task
from rl_loop.infrastructure import InfrastructureBreaker
from rl_loop.lifecycle.store_size import check_running_store, evaluation_need, store_bytes
from rl_loop.rollout.pool import GroupRequest
from rl_loop.rollout.worker import RolloutWorker
from rl_loop.session import build_rollouts, build_tasks, worker_settings
from rl_loop.tracking.run_directory import atomic_write_text

logger = logging.getLogger(__name__)


def hf_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights by Hugging Face name, of a Hugging Face directory, a Megatron checkpoint
    or a run directory."""
    if (path / "config.json").exists():
        directory = HfDirectory(path)
        yield from ((name, directory.get(name)) for name in directory.names())
        return

    checkpoint = latest_checkpoint(path / "checkpoints") or path
    if not (checkpoint / "metadata.json").exists():
        raise ConversionError(
            f"{path} is neither a Hugging Face directory (config.json), nor a Megatron checkpoint (metadata.json), nor "
            "the directory of a run that has saved a checkpoint"
        )
    yield from MegatronCheckpoint(checkpoint).hf_tensors()


def evaluate(config: RlConfig, weights: Path | None, output: Path) -> list[dict[str, Any]]:
    """Run ``evaluation.samples_per_task`` episodes of every held-out task and write them to
    ``output`` as records.

    ``weights`` replace the configuration's ``initial_weights``. Returns the records. Raises
    ConversionError or EndpointError if there is nothing to evaluate."""
    tasks = build_tasks(config)
    seeds = tuple(range(config.evaluation.samples_per_task))
    temperature = config.rollout.evaluation_temperature
    requests = [GroupRequest(task, seeds, temperature) for task in tasks.held_out()]

    if config.evaluation.endpoint is not None:
        groups = asyncio.run(_run_at_endpoint(config, config.evaluation.endpoint, requests))
    else:
        groups = _run_with_own_engines(config, weights or config.initial_weights, requests)

    records = []
    for request, group in zip(requests, groups, strict=True):
        for sample, trajectory in enumerate(group.trajectories):
            records.append(evaluation_record(request.task, sample, trajectory))
    output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(output, "".join(json.dumps(record) + "\n" for record in records))
    return records


def _run_with_own_engines(
    config: RlConfig, source: Path | None, requests: Sequence[GroupRequest]
) -> list[TrajectoryGroup]:
    if source is None:
        raise ConversionError(
            "nothing to evaluate: give --weights, initial_weights or evaluation.endpoint"
        )
    dtype = getattr(torch, config.dtype)
    named = {name: tensor.to(dtype) for name, tensor in hf_tensors(source)}
    with ExitStack() as stack:
        need = evaluation_need(config)
        stack.enter_context(ray_session(store_bytes(need)))
        check_running_store(need)
        rollouts = build_rollouts(config)
        stack.callback(rollouts.close)
        rollouts.ready()
        rollouts.sync_weights(LoadedWeights(named), version=0)
        return rollouts.run(requests)


async def _run_at_endpoint(
    config: RlConfig, url: str, requests: Sequence[GroupRequest]
) -> list[TrajectoryGroup]:
    settings = config.evaluation
    engine = CompletionsEngine(url, settings.endpoint_model, settings.concurrency)
    worker = RolloutWorker(worker_settings(config), lambda: engine, torch.get_num_threads())
    breaker = InfrastructureBreaker(
        config.rollout.max_invalid_share, config.rollout.max_invalid_streak
    )
    # The endpoint takes so many episodes at a time, and a task brings several.
    slots = asyncio.Semaphore(max(1, settings.concurrency // settings.samples_per_task))

    async def run(request: GroupRequest) -> TrajectoryGroup:
        async with slots:
            group = await worker.run_group(request.task, request.seeds, request.temperature)
        breaker.observe(group)
        return group

    await worker.start()
    try:
        async with asyncio.TaskGroup() as running:
            groups = [running.create_task(run(request)) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[
            0
        ] from None  # one is enough: an endpoint that is away fails every episode
    finally:
        await worker.close()

    breaker.check_share()
    finished = [group.result() for group in groups]
    for group in finished:
        if group.skipped is not None:
            logger.warning("not evaluated: %s", group.skipped)
    return finished


def evaluation_record(task: Task, sample: int, episode: Trajectory) -> dict[str, Any]:
    """Return one line of an evaluation's JSONL."""
    category = task.metadata.get("category", task.environment)
    return {
        "task_id": task.task_id,
        "category": category,
        "sample": sample,
        "reward": episode.reward,
        "reward_parts": episode.reward_parts,
        "answer": episode.answer,
        "finish_reason": episode.finish_reason,
        "format_error": episode.format_error,
        "tool_calls": episode.tool_calls,
        "tool_errors": episode.tool_errors,
        "sampled_tokens": episode.sampled_tokens,
        "turns": [{"role": turn.role, "text": turn.text} for turn in episode.turns],
    }
