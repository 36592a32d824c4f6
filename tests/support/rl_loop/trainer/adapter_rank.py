"""A trainer rank with an adapter on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from converters.hf_directory import write_hf_directory
from gptoss_kernels import mxfp4
from megatron_gptoss import distributed
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.local_rank import LocalRank
from tests.support.megatron_gptoss.reference import documents

CONFIGS = Path(__file__).parents[4] / "configs"
SMALL = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.intermediate_size=32",
    "model.head_size=16",
    "rollout.max_episode_tokens=100",
    "optimizer={lr: 1e-2}",
]
ADAPTER = "adapter={rank: 4, alpha: 8, targets: [q, k, v, o, experts, router]}"
SAMPLES = documents([30, 12, 25])
Weights = dict[str, torch.Tensor]


@contextmanager
def open_trainer(directory: Path, *overrides: str) -> Iterator[tuple[TrainerGroup, LocalRank]]:
    """Return a trainer with one rank in this process for the run ``directory``."""
    options = [*SMALL, f"output_dir={directory.parent}", f"name={directory.name}", *overrides]
    settings = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, options)
    rank = LocalRank(settings)
    group = TrainerGroup(settings, rank)
    group.ready()
    try:
        yield group, rank
    finally:
        group.close()


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """Close process groups of ranks that failed during their construction."""
    yield
    if torch.distributed.is_initialized():
        distributed.shutdown()


def packable(weights: Weights) -> Weights:
    """Round experts to values that MXFP4 can represent."""
    rounded = dict(weights)
    for name, tensor in weights.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            packed = mxfp4.quantize(tensor.mT.contiguous().bfloat16())
            rounded[name] = mxfp4.dequantize(*packed).mT.float()
    return rounded


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face directory with experts that MXFP4 can represent, and start a run."""
    root = tmp_path_factory.mktemp("base")
    with open_trainer(root / "random", "initial_weights=null") as (group, rank):
        weights = packable(group.weights())
        model = rank.worker.settings.model
    write_hf_directory(root / "hf", model, weights.items())
    with open_trainer(root / "run", f"initial_weights={root}/hf") as (group, _):
        group.save(1, {"step": 1}, True)
    return root
