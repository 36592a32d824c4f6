"""Process groups: joining and leaving."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from converters.model_weights import load_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import build_batch
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.reference import TINY, documents, hf_model, mean_cross_entropy


def native_threads() -> int:
    """Return the number of threads of this process, including those of libraries."""
    return len(list(Path("/proc/self/task").iterdir()))


def train_and_leave() -> None:
    distributed.initialize(ParallelConfig(), port=free_port())
    model = build_model(TINY, ParallelConfig(), torch.float32)
    load_hf_weights(model, TINY, hf_model(std=0.1).state_dict().__getitem__)
    batch = build_batch(documents([20, 13]))
    PolicyTrainer(model, OptimizerConfig()).train_step([batch], mean_cross_entropy(31), 1e-3)
    del model
    gc.freeze()  # a trainer rank does this after its first update
    distributed.shutdown()


def threads_after_trainings(rank: int) -> tuple[int, int]:
    """Return the thread counts after the first and after the fourth training."""
    train_and_leave()
    after_first = native_threads()
    for _ in range(3):
        train_and_leave()
    return after_first, native_threads()


def test_repeated_joins_leave_no_threads() -> None:
    """A process with many runs, such as the test process, would otherwise have thousands."""
    ((after_first, after_fourth),) = run_distributed(
        threads_after_trainings, 1, keeps_imports_frozen=False
    )
    assert after_fourth <= after_first + 2
