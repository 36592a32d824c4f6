"""Reported time of each part of a step, against steps with a delay in a known part."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from converters.model_weights import load_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.layers.attention import SinkAttention
from megatron_gptoss.layers.moe_layer import DISPATCHER_TENSORS, GptOssMoELayer
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import build_batch
from megatron_gptoss.token_dispatcher import AlltoAllTokenDispatcher
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.distributed import free_port
from tests.support.megatron_gptoss.reference import TINY, documents, hf_model, mean_cross_entropy

NAP = 0.1


@pytest.fixture(scope="module")
def trainer() -> Iterator[PolicyTrainer]:
    distributed.initialize(ParallelConfig(), port=free_port())
    model = build_model(TINY, ParallelConfig())
    load_hf_weights(model, TINY, hf_model(std=0.1).state_dict().__getitem__)
    trainer = PolicyTrainer(model, OptimizerConfig())
    step(trainer)
    gc.disable()  # the collector would cause delays in a process that has run many tests
    yield trainer
    gc.enable()
    distributed.shutdown()


def step(trainer: PolicyTrainer) -> Any:
    return trainer.train_step(
        [build_batch(documents([20, 13])), build_batch(documents([33]))], mean_cross_entropy(63), 0
    )


class Nap(torch.autograd.Function):
    """Identity function with a delay in the forward or the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: bool) -> torch.Tensor:
        ctx.nap = NAP * backward
        time.sleep(NAP - ctx.nap)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.nap)
        return grad, None


DISPATCHER = MoEAlltoAllTokenDispatcher


@pytest.mark.parametrize(
    ("owner", "method", "backward", "part"),
    [
        (SinkAttention, "forward", False, "forward"),
        (SinkAttention, "forward", True, "backward"),
        (DISPATCHER, "dispatch_postprocess", False, "forward"),
        (DISPATCHER, "dispatch_postprocess", True, "backward"),
        (DISPATCHER, "token_dispatch", False, "communication"),
        (DISPATCHER, "token_dispatch", True, "communication"),
        (DISPATCHER, "token_combine", False, "communication"),
        (DISPATCHER, "token_combine", True, "communication"),
    ],
)
def test_delay_is_attributed_to_its_part_of_the_layer(
    owner: type,
    method: str,
    backward: bool,
    part: str,
    trainer: PolicyTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With one rank the dispatcher would skip Megatron's steps, and their timers.
    monkeypatch.setattr(AlltoAllTokenDispatcher, "exchanges_tokens", True)
    original, naps = getattr(owner, method), 2 * TINY.num_layers  # two micro-batches
    monkeypatch.setattr(
        owner,
        method,
        lambda self, x, *rest, **named: original(self, Nap.apply(x, backward), *rest, **named),
    )
    slow = step(trainer)
    assert slow.seconds_by_part[part] > naps * NAP
    assert slow.seconds_by_part[part] > 0.5 * sum(slow.seconds_by_part.values()), (
        slow.seconds_by_part
    )
    assert sum(slow.seconds_by_part.values()) == pytest.approx(slow.seconds, abs=0.01)


@pytest.mark.parametrize(
    ("owner", "method", "part"),
    [
        (DistributedDataParallel, "finish_grad_sync", "communication"),
        (PolicyTrainer, "_gradients_are_finite", "optimizer"),
        (PolicyTrainer, "_reduce_outputs", "other"),
    ],
)
def test_parts_after_the_backward_pass_are_timed_separately(
    owner: type, method: str, part: str, trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(owner, method)
    nap = 0.5

    def slow(self: Any, *arguments: Any, **named: Any) -> Any:
        time.sleep(nap)
        return original(self, *arguments, **named)

    monkeypatch.setattr(owner, method, slow)
    seconds_by_part = step(trainer).seconds_by_part
    assert max(seconds_by_part, key=seconds_by_part.__getitem__) == part
    assert seconds_by_part[part] > nap


def test_interrupted_step_leaves_no_times(
    trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(SinkAttention, "forward", lambda *_, **__: 1 / 0)
        step(trainer)
    trainer.score([build_batch(documents([20]))])  # is not measured
    after = step(trainer)
    assert sum(after.seconds_by_part.values()) == pytest.approx(after.seconds, abs=0.01)
    assert all(seconds > 0 for seconds in after.seconds_by_part.values())


def tensors_of_dispatchers(trainer: PolicyTrainer) -> list[str]:
    """Return names of attributes of the layers' dispatchers with an entry for every token."""
    found = []
    for module in trainer.module.modules():
        for name, value in vars(getattr(module, "token_dispatcher", module)).items():
            if isinstance(value, torch.Tensor) and value.numel() >= 33:
                found.append(name)
    return found


def test_layers_keep_no_token_tensors_after_a_step(
    trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(trainer)
    assert tensors_of_dispatchers(trainer) == []
    trainer.score([build_batch(documents([33]))])
    assert tensors_of_dispatchers(trainer) == []

    # Megatron's original layer keeps them, which shows that the test detects them.
    monkeypatch.setattr(GptOssMoELayer, "postprocess", MoELayer.postprocess)
    trainer.score([build_batch(documents([33]))])
    assert set(tensors_of_dispatchers(trainer)) == set(DISPATCHER_TENSORS)
