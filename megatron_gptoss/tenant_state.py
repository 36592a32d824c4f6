"""State of one trained adapter. It can replace another adapter's state.

Tenants of one model share its frozen base. They differ in factors, optimizer state and the gradient
of an unfinished step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_gptoss.gradient_reduction import UnfinishedStep
from megatron_gptoss.layers.adapters import LowRank, named_adapters
from megatron_gptoss.trainer import PolicyTrainer

FACTOR = "factor."
"""Prefix of the names of factors."""
MASTER = "master."
"""Prefix of the names of master weights, which a bf16 model's optimizer updates."""
MOMENT = "moment."
"""Prefix of the names of the state of parameters in the optimizer."""
COUNT = "count."
"""Prefix of the numbers of steps that optimizers count by group of parameters."""


@dataclass(frozen=True)
class TenantCopy:
    """A tenant outside of the trainer, in host memory."""

    rank: int
    """Rank of the adapter."""
    tensors: Mapping[str, Tensor]
    """Result of ``copy_tenant``."""
    unfinished: UnfinishedStep
    """Gradient of the passes since the last step."""


def take_tenant(trainer: PolicyTrainer) -> TenantCopy:
    """Copy everything that distinguishes a trainer's tenant from others."""
    return TenantCopy(used_rank(trainer), copy_tenant(trainer), trainer.unfinished_step())


def place_tenant(trainer: PolicyTrainer, tenant: TenantCopy) -> None:
    """Replace the tenant of a trainer by a result of ``take_tenant``. The bits are the same."""
    has_moments = any(name.startswith(MOMENT) for name in tenant.tensors)
    load_tenant(trainer, tenant.rank, tenant.tensors, optimizer=has_moments)
    trainer.continue_step(tenant.unfinished)


def new_tenant(trainer: PolicyTrainer, rank: int, seed: int) -> None:
    """Replace the adapter of a trainer by a new one, without optimizer state.

    Factors of a lower rank than the model's adapters are 0 beyond it, and stay 0 in training.

    Args:
        trainer: trainer of a model with adapters.
        rank: rank of the new adapter, at most that of the model.
        seed: seed of the initial values.
    """
    adapters = list(named_adapters(trainer.module))
    for name, adapter in adapters:
        adapter.initialize(seed, name)
    _limit_ranks(trainer, rank)
    with torch.no_grad():
        for _, adapter in adapters:
            adapter.a[..., adapter.used_rank :, :] = 0
    _reset_optimizer(trainer)


def copy_tenant(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """Copy the adapter and its optimizer state to host memory.

    Returns:
        Tensors of this rank by name. They share no memory with the trainer.
    """
    tensors = dict(copy_adapter(trainer))
    for number, master in enumerate(_masters(trainer)):
        tensors[f"{MASTER}{number}"] = master
    for name, (state, key) in _moments(trainer).items():
        tensors[name] = torch.as_tensor(state[key])
    for name, group in _groups(trainer):
        if "step" in group:
            tensors[name] = torch.as_tensor(group["step"])
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def copy_adapter(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """Copy the factors of the adapter to host memory, as a part of ``copy_tenant``."""
    return {
        f"{FACTOR}{name}.{key}": parameter.detach().to("cpu", copy=True)
        for name, adapter in named_adapters(trainer.module)
        for key, parameter in adapter.named_parameters()
    }


def load_tenant(
    trainer: PolicyTrainer, rank: int, tensors: Mapping[str, Tensor], *, optimizer: bool
) -> None:
    """Replace the adapter of a trainer by a copied one.

    Args:
        trainer: trainer of a model with the same adapters.
        rank: rank of the copied adapter.
        tensors: result of ``copy_tenant``, or of ``copy_adapter`` without ``optimizer``.
        optimizer: whether to load the optimizer state. Otherwise there is none.

    Raises:
        KeyError, RuntimeError, ValueError: the tensors belong to other adapters, or to a layout with
            another number of ranks.
    """
    load_adapter_factors(trainer, rank, tensors)
    _reset_optimizer(trainer)
    if not optimizer:
        return
    with torch.no_grad():
        for number, master in enumerate(_masters(trainer)):
            master.copy_(tensors[f"{MASTER}{number}"])
    for name, group in _groups(trainer):
        if name in tensors:
            group["step"] = int(tensors[name])
    _load_moments(trainer, tensors)


def used_rank(trainer: PolicyTrainer) -> int:
    """Return the rank of the adapter."""
    return max(adapter.used_rank for _, adapter in named_adapters(trainer.module))


def load_adapter_factors(trainer: PolicyTrainer, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Replace the factors only. The optimizer would still update its own master weights."""
    _limit_ranks(trainer, rank)
    with torch.no_grad():
        for name, adapter in named_adapters(trainer.module):
            for key, parameter in adapter.named_parameters():
                parameter.copy_(tensors[f"{FACTOR}{name}.{key}"])


def _limit_ranks(trainer: PolicyTrainer, rank: int) -> None:
    """Set the used rank and the scale of every adapter, in proportion for adapters of experts."""
    adapters: list[LowRank] = [adapter for _, adapter in named_adapters(trainer.module)]
    highest = max(adapter.rank for adapter in adapters)
    if not 1 <= rank <= highest:
        raise ValueError(f"rank {rank}: the model has room for ranks from 1 to {highest}")
    for adapter in adapters:
        adapter.use_rank(max(1, rank * adapter.rank // highest))


def _reset_optimizer(trainer: PolicyTrainer) -> None:
    """Drop moments, counts and gradients, and read master weights from the model."""
    trainer.discard_gradients()
    trainer.optimizer.reload_model_params()
    for inner in _inner_optimizers(trainer):
        inner.state.clear()
    for _, group in _groups(trainer):
        group.pop("step", None)
    trainer.updated = False


def _load_moments(trainer: PolicyTrainer, tensors: Mapping[str, Tensor]) -> None:
    """Fill the optimizer's state of every parameter."""
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(MOMENT):
            prefix, _, key = name.rpartition(".")
            states.setdefault(prefix, {})[key] = tensor
    for number, inner in enumerate(_inner_optimizers(trainer)):
        for place, parameter in enumerate(_parameters(inner)):
            state = states.get(f"{MOMENT}{number}.{place}")
            if state is None:
                continue
            if any(value.ndim and value.shape != parameter.shape for value in state.values()):
                raise ValueError(f"the moments of parameter {number}.{place} have another shape")
            inner.state[parameter] = {
                # Adam counts steps on the host.
                key: value.to("cpu" if value.ndim == 0 else parameter.device, copy=True)
                for key, value in state.items()
            }
            trainer.updated = True


def _inner_optimizers(trainer: PolicyTrainer) -> list[torch.optim.Optimizer]:
    """Return the optimizers within Megatron's chain. A rank may lack parameters for one of them."""
    chained = trainer.optimizer.chained_optimizers
    return [one.optimizer for one in chained if one.optimizer is not None]


def _parameters(inner: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in inner.param_groups for parameter in group["params"]]


def _masters(trainer: PolicyTrainer) -> list[Tensor]:
    """Return the optimizer's parameters that are not parameters of the model."""
    own = {id(parameter) for parameter in trainer.module.parameters()}
    inner = _inner_optimizers(trainer)
    return [p for optimizer in inner for p in _parameters(optimizer) if id(p) not in own]


def _moments(trainer: PolicyTrainer) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the places of all states of parameters by name."""
    places = {}
    for number, inner in enumerate(_inner_optimizers(trainer)):
        for place, parameter in enumerate(_parameters(inner)):
            state = inner.state.get(parameter, {})
            for key in state:
                places[f"{MOMENT}{number}.{place}.{key}"] = (state, key)
    return places


def _groups(trainer: PolicyTrainer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the groups of parameters by the name of their count."""
    for number, inner in enumerate(_inner_optimizers(trainer)):
        for place, group in enumerate(inner.param_groups):
            yield f"{COUNT}{number}.{place}", group
