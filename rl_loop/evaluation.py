"""Held-out accuracy of a checkpoint, without a trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.torch_dist import MegatronCheckpoint
from megatron_gptoss.checkpoint import latest_checkpoint
from rl_loop.config import RlConfig
from rl_loop.rollout_pool import GroupRequest, RolloutPool
from rl_loop.run import ray_session
from rl_loop.tasks import TaskSource
from rl_loop.trajectory import Trajectory


def evaluation_figures(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Means over episodes."""
    n = len(episodes)
    return {
        "accuracy": sum(e.reward_parts["correct"] for e in episodes) / n,
        "tool_call_rate": sum(e.tool_calls > 0 for e in episodes) / n,
        "turns": sum(e.assistant_turns for e in episodes) / n,
    }


def held_out_episodes(rollouts: RolloutPool, tasks: TaskSource, temperature: float) -> list[Trajectory]:
    """One episode of every held-out task with the weights that the workers have; the same seeds every time."""
    requests = [GroupRequest(task, (i,), temperature) for i, task in enumerate(tasks.held_out())]
    return [group.trajectories[0] for group in rollouts.run(requests)]


def hf_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights by Hugging Face name, of a Hugging Face directory, a Megatron checkpoint or a run directory."""
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


def evaluate_checkpoint(config: RlConfig, weights: Path | None) -> dict[str, float]:
    """Accuracy, tool-call rate and turns on the held-out tasks of ``config``."""
    source = weights or config.initial_weights
    if source is None:
        raise ConversionError("nothing to evaluate: give --weights, or initial_weights in the configuration")
    dtype = getattr(torch, config.dtype)
    named = {name: tensor.to(dtype) for name, tensor in hf_tensors(source)}
    tasks = TaskSource(config)
    with ray_session():
        rollouts = RolloutPool(config)
        rollouts.ready()
        rollouts.sync_weights(named, version=0)
        figures = evaluation_figures(held_out_episodes(rollouts, tasks, config.rollout.evaluation_temperature))
        rollouts.close()
    return figures
