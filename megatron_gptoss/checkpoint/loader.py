"""Loading checkpoints into a trainer or a model."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gptoss.checkpoint.checksums import damage_in
from megatron_gptoss.checkpoint.directory import TRAINING_STATE_FILE, offer_earlier
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.megatron_faults import (
    FAILURES,
    exact_optimizer_state,
    keep_settings,
)
from megatron_gptoss.checkpoint.pickled_metadata import METADATA_FILE, data_only, read_metadata
from megatron_gptoss.checkpoint.state import (
    EXPERTS_APART,
    check_adapters,
    experts_apart,
    has_adapters,
    load_model_state,
    model_state,
    trainer_state,
)
from megatron_gptoss.checkpoint.streamed_state import (
    KeptState,
    load_parameter_state,
    take_out_parameter_state,
)
from megatron_gptoss.new_directory import is_partial
from megatron_gptoss.trainer import PolicyTrainer
from megatron_gptoss.untrusted_files import MAX_LISTING_BYTES, read_json


def find_damage(path: Path) -> str | None:
    """Compare a checkpoint's files with their checksums, each on one rank. Collective.

    Returns:
        The same on every rank: which file differs, and how; None if none does, or the checkpoint
        has no checksums.
    """
    # Ranks share the files out; what one of them finds all must know, or they would part ways here.
    own = damage_in(path, dist.get_rank(), dist.get_world_size())
    damages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(damages, own)
    return next((damage for damage in damages if damage is not None), None)


def refuse_damaged(path: Path) -> None:
    """Raise CheckpointError naming the damaged file, and the checkpoint before. Collective."""
    damage = find_damage(path)
    if damage is None:
        return
    raise CheckpointError(f"checkpoint {path} cannot be loaded: {damage}; {offer_earlier(path)}")


@torch.no_grad()
def load_checkpoint(path: Path, trainer: PolicyTrainer, is_checked: bool = False) -> dict[str, Any]:
    """Restore model and optimizer in place and return the saved training state. Collective.

    Of a model with adapters these are restored; its base must be the one that they were trained
    on. The layout may differ from the one that saved, if both or neither have expert or tensor
    parallelism. The optimizer's settings (learning rate, betas, ...) stay those of ``trainer``.
    ``is_checked``: ``find_damage`` has found none.

    Raises:
        CheckpointError: when files are missing or damaged, or the layouts cannot be converted.
    """
    if not is_checked:
        refuse_damaged(path)
    try:
        # Said here, because torch forgets why it could not read the file.
        read_metadata(path / METADATA_FILE)
        with data_only():
            return _load_trainer(path, trainer)
    except CheckpointError:
        raise
    except FAILURES as error:
        raise CheckpointError(f"checkpoint {path} cannot be loaded: {_reason(error)}") from error


def _reason(error: BaseException) -> BaseException:
    """Return what a rank raised, of torch's CheckpointException, whose text is a traceback."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def _load_trainer(path: Path, trainer: PolicyTrainer) -> dict[str, Any]:
    check_adapters(path, trainer.module)

    # Whether there is optimizer state decides what the description of the trainer must ask for.
    common = dist_checkpointing.load_common_state_dict(str(path))
    trainer.updated = "optimizer" in common
    if trainer.updated:
        _check_same_optimizers(path, trainer, saved_apart=common[EXPERTS_APART])

    wanted = trainer_state(trainer, is_loading=True)
    of_parameters: list[KeptState] = []
    if trainer.updated:
        of_parameters = take_out_parameter_state(trainer.optimizer, wanted["optimizer"])

    state = dist_checkpointing.load(wanted, str(path))
    load_model_state(trainer.module, state["model"])

    if trainer.updated:
        # The saved groups replace the trainer's, so they have to agree with it first.
        keep_settings(trainer.optimizer, state["optimizer"])
        with exact_optimizer_state(trainer.optimizer, trainer.offloaded):
            trainer.optimizer.load_state_dict(state["optimizer"])
            load_parameter_state(path, of_parameters)
        trainer.offloaded.rest_all()
    else:
        # Without saved state the optimizer's master weights have to come from the model.
        trainer.optimizer.reload_model_params()

    training_state: dict[str, Any] = read_json(path / TRAINING_STATE_FILE, MAX_LISTING_BYTES)
    return training_state


def _check_same_optimizers(path: Path, trainer: PolicyTrainer, saved_apart: bool) -> None:
    if saved_apart == experts_apart(trainer):
        return

    saved_with = "with" if saved_apart else "without"
    needed_size = "above 1" if saved_apart else "1"
    raise CheckpointError(
        f"checkpoint {path} was saved {saved_with} expert or tensor parallelism, "
        "and its optimizer cannot be split or joined: "
        f"go on with parallel.expert or parallel.tensor {needed_size}, "
        "or start a new run whose initial_weights are this run"
    )


def load_model_weights(path: Path, model: torch.nn.Module) -> None:
    """Restore only the weights, at any parallel layout. Collective.

    Raises:
        CheckpointError: naming the directory, when it is no complete checkpoint or one of another
            model.
    """
    if is_partial(path):
        raise CheckpointError(
            f"{path} is unfinished; the process that wrote it was killed, or is still writing"
        )
    if not (path / "metadata.json").exists():
        raise CheckpointError(f"{path} is not a torch_dist checkpoint: metadata.json is missing")
    if has_adapters(model):
        raise CheckpointError(
            f"{path}: the base of adapters is loaded from a Hugging Face directory so far"
        )
    check_adapters(path, model)
    refuse_damaged(path)

    try:
        read_metadata(path / METADATA_FILE)
        with data_only():
            loaded = dist_checkpointing.load({"model": model_state(model)}, str(path))
        load_model_state(model, loaded["model"])
    except FAILURES as error:
        raise CheckpointError(f"weights of {path} cannot be loaded: {_reason(error)}") from error
