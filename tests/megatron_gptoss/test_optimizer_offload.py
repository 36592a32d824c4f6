"""Offloaded optimizer state that goes through the device in parts.

The optimizers are Megatron's for CPUs, and an Adam that counts its steps by group, like
Transformer Engine's.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_gptoss import optimizer as gptoss_optimizer
from megatron_gptoss import trainer as trainer_module
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.gpu_memory import PhaseMemory
from megatron_gptoss.model import build_model, freeze
from megatron_gptoss.optimizer_offload import OffloadedState
from megatron_gptoss.packing import build_batch
from megatron_gptoss.step_results import LossOutput
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.reference import TINY, documents, mean_cross_entropy
from tests.support.megatron_gptoss.scripted_gpu import ScriptedGpu

pytestmark = pytest.mark.usefixtures("process_groups")


BATCH = build_batch(documents([20, 13]))
PART = 40_000


def initial_model(dtype: torch.dtype) -> torch.nn.Module:
    model = build_model(TINY, ParallelConfig(), dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1, generator=generator)
    return model


def trained_weights(
    dtype: torch.dtype, offload: float, part_elements: int | None
) -> tuple[list[torch.Tensor], PolicyTrainer]:
    """Return the weights after three steps, and the trainer."""
    model = initial_model(dtype)
    policy = PolicyTrainer(model, OptimizerConfig(weight_decay=0.1))
    if part_elements is not None:
        policy.offloaded = OffloadedState(policy.optimizer, offload, part_elements)
    for _ in range(3):
        policy.train_step([BATCH], mean_cross_entropy(31), 1e-2)
    return [parameter.data.clone() for parameter in model.parameters()], policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [0.4, 1.0])
def test_a_step_in_parts_is_the_same_step_to_the_bit(dtype: torch.dtype, offload: float) -> None:
    whole, _ = trained_weights(dtype, 0.0, None)
    parts, _ = trained_weights(dtype, offload, PART)
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


def test_only_one_part_of_state_is_on_device_from_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []
    step_of_class = torch.optim.AdamW.step
    trainers: list[PolicyTrainer] = []

    def step(self: Any, closure: Any = None) -> Any:
        result = step_of_class(self)
        on_host = {id(tensor) for tensor in trainers[0].offloaded._host.values()}
        beside = sum(
            value.numel()
            for state in self.state.values()
            for value in state.values()
            if value.dim() and id(value) not in on_host
        )
        seen.append((beside, sum(p.numel() for g in self.param_groups for p in g["params"])))
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    model = initial_model(torch.float32)
    policy = PolicyTrainer(model, OptimizerConfig())
    policy.offloaded = OffloadedState(policy.optimizer, 1.0, PART)
    trainers.append(policy)
    assert not policy.optimizer.chained_optimizers[0].optimizer.state, "before the first step"

    largest = max(parameter.numel() for parameter in model.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    for _ in range(2):
        seen.clear()
        policy.train_step([BATCH], mean_cross_entropy(31), 1e-2)
        assert sum(updated for _, updated in seen) == total
        assert max(beside for beside, _ in seen) <= 2 * max(PART, largest) < total / 2
        for state in policy.optimizer.chained_optimizers[0].optimizer.state.values():
            on_host = [id(tensor) for tensor in policy.offloaded._host.values()]
            assert id(state["exp_avg"]) in on_host
            assert id(state["exp_avg_sq"]) in on_host


@pytest.mark.parametrize(("offload", "leave"), [(1.0, True), (0.0, False)])
def test_weights_leave_the_device_before_megatron_copies_them(
    offload: float, leave: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = initial_model(torch.bfloat16)
    freeze(model, ["attention"])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    values = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    gone: set[str] = set()
    for name, parameter in model.named_parameters():
        weakref.finalize(parameter.data.untyped_storage(), gone.add, name)

    class Wrapped(gptoss_optimizer.DistributedDataParallel):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            assert gone == (trained if leave else set())
            super().__init__(*arguments, **options)

    # On a GPU, the host's copy is separate memory.
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    monkeypatch.setattr(gptoss_optimizer, "DistributedDataParallel", Wrapped)
    policy = PolicyTrainer(model, OptimizerConfig(offload_fraction=offload))
    assert 0 < len(trained) < len(values)
    for name, parameter in policy.module.named_parameters():
        assert torch.equal(parameter.data, values[name])


@pytest.mark.parametrize(("offload", "cached"), [(0.5, 0), (0.0, 3000)])
def test_activation_cache_is_released_before_state_is_loaded(
    offload: float, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = ScriptedGpu()
    monkeypatch.setattr(trainer_module, "release_cached_memory", gpu.release_cached_memory)
    policy = PolicyTrainer(initial_model(torch.float32), OptimizerConfig(offload_fraction=offload))
    policy.memory = PhaseMemory(gpu)
    cross_entropy = mean_cross_entropy(31)

    def loss(*arguments: Any) -> LossOutput:
        gpu.allocate(3000)
        gpu.allocate(-3000)
        return cross_entropy(*arguments)

    gpu.allocate(1000)
    policy.train_step([BATCH], loss, 1e-2)
    measured = policy.memory.take()
    assert measured is not None
    assert measured.peaks["update"].reserved == 4000
    assert measured.peaks["optimizer"].reserved == 1000 + cached
    assert measured.peaks["optimizer"].allocated == 1000


class CountingAdam(torch.optim.Optimizer):
    """Optimizer that accumulates 1 / (step count) and has one step count per group."""

    def __init__(self, groups: Any, counts_empty_groups: bool) -> None:
        super().__init__(groups, {})
        self.counts_empty_groups = counts_empty_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if group["params"] or self.counts_empty_groups:
                group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("sum", torch.zeros_like(parameter))
                state["sum"] += 1 / group["step"]
                parameter.copy_(state["sum"])


@pytest.mark.parametrize("counts_empty_groups", [True, False])
def test_all_parts_belong_to_one_step_of_every_group(counts_empty_groups: bool) -> None:
    sizes = [[5, 3, 4], [], [6, 2]]
    groups = [{"params": [torch.nn.Parameter(torch.ones(n)) for n in row]} for row in sizes]
    adam = CountingAdam(groups, counts_empty_groups)
    chained = [SimpleNamespace(optimizer=adam), SimpleNamespace(optimizer=None)]
    OffloadedState(SimpleNamespace(chained_optimizers=chained), 0.7, part_elements=5)

    for step in range(1, 4):
        adam.step()
        expected = sum(1 / count for count in range(1, step + 1))
        counts = [group.get("step") for group in adam.param_groups]
        assert counts == [step, step if counts_empty_groups else None, step]
        for group, row in zip(adam.param_groups, sizes, strict=True):
            assert [parameter.numel() for parameter in group["params"]] == row
            for parameter in group["params"]:
                assert torch.allclose(parameter, torch.full_like(parameter, expected))


def test_parameter_groups_are_restored_after_a_failed_step() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    adam = CountingAdam([{"params": parameters}], counts_empty_groups=True)
    chained = [SimpleNamespace(optimizer=adam)]
    OffloadedState(SimpleNamespace(chained_optimizers=chained), 1.0, part_elements=4)
    adam.state[parameters[1]]["sum"] = torch.zeros(3)  # wrong size
    with pytest.raises(RuntimeError, match="size"):
        adam.step()
    assert [id(p) for p in adam.param_groups[0]["params"]] == [id(p) for p in parameters]
