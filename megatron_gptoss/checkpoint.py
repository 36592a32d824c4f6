"""Saving and resuming a trainer: torch_dist checkpoints that are either complete or not there.

    ROOT/step_000120/            torch_dist: model and optimizer, loadable at other tensor/pipeline/expert sizes (model)
    ROOT/step_000120/gptoss_config.json      the ModelConfig
    ROOT/step_000120/training_state.json     what the caller wants back: step, data position, ...
    ROOT/latest                  the name of the newest complete checkpoint

A checkpoint is written beside its final place and renamed when every rank is done; ``latest`` changes last. A full
disk or a kill at any moment leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gptoss.config import ModelConfig
from megatron_gptoss.trainer import PolicyTrainer

MODEL_CONFIG_FILE = "gptoss_config.json"
TRAINING_STATE_FILE = "training_state.json"
LATEST_FILE = "latest"

FAILURES = (Exception, CheckpointException)  # torch's own is a BaseException, which "except Exception" lets through


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it and what to do."""


def _metadata() -> dict[str, Any]:
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
    }


def _state(trainer: PolicyTrainer, loading: bool) -> dict[str, Any]:
    metadata = _metadata()
    model = trainer.module.sharded_state_dict(metadata=metadata)
    if not trainer.updated:  # a critic may be learning alone, or every token be masked
        return {"model": model}
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def save_checkpoint(
    root: Path, trainer: PolicyTrainer, step: int, training_state: dict[str, Any], keep: int = 2
) -> Path:
    """Write ``root/step_{step}``, point ``latest`` at it and delete all but the newest ``keep``. Collective.

    Raises CheckpointError on every rank if any rank could not write; then the previous checkpoint is still the latest.
    """
    final, partial = root / f"step_{step:06d}", root / f"step_{step:06d}.partial"
    first = dist.get_rank() == 0
    error: BaseException | None = None
    try:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    except OSError as failure:
        error = failure
    _raise_together(error, partial)
    try:
        dist_checkpointing.save(_state(trainer, loading=False), str(partial))
    except FAILURES as failure:  # whatever went wrong on this rank must be known to all before anyone goes on
        error = failure
    _raise_together(error, partial)
    try:
        if first:
            config: ModelConfig = trainer.module.config.gptoss
            (partial / MODEL_CONFIG_FILE).write_text(config.model_dump_json(indent=1))
            (partial / TRAINING_STATE_FILE).write_text(json.dumps(training_state))
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            pointer = root / f"{LATEST_FILE}.partial"
            pointer.write_text(final.name)
            os.replace(pointer, root / LATEST_FILE)
            for old in sorted(root.glob("step_??????"))[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
    except OSError as failure:
        error = failure
    _raise_together(error, partial)
    return final


def _raise_together(error: BaseException | None, partial: Path) -> None:
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else f"rank {dist.get_rank()}: {error!r}")
    failed = [message for message in messages if message]
    if not failed:
        return
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    free = shutil.disk_usage(partial.parent if partial.parent.exists() else Path.cwd()).free >> 20
    raise CheckpointError(
        f"checkpoint {partial.with_suffix('')} could not be written ({failed[0]}); {free} MiB are free there. "
        "The previous checkpoint is untouched."
    ) from error


def latest_checkpoint(root: Path) -> Path | None:
    """The newest complete checkpoint under ``root``, or None. Raises CheckpointError if it is gone."""
    pointer = root / LATEST_FILE
    if not pointer.exists():
        return None
    path = root / pointer.read_text().strip()
    if not (path / TRAINING_STATE_FILE).exists():
        raise CheckpointError(
            f"{pointer} names {path.name}, which is missing or incomplete; correct or delete the file"
        )
    return path


@torch.no_grad()
def load_checkpoint(path: Path, trainer: PolicyTrainer) -> dict[str, Any]:
    """Restore model and optimizer in place and return the saved training state. Collective; same layout as saved."""
    try:
        trainer.updated = "optimizer" in dist_checkpointing.load_common_state_dict(str(path))
        state = dist_checkpointing.load(_state(trainer, loading=True), str(path))
        trainer.module.load_state_dict(state["model"], strict=True)
        if trainer.updated:
            trainer.optimizer.load_state_dict(state["optimizer"])
        else:
            trainer.optimizer.reload_model_params()
        return json.loads((path / TRAINING_STATE_FILE).read_text())
    except FAILURES as error:
        raise CheckpointError(f"checkpoint {path} cannot be loaded: {error}") from error


def load_model_weights(path: Path, model: GPTModel) -> None:
    """Restore only the weights, at any parallel layout. Collective. Raises CheckpointError naming the directory."""
    if not (path / "metadata.json").exists():
        raise CheckpointError(f"{path} is not a torch_dist checkpoint: metadata.json is missing")
    try:
        state = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=_metadata())}, str(path))
        model.load_state_dict(state["model"], strict=True)
    except FAILURES as error:
        raise CheckpointError(f"weights of {path} cannot be loaded: {error}") from error
