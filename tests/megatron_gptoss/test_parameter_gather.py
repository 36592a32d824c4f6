"""Weights sharded by the distributed optimizer are complete in forward, head and export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from converters.model_weights import load_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.config import ParallelConfig, Quantization
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import build_batch
from megatron_gptoss.scorer import LogProbScorer, gather_parameters
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.reference import TINY, documents, hf_model

# rows of complete MXFP4 blocks
WIDE = TINY.model_copy(update={"intermediate_size": 64})
BATCH = build_batch(documents([30, 5, 18]), align=2)


def invalidate_other_ranks_parts(model: DistributedDataParallel) -> None:
    """Fill the other ranks' parts of each bucket with NaN. After a step they are outdated."""
    for group in model.bucket_groups + model.expert_parallel_bucket_groups:
        group.param_gather_dispatched = False
        for bucket in group.buckets:
            size = group.intra_distributed_optimizer_instance_size
            own_rank = group.intra_distributed_optimizer_instance_rank
            for rank, share in enumerate(bucket.param_data.chunk(size)):
                if rank != own_rank:
                    share.fill_(torch.nan)


def use_after_a_step(rank: int, port: int, quantization: Quantization | None) -> dict[str, Any]:
    parallel = ParallelConfig(world_size=2)
    distributed.initialize(parallel, rank, port=port)
    try:
        module = build_model(WIDE, parallel, torch.float32, quantization=quantization)
        load_hf_weights(module, WIDE, hf_model(WIDE, std=0.1).state_dict().__getitem__)
        expected = LogProbScorer(module).score([BATCH])[0]
        weights = [parameter.data.clone() for parameter in module.parameters()]

        scorer = LogProbScorer(module)
        reduction = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            bucket_size=8000,
        )
        wrapped = DistributedDataParallel(module.config, reduction, module)
        scorer.model = [wrapped]

        called = set()
        owners = set()
        for name, submodule in module.named_modules():
            submodule.register_forward_pre_hook(lambda *_, name=name: called.add(name))
            if list(submodule.parameters(recurse=False)):
                owners.add(name)

        invalidate_other_ranks_parts(wrapped)
        scores = [scorer.score([BATCH])[0] for _ in range(2)]
        waiting = [
            group for group in wrapped.bucket_groups if group.param_gather_handle is not None
        ]

        invalidate_other_ranks_parts(wrapped)
        gather_parameters(scorer.model)
        errors = []
        for weight, parameter in zip(weights, module.parameters(), strict=True):
            errors.append(float((weight - parameter.data).abs().max()))

        return {
            "scores": [float((score - expected).abs().max()) for score in scores],
            "weights": max(errors),
            "not_called": owners - called,
            "never_waited_for": len(waiting),
            "buckets": len(wrapped.bucket_groups),
        }
    finally:
        distributed.shutdown()


@pytest.fixture(scope="module", params=[None, "mxfp4"])
def two_ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_distributed(use_after_a_step, 2, free_port(), request.param)


def test_scores_after_a_step_use_complete_weights(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        assert rank["buckets"] > 2  # the output layer's gather is separate from the others
        assert rank["scores"] == [0, 0]
        assert rank["never_waited_for"] == 0


def test_weight_readers_get_weights_of_all_ranks(two_ranks: list[dict[str, Any]]) -> None:
    assert [rank["weights"] for rank in two_ranks] == [0, 0]


def test_all_weighted_modules_but_output_layer_are_called(
    two_ranks: list[dict[str, Any]],
) -> None:
    # Megatron gathers weights when a module is called. The head reads the output layer's weight
    # without a call, so it gathers it.
    assert [rank["not_called"] for rank in two_ranks] == [{"output_layer"}, {"output_layer"}]
