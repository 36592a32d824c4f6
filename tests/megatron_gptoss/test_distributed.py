"""Joining and leaving process groups."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.trainer import PolicyTrainer
from tests.distributed import free_port
from tests.megatron_gptoss.reference import TINY


def native_threads() -> int:
    """Count the threads of this process, those of libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


def train_and_leave() -> None:
    distributed.initialize(ParallelConfig(), port=free_port())
    PolicyTrainer(build_model(TINY, ParallelConfig(), torch.float32), OptimizerConfig())
    gc.freeze()  # as a trainer rank does after its first update
    distributed.shutdown()


def test_a_process_that_joins_again_and_again_keeps_no_threads() -> None:
    """Or a process of many runs, such as that of these tests, has thousands in the end."""
    train_and_leave()
    after_first = native_threads()
    for _ in range(3):
        train_and_leave()
    assert native_threads() <= after_first + 2
