"""Parts of ``gptoss eval``: held-out episodes of a checkpoint or an endpoint, and their records."""

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
from converters.mxfp4_tensors import rounded_to_mxfp4
from megatron_gptoss.checkpoint.directory import latest_checkpoint
from megatron_gptoss.config.precision import torch_dtype
from rl_loop.config.partial_configs import EpisodesConfig
from rl_loop.config.training import EvaluationConfig
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.engines.completions import CompletionsEngine
from rl_loop.environments import Task
from rl_loop.infrastructure import CircuitBreaker
from rl_loop.rollout.collector import HeldOutTasks
from rl_loop.rollout.group_stream import GroupRequest
from rl_loop.rollout.worker import RolloutWorker
from rl_loop.tracking.run_directory import atomic_write_text
from rl_loop.weight_sync.source import LoadedWeights

logger = logging.getLogger(__name__)


def hf_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, weight) for a Hugging Face directory, a checkpoint or a run."""
    if (path / "config.json").exists():
        directory = HfDirectory(path)
        yield from ((name, directory.get(name)) for name in directory.names())
        return

    # A run has checkpoints. Otherwise the path itself may be one.
    checkpoint = latest_checkpoint(path / "checkpoints") or path
    if not (checkpoint / "metadata.json").exists():
        raise ConversionError(
            f"{path} is neither a Hugging Face directory (config.json), nor a Megatron checkpoint (metadata.json), nor "
            "the directory of a run that has saved a checkpoint"
        )
    weights = MegatronCheckpoint(checkpoint)
    for name, tensor in weights.hf_tensors():
        if weights.is_quantized:
            # It stores experts before rounding, but the model computes with rounded ones.
            tensor = rounded_to_mxfp4(name, tensor)
        yield name, tensor


def load_weights(source: Path | None, dtype: str) -> LoadedWeights:
    """Read all weights of ``source``, as in ``hf_tensors``, in the precision ``dtype``.

    Raises:
        ConversionError: if there are no weights.
    """
    if source is None:
        raise ConversionError(
            "nothing to evaluate. Pass --weights, or set initial_weights or evaluation.endpoint"
        )
    precision = torch_dtype(dtype)
    return LoadedWeights({name: tensor.to(precision) for name, tensor in hf_tensors(source)})


def evaluation_requests(
    tasks: HeldOutTasks, samples_per_task: int, temperature: float
) -> list[GroupRequest]:
    """Return requests for episodes of every held-out task, with the same seeds in every call."""
    # Fixed seeds make two checkpoints comparable.
    seeds = tuple(range(samples_per_task))
    return [GroupRequest(task, seeds, temperature) for task in tasks.held_out()]


async def run_at_endpoint(
    requests: Sequence[GroupRequest],
    url: str,
    evaluation: EvaluationConfig,
    config: EpisodesConfig,
    worker_class: type[RolloutWorker],
) -> list[TrajectoryGroup]:
    """Run the episodes in this process, with the server at ``url`` as the policy.

    Args:
        requests: episodes to run.
        url: URL of the server.
        evaluation: section of the configuration.
        config: configuration of the episodes.
        worker_class: class of the worker.

    Raises:
        EndpointError: if the server cannot be used.
    """
    engine = CompletionsEngine(url, evaluation.endpoint_model, evaluation.max_concurrent_episodes)
    worker = worker_class(config, lambda: engine, torch.get_num_threads())
    rollout = config.rollout
    # Failures of the endpoint must not count as wrong answers.
    breaker = CircuitBreaker.with_streak(rollout.max_invalid_fraction)
    # Limit the episodes, not the tasks, because a task has several episodes.
    slots = asyncio.Semaphore(
        max(1, evaluation.max_concurrent_episodes // evaluation.samples_per_task)
    )

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
        # One failed task is enough, because an unreachable endpoint fails every episode.
        raise errors.exceptions[0] from None
    finally:
        await worker.close()

    # A streak of failures has ended the evaluation before. Their share is known at its end.
    breaker.check_fraction()
    finished = [group.result() for group in groups]
    for group in finished:
        if group.skipped is not None:
            logger.warning("the evaluation skipped a task: %s", group.skipped)
    return finished


def evaluation_records(
    requests: Sequence[GroupRequest], groups: Sequence[TrajectoryGroup]
) -> list[dict[str, Any]]:
    """Return one record per episode."""
    records = []
    for request, group in zip(requests, groups, strict=True):
        for sample, trajectory in enumerate(group.trajectories):
            records.append(evaluation_record(request.task, sample, trajectory))
    return records


def write_records(records: Sequence[dict[str, Any]], output: Path) -> None:
    """Write records to a file of JSON lines."""
    output.parent.mkdir(parents=True, exist_ok=True)
    # The write is atomic, so that an interrupted evaluation leaves no partial file.
    atomic_write_text(output, "".join(json.dumps(record) + "\n" for record in records))


def evaluation_record(task: Task, sample: int, episode: Trajectory) -> dict[str, Any]:
    """Return one line of an evaluation's JSONL."""
    # Tasks without a category are grouped by their environment.
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
        "sampled_tokens": episode.episode_sampled_tokens,
        "turns": [
            {"role": turn.role, "text": turn.text}
            for sequence in episode.sequences
            for turn in sequence.turns
        ],
    }
