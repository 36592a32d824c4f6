"""Which tensors of a trainer a checkpoint holds, as Megatron's sharded state dicts."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_gptoss.checkpoint.base_digest import base_digest
from megatron_gptoss.checkpoint.directory import ADAPTER_FILE
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.gathered_state import gather_on_writing_ranks, separate_tensors
from megatron_gptoss.checkpoint.megatron_faults import (
    exact_optimizer_state,
    number_fp32_parameters,
)
from megatron_gptoss.checkpoint.streamed_state import describe_without_memory
from megatron_gptoss.config import AdapterConfig
from megatron_gptoss.critic import ValueHead
from megatron_gptoss.model import chunks_of
from megatron_gptoss.trainer import PolicyTrainer
from megatron_gptoss.untrusted_files import read_json

EXPERTS_APART = "experts_have_an_optimizer_of_their_own"
"""Key of a checkpoint under which ``experts_apart`` is kept."""


def sharding_metadata() -> dict[str, Any]:
    """Return the settings of sharded state dicts; they decide the names of what is saved."""
    return {
        # Megatron's checkpoints hold every parameter's state under the parameter's name
        # ("fully_reshardable"), so that another layout finds it. The prefix of chained optimizers
        # would put the number of an optimizer into the names, and experts have one of their own in
        # some layouts only.
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
    }


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """Describe the weights of every chunk of ``model``, by the chunk's number.

    Of a model with adapters, only what is trained: these, and of a critic its value head. The rest
    never changes.
    """
    metadata = sharding_metadata()
    state = {}
    for i, chunk in enumerate(chunks_of(model)):
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
    """Return the name of the weight of a critic's value head; None if the chunk has none."""
    for name, module in chunk.named_modules():
        if isinstance(module, ValueHead):
            return f"{name}.weight"
    return None


def load_model_state(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Copy loaded weights, by the chunk's number, into ``model``."""
    for i, chunk in enumerate(chunks_of(model)):
        # The base of adapters is not in the state.
        chunk.load_state_dict(state[str(i)], strict=not has_adapters(model))


def has_adapters(model: torch.nn.Module) -> bool:
    """Return whether adapters are what is trained of ``model``."""
    return chunks_of(model)[0].config.adapter is not None


def describe_adapters(model: torch.nn.Module) -> dict[str, Any]:
    """Return the content of a checkpoint's ADAPTER_FILE. Collective.

    It says which base the adapters change, and the settings that give them shapes and scale.
    """
    settings = chunks_of(model)[0].config.adapter.model_dump(mode="json")
    return {"base": base_digest(model), "settings": settings}


def check_adapters(path: Path, model: torch.nn.Module) -> None:
    """Check that the checkpoint ``path`` has the adapters that ``model`` has, if any. Collective.

    Raises:
        CheckpointError: saying what differs; the base is compared, too.
    """
    file = path / ADAPTER_FILE
    saved = read_json(file) if file.exists() else None
    if not has_adapters(model):
        if saved is None:
            return
        raise CheckpointError(
            f"checkpoint {path} holds adapters, and all parameters of this model are trained: "
            "load it with the settings of the adapters"
        )
    if saved is None:
        raise CheckpointError(
            f"checkpoint {path} holds a whole model, and this one trains adapters: load it as the "
            "base, with initial_weights"
        )

    _check_settings(path, saved, model)
    digest = base_digest(model)
    if saved["base"] != digest:
        raise CheckpointError(
            f"checkpoint {path} holds adapters of another base: its weights' digest was "
            f"{saved['base']}, and this model's is {digest}; load the weights that the adapters "
            "were trained on"
        )


def _check_settings(path: Path, saved: dict[str, Any], model: torch.nn.Module) -> None:
    """Raise CheckpointError naming the key that gives ``model`` other adapters."""
    config = chunks_of(model)[0].config
    settings = AdapterConfig.model_validate(saved["settings"])
    difference = config.adapter.difference(settings, config.architecture)
    if difference is not None:
        key, own, theirs = difference
        raise CheckpointError(f"checkpoint {path}: {key} was {theirs}, and is {own}")


def trainer_state(trainer: PolicyTrainer, is_loading: bool) -> dict[str, Any]:
    """Describe model and optimizer; the model alone as long as the optimizer has not taken a step.

    To load, what a distributed optimizer has of parameters is described without memory.

    Before its first step the optimizer has no state. A checkpoint may well be saved then: a critic
    may be learning alone, or every token be masked.
    """
    model = model_state(trainer.module)
    if not trainer.updated:
        return {"model": model}

    if is_loading:
        of_parameters = describe_without_memory(trainer.optimizer)
    else:
        of_parameters = gather_on_writing_ranks(trainer.optimizer)
    with (
        number_fp32_parameters(trainer.optimizer),
        exact_optimizer_state(trainer.optimizer, trainer.offloaded),
        of_parameters,
    ):
        optimizer = trainer.optimizer.sharded_state_dict(
            model,
            is_loading=is_loading,
            metadata=sharding_metadata(),
        )

    if not is_loading:
        separate_tensors(optimizer)
    return {"model": model, "optimizer": optimizer}


def experts_apart(trainer: PolicyTrainer) -> bool:
    """Return whether Megatron keeps the experts in a separate optimizer.

    It does so with expert or tensor parallelism, and marks their parameters as not reduced with
    the others.
    """
    trained = [parameter for parameter in trainer.module.parameters() if parameter.requires_grad]
    return any(not getattr(parameter, "allreduce", True) for parameter in trained)
