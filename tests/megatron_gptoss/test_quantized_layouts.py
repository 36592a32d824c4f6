"""MXFP4 training with 2 gloo ranks in every layout equals training in one process bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from converters import gathering_plan
from converters.gathering import WeightGathering
from converters.hf_layouts import is_expert_matrix
from converters.model_weights import load_hf_weights
from converters.mxfp4_tensors import quantize_experts, stack_digests, stored_names
from gptoss_kernels import mxfp4
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.converters.live import OutOfMemoryError, break_gathering
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.adapted import MODEL
from tests.support.megatron_gptoss.reference import (
    documents,
    hf_model,
    local_batches,
    mean_cross_entropy,
)

SAMPLES = documents([30, 5, 18, 26, 11, 2, 23, 9], seed=3)
TOKENS = int(SAMPLES.loss_tokens.sum())
STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "expert": {"expert": 2},
    "pipeline": {"pipeline": 2},
    "tensor": {"tensor": 2},
    "tensor+expert": {"tensor": 2, "expert": 2},
    "context": {"context": 2},
}


def train(parallel: ParallelConfig, rank: int, port: int) -> dict[str, Any]:
    distributed.initialize(parallel, rank, port=port)
    try:
        weights = hf_model(MODEL, std=0.1).state_dict()
        model = build_model(MODEL, parallel, torch.float32, quantization="mxfp4")
        load_hf_weights(model, MODEL, weights.__getitem__)
        gathering = WeightGathering(model, MODEL)
        before = {name: tensor.clone() for name, tensor in gathering.begin(mxfp4_experts=True)}
        digests = gathering.mxfp4_digests()

        trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))
        batches = local_batches(SAMPLES, 64, parallel)
        steps = []
        for _ in range(STEPS):
            steps.append(trainer.train_step(batches, mean_cross_entropy(TOKENS), 3e-3))
        after = {name: tensor.clone() for name, tensor in gathering.begin(mxfp4_experts=True)}
        values = {name: tensor.clone() for name, tensor in gathering.begin()}
        return {
            "losses": [step.sums["loss"] for step in steps],
            "norms": [step.grad_norm for step in steps],
            "before": before,
            "digests": digests,
            "after": after,
            "digests after": gathering.mxfp4_digests(),
            "values": values,
        }
    finally:
        distributed.shutdown()


def train_every_layout(rank: int, ports: list[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        name: train(ParallelConfig(world_size=2, **layout), rank, port)
        for (name, layout), port in zip(LAYOUTS.items(), ports, strict=True)
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_distributed(train_every_layout, 2, [free_port() for _ in LAYOUTS])


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return train(ParallelConfig(), 0, free_port())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_norms_equal_those_of_one_process(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    for rank in two_ranks:
        assert rank[layout]["losses"] == pytest.approx(one_rank["losses"], rel=1e-4)
        assert rank[layout]["norms"] == pytest.approx(one_rank["norms"], rel=2e-3)
        # Before the first update, rounding is equal, and only the order of sums differs.
        assert rank[layout]["losses"][0] == pytest.approx(one_rank["losses"][0], rel=1e-6)
        assert rank[layout]["norms"][0] == pytest.approx(one_rank["norms"][0], rel=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sent_bits_equal_those_of_complete_weights(
    layout: str, two_ranks: list[dict[str, Any]]
) -> None:
    sent = dict(two_ranks[0][layout]["before"])
    for name, tensor in hf_model(MODEL, std=0.1).state_dict().items():
        if not is_expert_matrix(name):
            assert torch.equal(sent.pop(name), tensor), name
            continue
        expected = mxfp4.quantize(tensor.mT.contiguous().bfloat16())
        for stored_name, bits in zip(stored_names(name), expected, strict=True):
            assert torch.equal(sent.pop(stored_name), bits), stored_name
    assert not sent
    assert not two_ranks[1][layout]["before"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_has_the_digests_of_sent_weights(
    layout: str, two_ranks: list[dict[str, Any]]
) -> None:
    for moment, digests in (("before", "digests"), ("after", "digests after")):
        expected = stack_digests(two_ranks[0][layout][moment].items())
        assert len(expected) == 2 * MODEL.num_layers * MODEL.num_experts
        for rank in two_ranks:
            assert rank[layout][digests] == expected
    assert two_ranks[0][layout]["digests"] != two_ranks[0][layout]["digests after"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unpacked_weights_are_the_values_of_the_bits(
    layout: str, two_ranks: list[dict[str, Any]]
) -> None:
    values = two_ranks[0][layout]["values"]
    packed = two_ranks[0][layout]["after"]
    for name, tensor in values.items():
        if is_expert_matrix(name):
            blocks, scales = (packed[stored_name] for stored_name in stored_names(name))
            expected = mxfp4.dequantize(blocks, scales).mT.float()
        else:
            expected = packed[name]
        assert torch.equal(tensor, expected), name


RECEIVERS = ((0,), (1,), (0, 1))


def gather_stacks(rank: int, port: int) -> list[dict[str, torch.Tensor]]:
    """Gather experts of 2 expert-parallel ranks for each of RECEIVERS.

    First, adjacent experts share a message. Then every expert has a separate message.
    """
    torch.set_num_threads(1)
    parallel = ParallelConfig(world_size=2, expert=2)
    distributed.initialize(parallel, rank, port=port)
    model = build_model(MODEL, parallel, torch.float32, quantization="mxfp4")
    load_hf_weights(model, MODEL, hf_model(MODEL, std=0.1).state_dict().__getitem__)

    gathered = []
    for limit in (gathering_plan.STACK_BYTES, 1):
        gathering_plan.STACK_BYTES = limit
        gathering = WeightGathering(model, MODEL)
        for receivers in RECEIVERS:
            weights = gathering.begin(receivers, mxfp4_experts=True)
            gathered.append({name: tensor.clone() for name, tensor in weights})
    distributed.shutdown()
    return gathered


def test_receivers_get_all_experts_for_any_message_size() -> None:
    expected = quantize_experts(hf_model(MODEL, std=0.1).state_dict())
    for rank, results in enumerate(run_distributed(gather_stacks, 2, free_port())):
        for receivers, gathered in zip(2 * RECEIVERS, results, strict=True):
            if rank not in receivers:
                assert gathered == {}
                continue
            assert gathered.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(gathered[name], tensor), (rank, receivers, name)


STACK_FAULTS = [
    (fault, rank, receivers)
    for fault in ("stack1", "stack4")
    for rank in (0, 1)
    for receivers in ((0,), (0, 1))
]
"""The failing read of experts, its rank, and the receivers."""


def gather_with_stack_faults(rank: int, port: int) -> list[Any]:
    """Try each fault, then retry. Return (error or None, received names) of both attempts."""
    torch.set_num_threads(1)
    parallel = ParallelConfig(world_size=2, expert=2)
    distributed.initialize(parallel, rank, port=port)
    model = build_model(MODEL, parallel, torch.float32, quantization="mxfp4")
    load_hf_weights(model, MODEL, hf_model(MODEL, std=0.1).state_dict().__getitem__)
    gathering = WeightGathering(model, MODEL)
    results = []
    for fault, broken_rank, receivers in STACK_FAULTS:
        if rank == broken_rank:
            break_gathering(gathering, fault)
        for _ in range(2):
            weights = gathering.begin(receivers, mxfp4_experts=True)
            names = []
            error = None
            try:
                names += [name for name, _ in weights]
            except OutOfMemoryError as failure:
                error = str(failure)
            results.append((error, sorted(names)))
    distributed.shutdown()
    return results


def test_gathering_works_again_after_failed_read_of_experts() -> None:
    names = sorted(quantize_experts(hf_model(MODEL, std=0.1).state_dict()))
    ranks = run_distributed(gather_with_stack_faults, 2, free_port(), timeout=120)
    for number, (fault, broken_rank, receivers) in enumerate(STACK_FAULTS):
        for rank, results in enumerate(ranks):
            error, _ = results[2 * number]
            expected = f"CUDA out of memory in {fault}" if rank == broken_rank else None
            assert error == expected, (rank, STACK_FAULTS[number])

            again = results[2 * number + 1]
            assert again == (None, names if rank in receivers else [])
