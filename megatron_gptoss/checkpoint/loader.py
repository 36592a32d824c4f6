"""Loading of checkpoints into a trainer or a model."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gptoss.checkpoint.checksums import compare_checksums
from megatron_gptoss.checkpoint.directory import TRAINING_STATE_FILE, describe_earlier
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.megatron_workarounds import (
    FAILURES,
    exact_optimizer_state,
    keep_settings,
)
from megatron_gptoss.checkpoint.pickled_metadata import METADATA_FILE, data_only, read_metadata
from megatron_gptoss.checkpoint.state import (
    HAS_EXPERT_OPTIMIZER,
    check_adapters,
    has_adapters,
    has_expert_optimizer,
    load_model_state,
    model_state,
    trainer_state,
)
from megatron_gptoss.checkpoint.streamed_state import (
    StateShard,
    load_parameter_state,
    take_out_parameter_state,
)
from megatron_gptoss.new_directory import is_partial
from megatron_gptoss.trainer import PolicyTrainer
from megatron_gptoss.untrusted_files import MAX_LISTING_BYTES, read_json


def find_damage(path: Path) -> str | None:
    """Compare the files of a checkpoint with their checksums, each file on one rank. Collective.

    Returns:
        Description of the first damage, the same on every rank. None if all files match or the
        checkpoint has no checksums.
    """
    # Each rank reads a part of the files. All ranks must get the same answer: otherwise some would
    # raise while the others wait for them in the next collective call.
    local_damage = compare_checksums(path, dist.get_rank(), dist.get_world_size())
    damages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(damages, local_damage)
    return next((damage for damage in damages if damage is not None), None)


def check_undamaged(path: Path) -> None:
    """Raise CheckpointError if a file is damaged. Collective.

    The message names the file and the previous checkpoint.
    """
    damage = find_damage(path)
    if damage is None:
        return
    raise CheckpointError(f"checkpoint {path} cannot be loaded: {damage}; {describe_earlier(path)}")


@torch.no_grad()
def load_checkpoint(path: Path, trainer: PolicyTrainer, is_checked: bool = False) -> dict[str, Any]:
    """Restore model and optimizer of a trainer in place. Collective.

    The parallel layout may differ from the saved one if both layouts or neither have expert or
    tensor parallelism. The settings of the optimizer (learning rate, betas, ...) stay those of
    ``trainer``.

    Args:
        path: checkpoint.
        trainer: trainer to restore. If it trains adapters, only these are restored, and its base
            must be the one with which they were trained.
        is_checked: whether ``find_damage`` has found no damage already.

    Returns:
        The training state that was passed to ``CheckpointWriter.start``.

    Raises:
        CheckpointError: files are missing or damaged, or the layouts cannot be converted.
    """
    if not is_checked:
        check_undamaged(path)
    try:
        # Read the metadata first for a clear error: torch drops the reason why it cannot read it.
        read_metadata(path / METADATA_FILE)
        with data_only():
            return _load_trainer(path, trainer)
    except CheckpointError:
        raise
    except FAILURES as error:
        raise CheckpointError(f"checkpoint {path} cannot be loaded: {_reason(error)}") from error


def _reason(error: BaseException) -> BaseException:
    """Return the error of the first failed rank if ``error`` is torch's CheckpointException."""
    # The text of a CheckpointException contains whole tracebacks.
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def _load_trainer(path: Path, trainer: PolicyTrainer) -> dict[str, Any]:
    """Restore a trainer from an undamaged checkpoint and return the training state."""
    # Before loading, so that a wrong base or rank gives a clear message.
    check_adapters(path, trainer.module)

    # A checkpoint from before the first update has no optimizer state. Requesting missing tensors
    # would fail.
    common = dist_checkpointing.load_common_state_dict(str(path))
    trainer.updated = "optimizer" in common
    if trainer.updated:
        _check_same_optimizers(path, trainer, was_separate=common[HAS_EXPERT_OPTIMIZER])

    expected_state = trainer_state(trainer, is_loading=True)
    # The state of parameters is large, so it is loaded in parts, after everything else.
    parameter_states: list[StateShard] = []
    if trainer.updated:
        parameter_states = take_out_parameter_state(trainer.optimizer, expected_state["optimizer"])

    state = dist_checkpointing.load(expected_state, str(path))
    load_model_state(trainer.module, state["model"])

    if trainer.updated:
        # load_state_dict replaces the trainer's parameter groups by the saved ones.
        keep_settings(trainer.optimizer, state["optimizer"])
        # The state of parameters comes second: load_state_dict creates the groups and step counts.
        with exact_optimizer_state(trainer.optimizer, trainer.offloaded):
            trainer.optimizer.load_state_dict(state["optimizer"])
            load_parameter_state(path, parameter_states)
        trainer.offloaded.offload_all()
    else:
        # Otherwise the first update would start from the master weights of the initial model.
        trainer.optimizer.reload_model_params()

    training_state: dict[str, Any] = read_json(path / TRAINING_STATE_FILE, MAX_LISTING_BYTES)
    return training_state


def _check_same_optimizers(path: Path, trainer: PolicyTrainer, was_separate: bool) -> None:
    """Raise CheckpointError if only one of checkpoint and trainer has an optimizer for experts.

    ``was_separate``: True if the checkpoint has one.
    """
    if was_separate == has_expert_optimizer(trainer):
        return

    saved_with = "with" if was_separate else "without"
    needed_size = "above 1" if was_separate else "1"
    raise CheckpointError(
        f"checkpoint {path} was saved {saved_with} expert or tensor parallelism, "
        "and its optimizer cannot be split or joined. "
        f"Resume with parallel.expert or parallel.tensor {needed_size}, "
        "or start a new run with this run as initial_weights"
    )


def load_model_weights(path: Path, model: torch.nn.Module) -> None:
    """Load the weights of a checkpoint into a model of any parallel layout. Collective.

    Args:
        path: checkpoint of a trainer, or a conversion.
        model: model without adapters.

    Raises:
        CheckpointError: the directory is not a complete checkpoint or has a different model. The
            message names it.
    """
    # These checks precede the checksums, because they give clearer messages.
    if is_partial(path):
        raise CheckpointError(
            f"{path} is incomplete: the process that writes it was killed, or is still running"
        )
    if not (path / "metadata.json").exists():
        raise CheckpointError(f"{path} is not a torch_dist checkpoint: metadata.json is missing")
    if has_adapters(model):
        raise CheckpointError(
            f"{path}: the base of adapters cannot be loaded from a checkpoint. Use a Hugging Face "
            "directory"
        )
    check_adapters(path, model)
    check_undamaged(path)

    try:
        read_metadata(path / METADATA_FILE)
        with data_only():
            loaded = dist_checkpointing.load({"model": model_state(model)}, str(path))
        load_model_state(model, loaded["model"])
    except FAILURES as error:
        raise CheckpointError(f"weights of {path} cannot be loaded: {_reason(error)}") from error
