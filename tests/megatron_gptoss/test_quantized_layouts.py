"""Two gloo processes under every kind of parallelism train through MXFP4 exactly as one process does, and hold the
same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from converters.gathering import WeightGathering
from converters.hf_layouts import is_expert_matrix
from converters.live import load_hf_weights
from converters.mxfp4_tensors import stack_digests, stored_names
from gptoss_kernels import mxfp4
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.trainer import PolicyTrainer
from tests.distributed import free_port, run_distributed
from tests.megatron_gptoss.adapted import MODEL
from tests.megatron_gptoss.reference import documents, hf_model, local_batches, mean_cross_entropy

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
        before = {name: tensor.clone() for name, tensor in gathering.begin(packed=True)}
        digests = gathering.packed_digests()

        trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))
        batches = local_batches(SAMPLES, 64, parallel)
        steps = []
        for _ in range(STEPS):
            steps.append(trainer.train_step(batches, mean_cross_entropy(TOKENS), 3e-3))
        after = {name: tensor.clone() for name, tensor in gathering.begin(packed=True)}
        values = {name: tensor.clone() for name, tensor in gathering.begin()}
        return {
            "losses": [step.sums["loss"] for step in steps],
            "norms": [step.grad_norm for step in steps],
            "before": before,
            "digests": digests,
            "after": after,
            "digests after": gathering.packed_digests(),
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
        # Before an update has turned any rounding, they are equal to the digits of the sums.
        assert rank[layout]["losses"][0] == pytest.approx(one_rank["losses"][0], rel=1e-6)
        assert rank[layout]["norms"][0] == pytest.approx(one_rank["norms"][0], rel=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bits_that_are_sent_are_those_of_the_whole_weights(
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
def test_every_rank_knows_the_digests_of_what_is_sent(
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
