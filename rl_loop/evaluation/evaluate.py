"""Evaluation of a policy on held-out tasks: during training, and ``gptoss eval`` for any checkpoint or endpoint."""

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.megatron_checkpoint import MegatronCheckpoint
from megatron_gptoss.checkpoint.directory import latest_checkpoint
from rl_loop.cluster.ray_session import ray_session
from rl_loop.config.run import RlConfig
from rl_loop.data.samples import outcome_sums
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.engines.backend import LoadedWeights
from rl_loop.engines.completions import CompletionsEngine
from rl_loop.environments import Task
from rl_loop.infrastructure import InfrastructureBreaker
from rl_loop.rollout.pool import GroupRequest
from rl_loop.rollout.worker import RolloutWorker
from rl_loop.session import build_rollouts, build_tasks, worker_settings
from rl_loop.tasks.source import TaskSource
from rl_loop.tracking.run_directory import atomic_write_text

logger = logging.getLogger(__name__)


def evaluation_figures(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Means over episodes; none of no episodes."""
    if not episodes:
        return {}
    return {name: total / len(episodes) for name, total in outcome_sums(episodes).items()}


def held_out_requests(tasks: TaskSource, temperature: float) -> list[GroupRequest]:
    """One episode of every held-out task; the same seeds every time."""
    return [GroupRequest(task, (i,), temperature) for i, task in enumerate(tasks.held_out())]


def hf_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights by Hugging Face name, of a Hugging Face directory, a Megatron checkpoint or a run directory."""
    if (path / "config.json").exists():
        directory = HfDirectory(path)
        yield from ((name, directory.get(name)) for name in directory.names())
        return
    checkpoint = latest_checkpoint(path / "checkpoints") or path
    if not (checkpoint / "metadata.json").exists():
        known = "a Hugging Face directory (config.json), nor a Megatron checkpoint (metadata.json), nor the directory"
        raise ConversionError(f"{path} is neither {known} of a run that has saved a checkpoint")
    yield from MegatronCheckpoint(checkpoint).hf_tensors()


def evaluate(config: RlConfig, weights: Path | None, output: Path) -> list[dict[str, Any]]:
    """``evaluation.samples_per_task`` episodes of every held-out task, as records that are also written to ``output``.
    Raises ConversionError or EndpointError if there is nothing to evaluate."""
    tasks = build_tasks(config)
    seeds = tuple(range(config.evaluation.samples_per_task))
    requests = [GroupRequest(task, seeds, config.rollout.evaluation_temperature) for task in tasks.held_out()]
    if config.evaluation.endpoint is not None:
        groups = asyncio.run(_at_endpoint(config, config.evaluation.endpoint, requests))
        for group in groups:
            if group.skipped is not None:
                logger.warning("not evaluated: %s", group.skipped)
    else:
        source = weights or config.initial_weights
        if source is None:
            raise ConversionError("nothing to evaluate: give --weights, initial_weights or evaluation.endpoint")
        dtype = getattr(torch, config.dtype)
        named = {name: tensor.to(dtype) for name, tensor in hf_tensors(source)}
        with ray_session():
            rollouts = build_rollouts(config)
            rollouts.ready()
            rollouts.sync_weights(LoadedWeights(named), version=0)
            groups = rollouts.run(requests)
            rollouts.close()
    records = [
        evaluation_record(request.task, sample, trajectory)
        for request, group in zip(requests, groups, strict=True)
        for sample, trajectory in enumerate(group.trajectories)
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(output, "".join(json.dumps(record) + "\n" for record in records))
    return records


async def _at_endpoint(config: RlConfig, url: str, requests: Sequence[GroupRequest]) -> list[TrajectoryGroup]:
    settings = config.evaluation
    engine = CompletionsEngine(url, settings.endpoint_model, settings.concurrency)
    worker = RolloutWorker(worker_settings(config), lambda: engine, torch.get_num_threads())
    breaker = InfrastructureBreaker(config.rollout.max_invalid_share, config.rollout.max_invalid_streak)
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
        raise errors.exceptions[0] from None  # one is enough: an endpoint that is away fails every episode
    finally:
        await worker.close()
    breaker.check_share()
    return [group.result() for group in groups]


def evaluation_record(task: Task, sample: int, episode: Trajectory) -> dict[str, Any]:
    """One line of an evaluation's JSONL."""
    category = task.metadata.get("category", task.environment)
    names = ("reward", "reward_parts", "answer", "finish_reason", "format_error", "tool_calls", "tool_errors",
             "sampled_tokens")  # fmt: skip
    figures = {name: getattr(episode, name) for name in names}
    turns = [{"role": turn.role, "text": turn.text} for turn in episode.turns]
    return {"task_id": task.task_id, "category": category, "sample": sample, **figures, "turns": turns}
