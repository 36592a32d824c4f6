"""Trained parameters are split into buckets on every pipeline stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_gptoss import optimizer as gptoss_optimizer
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.model import build_model
from tests.support.megatron_gptoss.reference import TINY

pytestmark = pytest.mark.usefixtures("process_groups")


BUCKET = 8000


def bucket_sizes(stage: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Wrap a model as on a GPU of a pipeline stage, and return the parameters of its buckets."""
    groups_of = ProcessGroupCollection.setup_process_groups_for_ddp

    def groups_of_stage(*arguments: Any) -> dict[str, Any]:
        return groups_of(*arguments) | {"pp_group": SimpleNamespace(rank=lambda: stage)}

    class WrappedOnCpu(gptoss_optimizer.DistributedDataParallel):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
            super().__init__(*arguments, **options)

    model = build_model(TINY, ParallelConfig(), torch.bfloat16)
    monkeypatch.setattr(
        ProcessGroupCollection, "setup_process_groups_for_ddp", staticmethod(groups_of_stage)
    )
    monkeypatch.setattr(gptoss_optimizer, "DistributedDataParallel", WrappedOnCpu)
    monkeypatch.setattr(gptoss_optimizer, "bucket_parameters", lambda data_ranks: BUCKET)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    [wrapped] = gptoss_optimizer.wrap_data_parallel([model], model.config, OptimizerConfig())
    monkeypatch.undo()

    assert wrapped.ddp_config.use_distributed_optimizer
    # The fp32 biases of routers have a separate buffer.
    buffer = max(wrapped.buffers, key=lambda buffer: buffer.numel)
    return [bucket.numel_unpadded for bucket in buffer.buckets]


def test_a_later_pipeline_stage_has_the_buckets_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = bucket_sizes(1, monkeypatch)
    largest = TINY.vocab_size * TINY.hidden_size
    assert len(sizes) > 2
    assert max(sizes) < BUCKET + max(largest, TINY.expert_parameters)
    assert sizes == bucket_sizes(0, monkeypatch)
