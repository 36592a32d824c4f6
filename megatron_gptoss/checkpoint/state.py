"""Tensors of a trainer that a checkpoint contains, as Megatron's sharded state dicts."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_gptoss.checkpoint.base_digest import base_digest
from megatron_gptoss.checkpoint.directory import ADAPTER_FILE
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.gathered_state import gather_on_writing_ranks, separate_tensors
from megatron_gptoss.checkpoint.megatron_workarounds import (
    exact_optimizer_state,
    number_fp32_parameters,
)
from megatron_gptoss.checkpoint.streamed_state import describe_without_memory
from megatron_gptoss.config import AdapterConfig
from megatron_gptoss.critic import ValueHead
from megatron_gptoss.model import list_chunks
from megatron_gptoss.trainer import PolicyTrainer
from megatron_gptoss.untrusted_files import read_json

HAS_EXPERT_OPTIMIZER = "has_expert_optimizer"
"""Key of a checkpoint for the result of ``has_expert_optimizer``."""


def sharding_metadata() -> dict[str, Any]:
    """Return the options of sharded state dicts, which decide the names of saved tensors."""
    return {
        # "fully_reshardable" saves the state of a parameter under the parameter's name, so that
        # other layouts find it. The prefix of chained optimizers would add the number of the
        # optimizer to the name. Numbers differ between layouts, because experts have a separate
        # optimizer in some layouts only.
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
    }


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return the sharded weights of each chunk of ``model``, by chunk number.

    For a model with adapters, the result has only trained weights: the adapters and the value head
    of a critic.
    """
    # The frozen base never changes, and a checkpoint without it has megabytes instead of gigabytes.
    metadata = sharding_metadata()
    state = {}
    for i, chunk in enumerate(list_chunks(model)):
        weights = chunk.sharded_state_dict(metadata=metadata)
        if has_adapters(model):
            head = _value_head_name(chunk)
            weights = {
                name: weight
                for name, weight in weights.items()
                if ".adapters." in name or name == head
            }
        state[str(i)] = weights
    return state


def _value_head_name(chunk: Any) -> str | None:
    """Return the weight name of the critic's value head; None if the chunk has none."""
    for name, module in chunk.named_modules():
        if isinstance(module, ValueHead):
            return f"{name}.weight"
    return None


def load_model_state(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Copy loaded weights into ``model``.

    Args:
        model: model to fill.
        state: loaded weights of each chunk by its number, with the structure of ``model_state``.
    """
    for i, chunk in enumerate(list_chunks(model)):
        # With adapters the state lacks the base, so missing keys are correct.
        chunk.load_state_dict(state[str(i)], strict=not has_adapters(model))


def has_adapters(model: torch.nn.Module) -> bool:
    """Return True if ``model`` trains adapters instead of all weights."""
    return list_chunks(model)[0].config.adapter is not None


def describe_adapters(model: torch.nn.Module) -> dict[str, Any]:
    """Return the content of ADAPTER_FILE: base digest and adapter settings. Collective."""
    settings = list_chunks(model)[0].config.adapter.model_dump(mode="json")
    return {"base": base_digest(model), "settings": settings}


def check_adapters(path: Path, model: torch.nn.Module) -> None:
    """Check that checkpoint and model have the same base and adapters, or both none. Collective.

    Args:
        path: checkpoint.
        model: model into which it will be loaded.

    Raises:
        CheckpointError: they differ. The message names the difference.
    """
    file = path / ADAPTER_FILE
    saved = read_json(file) if file.exists() else None
    if not has_adapters(model):
        if saved is None:
            return
        raise CheckpointError(
            f"checkpoint {path} holds adapters, but adapter is null in this run. Set adapter as in the "
            "run that saved the checkpoint"
        )
    if saved is None:
        raise CheckpointError(
            f"checkpoint {path} holds a whole model, but this run trains adapters. Export it (gptoss "
            "convert export), and set initial_weights to the export"
        )

    # The settings first: comparing them is instant, and the digest reads the whole base.
    _check_settings(path, saved, model)
    digest = base_digest(model)
    if saved["base"] != digest:
        raise CheckpointError(
            f"checkpoint {path} holds adapters of a different base: the digest of its weights is "
            f"{saved['base']}, that of this model is {digest}. Load the weights with which the "
            "adapters were trained"
        )


def _check_settings(path: Path, saved: dict[str, Any], model: torch.nn.Module) -> None:
    """Raise CheckpointError if the saved adapter settings differ from those of ``model``.

    The message names the configuration key.
    """
    config = list_chunks(model)[0].config
    settings = AdapterConfig.model_validate(saved["settings"])
    difference = config.adapter.difference(settings, config.architecture)
    if difference is not None:
        key, own, theirs = difference
        raise CheckpointError(
            f"checkpoint {path} was saved with {key}={theirs}, but the configuration has {own}. Set "
            f"{key}={theirs}, or start a new run"
        )


def trainer_state(trainer: PolicyTrainer, is_loading: bool) -> dict[str, Any]:
    """Return the sharded state of model and optimizer.

    Before the first optimizer step, the result has only the model.

    Args:
        trainer: trainer to save or to restore.
        is_loading: True for loading: the tensors of a distributed optimizer's state are on the meta
            device. False for saving: the state is gathered, which is collective.
    """
    model = model_state(trainer.module)
    # The optimizer has no state before its first step. A checkpoint may be saved before that step:
    # while only the critic learns, or if all tokens so far were masked.
    if not trainer.updated:
        return {"model": model}

    if is_loading:
        parameter_states = describe_without_memory(trainer.optimizer)
    else:
        parameter_states = gather_on_writing_ranks(trainer.optimizer)
    with (
        number_fp32_parameters(trainer.optimizer),
        exact_optimizer_state(trainer.optimizer, trainer.offloaded),
        parameter_states,
    ):
        optimizer = trainer.optimizer.sharded_state_dict(
            model,
            is_loading=is_loading,
            metadata=sharding_metadata(),
        )

    if not is_loading:
        separate_tensors(optimizer)
    return {"model": model, "optimizer": optimizer}


def has_expert_optimizer(trainer: PolicyTrainer) -> bool:
    """Return True if Megatron has a separate optimizer for the experts."""
    # Megatron creates one if expert or tensor parallelism is above 1. Parameters of experts then
    # have ``allreduce=False``.
    trained = [parameter for parameter in trainer.module.parameters() if parameter.requires_grad]
    return any(not getattr(parameter, "allreduce", True) for parameter in trained)
