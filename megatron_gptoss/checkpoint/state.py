"""Which tensors of a trainer a checkpoint holds, as Megatron's sharded state dicts."""

from typing import Any

import torch
from megatron.core import parallel_state

from megatron_gptoss.checkpoint.megatron_faults import (
    exact_optimizer_state,
    number_fp32_parameters,
)
from megatron_gptoss.model import chunks_of
from megatron_gptoss.trainer import PolicyTrainer

EXPERTS_APART = "experts_have_an_optimizer_of_their_own"
"""Key of a checkpoint under which ``experts_apart`` is kept."""


def sharding_metadata() -> dict[str, Any]:
    """Return the settings of sharded state dicts; they decide the names of what is saved."""
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
    }


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """Describe the weights of every chunk of ``model``, by the chunk's number."""
    metadata = sharding_metadata()
    state = {}
    for i, chunk in enumerate(chunks_of(model)):
        state[str(i)] = chunk.sharded_state_dict(metadata=metadata)
    return state


def load_model_state(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Copy loaded weights, by the chunk's number, into ``model``."""
    for i, chunk in enumerate(chunks_of(model)):
        chunk.load_state_dict(state[str(i)], strict=True)


def trainer_state(trainer: PolicyTrainer, is_loading: bool) -> dict[str, Any]:
    """Describe model and optimizer; the model alone as long as the optimizer has not taken a step.

    Before its first step the optimizer has no state. A checkpoint may well be saved then: a critic
    may be learning alone, or every token be masked.
    """
    model = model_state(trainer.module)
    if not trainer.updated:
        return {"model": model}

    with (
        number_fp32_parameters(trainer.optimizer),
        exact_optimizer_state(trainer.optimizer, trainer.offloaded),
    ):
        optimizer = trainer.optimizer.sharded_state_dict(
            model,
            is_loading=is_loading,
            metadata=sharding_metadata(),
        )
    return {"model": model, "optimizer": optimizer}


def experts_apart(trainer: PolicyTrainer) -> bool:
    """Return whether Megatron keeps the experts in a separate optimizer.

    It does so with expert or tensor parallelism, and marks their parameters as not reduced with
    the others.
    """
    parameters = trainer.module.parameters()
    return any(not getattr(parameter, "allreduce", True) for parameter in parameters)
