"""Memory metrics of trainer ranks with mock counters, and estimates compared with measured runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from converters.errors import GatheringAbortedError
from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.gpu_memory import PhaseMemory, PhasePeak
from megatron_gptoss.planning import memory
from megatron_gptoss.planning.memory import predict_stage_memory
from megatron_gptoss.planning.memory_inputs import EngineMemory
from rl_loop.config.load import load_config
from rl_loop.config.partial_configs import TrainerConfig
from rl_loop.config.run import RlConfig
from rl_loop.tracking.metrics import StepMetrics
from rl_loop.tracking.step_metrics import add_optimizer_metrics
from rl_loop.trainer import worker as worker_module
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.local_rank import LocalRank
from rl_loop.trainer.memory_metrics import memory_metrics
from rl_loop.weight_sync.source import SyncError
from tests.support.megatron_gptoss.reference import documents
from tests.support.megatron_gptoss.scripted_gpu import ScriptedGpu

CONFIGS = Path(__file__).parents[3] / "configs"
ENGINE = EngineMemory(running_fraction=0.4, paused_bytes=700, sync_bytes=300)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerConfig:
    """Settings of a tiny trainer with colocated engines."""
    overrides = [f"output_dir={tmp_path}", "initial_weights=null", "rollout.max_episode_tokens=100"]
    config = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, overrides)
    inputs = replace(config.memory_inputs, engine=ENGINE)
    monkeypatch.setattr(RlConfig, "memory_inputs", inputs)
    return config


@pytest.fixture
def rank(settings: TrainerConfig) -> Iterator[LocalRank]:
    rank = LocalRank(settings)
    yield rank
    rank.close()


@pytest.fixture
def gpu(rank: LocalRank, monkeypatch: pytest.MonkeyPatch) -> ScriptedGpu:
    """Return the mock GPU that the rank measures and whose cache it releases."""
    gpu = ScriptedGpu()
    monkeypatch.setattr(worker_module, "release_cached_memory", gpu.release_cached_memory)
    rank.worker.memory = PhaseMemory(gpu)
    return gpu


class Sender:
    """A sender that reads all weights. Its own allocation is freed at the end."""

    ranks = (0,)
    transposed = False
    mxfp4_experts = False
    adapters_only = False

    def __init__(self, gpu: ScriptedGpu, fails: bool = False) -> None:
        self.gpu = gpu
        self.fails = fails

    def send(self, named: Iterable[tuple[str, torch.Tensor]], rank: int) -> None:
        self.gpu.allocate(2000)
        self.gpu.others = 3000  # servers resume
        for _ in named:
            if self.fails:
                self.gpu.allocate(-2000)
                raise ConnectionError("a server is gone")
        self.gpu.allocate(-2000)

    def send_from_driver(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise NotImplementedError


def test_memory_metrics_are_in_gb_with_predictions_if_known(
    settings: TrainerConfig,
) -> None:
    predicted = predict_stage_memory(settings.memory_inputs, 100.0)
    peak = PhasePeak(allocated=2_000_000_000, reserved=2_500_000_000, gpu=9_000_000_000)
    values = memory_metrics({"update": peak, "between_phases": peak}, predicted)
    update = predicted.phase("update")
    assert values == {
        "update/allocated_gb": 2.0,
        "update/reserved_gb": 2.5,
        "update/gpu_gb": 9.0,
        "update/predicted_allocated_gb": update.trainer / 1e9,
        "update/predicted_gpu_gb": update.total / 1e9,
        "between_phases/allocated_gb": 2.0,
        "between_phases/reserved_gb": 2.5,
        "between_phases/gpu_gb": 9.0,
    }


def test_step_reports_memory_of_all_phases_since_the_last_step(
    rank: LocalRank, settings: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = ScriptedGpu()
    given_back: list[str] = []

    def release_cached_memory() -> None:
        given_back.append("cache")
        gpu.release_cached_memory()

    monkeypatch.setattr(worker_module, "release_cached_memory", release_cached_memory)
    worker = rank.worker
    worker.memory = worker.trainer.memory = PhaseMemory(gpu)
    gpu.allocate(1000)
    trainer = TrainerGroup(settings, rank)
    trainer.ready()
    samples = documents([30, 20], vocab_size=500)

    # The loop reports 2 of the phases. The trainer detects the others.
    trainer.send_weights(Sender(gpu))
    assert given_back == ["cache"] and gpu.reserved == 1000
    gpu.others = 4500
    trainer.score(samples)  # the canary runs while servers run
    gpu.others = 800
    trainer.enter_phase("scoring")
    gpu.allocate(400)
    gpu.allocate(-400)
    metrics = StepMetrics(0)
    add_optimizer_metrics(metrics, trainer.sft_step(samples, 0))

    values = metrics.values()
    figures = {name: values[f"memory/{name}"] * 1e9 for name in (
        "first_sync/gpu_gb", "first_sync/allocated_gb", "rollout/gpu_gb", "first_scoring/reserved_gb",
        "update/gpu_gb",
    )}  # fmt: skip
    assert figures == pytest.approx(
        {
            "first_sync/gpu_gb": 3000 + 3000,
            "first_sync/allocated_gb": 3000,
            "rollout/gpu_gb": 4500 + 1000,
            "first_scoring/reserved_gb": 1400,
            "update/gpu_gb": 800 + 1400,
        }
    )
    expected = predict_stage_memory(settings.memory_inputs, 10_000 / 1e9).phase("optimizer").total
    assert values["memory/optimizer/predicted_gpu_gb"] * 1e9 == pytest.approx(expected)

    # Reported phases are not reported again. The optimizer has state from here on.
    again = trainer.sft_step(samples, 1).memory
    assert not any(name.startswith(("first", "sync", "rollout", "scoring")) for name in again)
    trainer.send_weights(Sender(gpu))
    trainer.enter_phase("scoring")
    later = trainer.sft_step(samples, 2).memory
    assert {"sync/gpu_gb", "scoring/gpu_gb"} < later.keys()
    assert not any(name.startswith("first") for name in later)


def test_failed_sync_releases_the_cache(rank: LocalRank, gpu: ScriptedGpu) -> None:
    with pytest.raises(ConnectionError, match="a server is gone"):
        rank.worker.send_weights(Sender(gpu, fails=True))
    assert gpu.peak_reserved == gpu.reserved == 0


def test_rejected_gathering_releases_the_cache(
    rank: LocalRank, gpu: ScriptedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = rank.worker
    gpu.allocate(2000)
    gpu.allocate(-2000)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise GatheringAbortedError("rank 1 has no memory for weights of others")

    monkeypatch.setattr(worker._gathering, "begin", refuse)
    with pytest.raises(SyncError, match="rank 1 has no memory"):
        worker.send_weights(Sender(gpu))
    assert gpu.reserved == 0

    # Memory that servers use from here on counts for their phase.
    gpu.others = 5000
    worker.memory.enter("between_phases")
    measured = worker.memory.take()
    assert measured is not None and measured.peaks["rollout"].gpu == 5000


def test_memory_released_by_an_update_is_counted_once(rank: LocalRank, gpu: ScriptedGpu) -> None:
    worker = rank.worker
    worker.memory.enter("between_phases")
    gpu.allocate(6000)
    gpu.allocate(-5000)
    worker._free_memory_for_engines()
    gpu.others = 5500
    measured = worker.memory.take()
    assert measured is not None and measured.peaks["between_phases"].gpu == 6500


def test_cpu_trainer_has_no_memory_metrics(rank: LocalRank, settings: TrainerConfig) -> None:
    trainer = TrainerGroup(settings, rank)
    trainer.ready()
    trainer.enter_phase("scoring")
    assert trainer.sft_step(documents([30, 20], vocab_size=500), 0).memory == {}


HALF_GIB_BUCKETS = "rollout.engine.bucket_bytes=536870912"
BF16_EXPERTS = ["quantization=null", "rollout.engine.quantization=null"]
FOUR_LAYERS = [
    "model.num_layers=4",
    "parallel.world_size=2",
    "parallel.expert=2",
    "rollout.engine.tensor_parallel=2",
    "rollout.engine.memory_fraction=0.4",
]
"""Overrides for 4 layers of the 120B, with trainer and server on 2 GPUs.

The run had one step. Its tokens almost filled 3 micro-batches per rank (``micro_batch_tokens``).
"""


@pytest.mark.parametrize(
    ("name", "gigabytes", "overrides", "measured"),
    [
        (
            "gpt-oss-20b_1x2",
            150.1,
            [*BF16_EXPERTS, HALF_GIB_BUCKETS],
            {"start": 47.0, "sync": 127.1, "rollout": 129.7, "update": 102.4, "optimizer": 57.4},
        ),
        (
            "gpt-oss-20b_1x4",
            150.1,
            [HALF_GIB_BUCKETS],
            {"start": 54.4, "sync": 123.7, "rollout": 133.0, "update": 131.9, "optimizer": 131.9},
        ),
        (
            "gpt-oss-20b_1x4",
            150.1,
            ["quantization=mxfp4", "rollout.engine.quantization=mxfp4"],
            {"sync": 103.0},
        ),
        (
            "gpt-oss-120b-adapter_1x4",
            150.1,
            [],
            {"start": 22.9, "sync": 136.8, "rollout": 133.0, "update": 108.0, "optimizer": 108.0},
        ),
        (
            "gpt-oss-120b-adapter_1x4",
            150.1,
            [
                *FOUR_LAYERS,
                "training.max_tokens_per_micro_batch=11754",
                "rollout.max_episode_tokens=4096",
            ],
            {"start": 8.6, "sync": 76.0, "rollout": 73.3, "update": 27.6, "optimizer": 28.6},
        ),
        (
            "gpt-oss-20b-adapter_1x1",
            150.1,
            [HALF_GIB_BUCKETS, "rollout.engine.memory_fraction=0.5"],
            {"sync": 88.0, "rollout": 92.1, "scoring": 24.1, "update": 64.4, "optimizer": 65.3},
        ),
        (
            "gpt-oss-20b-adapter_1x1",
            150.1,
            [HALF_GIB_BUCKETS, "rollout.engine.memory_fraction=0.5"],
            {
                "start": 16.4,
                "sync": 88.0,
                "rollout": 92.5,
                "scoring": 24.5,
                "update": 67.3,
                "optimizer": 67.3,
            },
        ),
        (
            "gpt-oss-20b-adapter_1x1_80gb",
            84.9,
            [HALF_GIB_BUCKETS],
            {
                "start": 16.4,
                "sync": 71.4,
                "rollout": 75.3,
                "scoring": 23.4,
                "update": 64.6,
                "optimizer": 64.6,
            },
        ),
    ],
    ids=[
        "20B on two GPUs",
        "20B on four",
        "20B on four, MXFP4",
        "120B on four",
        "four layers on two",
        "adapters",
        "adapters a day later",
        "adapters on 80 GB",
    ],
)
def test_memory_estimate_of_runs_matches_measurement(
    name: str, gigabytes: float, overrides: list[str], measured: dict[str, float]
) -> None:
    """The measured values are the maximum of a run's steps for the whole GPU in GB.

    See docs/performance/memory.md. These runs measured the first sync and later syncs as one
    phase, and also the first scoring and later ones. In the first sync, servers are full and the
    optimizer has no state. In later syncs, the optimizer has state and servers hold only weights.
    """
    config = load_config(CONFIGS / f"rl/{name}.yaml", RlConfig, overrides)
    predicted = {
        phase.name: phase.total / 1e9
        for phase in predict_stage_memory(config.memory_inputs, gigabytes).phases
    }
    predicted["sync"] = max(predicted["sync"], predicted["first_sync"])
    for phase, used in measured.items():
        assert predicted[phase] == pytest.approx(used, rel=0.05), phase


def micro_batch_tokens(tokens: int, ranks: int, limit: int = 16_384) -> int:
    """Return the tokens per micro-batch of a rank if the tokens of a step are spread evenly."""
    of_rank = tokens / ranks
    return math.ceil(of_rank / math.ceil(of_rank / limit))


@pytest.mark.parametrize(
    ("name", "overrides", "step_tokens", "tensors", "gpu"),
    [
        ("gpt-oss-20b_1x2", BF16_EXPERTS, 234_829, 48.5, 60.4),
        ("gpt-oss-20b_1x4", [], 675_725, 42.8, 56.6),
        ("gpt-oss-120b-adapter_1x4", FOUR_LAYERS, 70_519, 11.8, 21.8),
        ("gpt-oss-120b-adapter_1x4", [], 67_774, 24.0, 38.3),
        ("gpt-oss-20b-adapter_1x1", [], 116_813, 18.6, 23.4),
    ],
    ids=["20B on two GPUs", "20B on four", "four layers on two", "120B on four", "adapters"],
)
def test_memory_estimate_of_first_scoring_matches_measurement(
    name: str, overrides: list[str], step_tokens: int, tensors: float, gpu: float
) -> None:
    """These runs scored only in their first step, when no optimizer had state.

    Not all of them had full micro-batches. For the 120B, nvidia-smi showed at most 38.3 GB. The
    metric of the run is 43.4 GB: memory of other processes at the begin of the phase, and torch's
    memory at its end. SGLang answers when its first rank has released its memory, so the last
    ranks had probably not released all of theirs.
    """
    config = load_config(CONFIGS / f"rl/{name}.yaml", RlConfig, overrides)
    inputs = config.memory_inputs
    tokens = micro_batch_tokens(step_tokens, inputs.parallel.world_size)
    scoring = predict_stage_memory(replace(inputs, tokens=tokens), 150.1).phase("first_scoring")
    assert scoring.trainer / 1e9 == pytest.approx(tensors, rel=0.03)
    assert scoring.total / 1e9 == pytest.approx(gpu, rel=0.05)


@pytest.mark.parametrize(
    ("name", "overrides", "measured"),
    [
        ("gpt-oss-20b_1x2", [*BF16_EXPERTS, HALF_GIB_BUCKETS], 47.5),
        ("gpt-oss-20b_1x4", [HALF_GIB_BUCKETS], 72.9),
        ("gpt-oss-120b-adapter_1x4", [], 28.7),
        ("gpt-oss-120b-adapter_1x4", FOUR_LAYERS, 12.7),
        ("gpt-oss-20b-adapter_1x1", [HALF_GIB_BUCKETS], 17.5),
    ],
    ids=["20B on two GPUs", "20B on four", "120B on four", "four layers on two", "adapters"],
)
def test_memory_estimate_of_a_sync_matches_measurement(
    name: str, overrides: list[str], measured: float
) -> None:
    """The measured values are the maximum of a run's steps on the sending rank."""
    config = load_config(CONFIGS / f"rl/{name}.yaml", RlConfig, overrides)
    predicted = predict_stage_memory(config.memory_inputs, 150.1).phase("sync")
    assert predicted.trainer / 1e9 == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("name", "measured"),
    [("gpt-oss-20b-adapter_1x1", 18.8), ("gpt-oss-20b-adapter_1x1_80gb", 18.6)],
)
def test_memory_estimate_of_adapter_scoring_matches_measurement(name: str, measured: float) -> None:
    """These runs scored only in their first step, when no optimizer had state."""
    config = load_config(CONFIGS / f"rl/{name}.yaml", RlConfig)
    predicted = predict_stage_memory(config.memory_inputs, 150.1)
    tensors = predicted.phase("scoring").trainer - predicted.memory.optimizer
    assert tensors / 1e9 == pytest.approx(measured, rel=0.03)


def scoring_fragmentation(change: dict[str, Any]) -> float:
    """Return the estimated fragmentation in scoring, for adapters of the 20B on one GPU.

    Args:
        change: changed inputs of the estimate.
    """
    config = load_config(CONFIGS / "rl/gpt-oss-20b-adapter_1x1.yaml", RlConfig)
    inputs = replace(config.memory_inputs, **change)
    fragmentation = (
        predict_stage_memory(inputs, 150.1).phase("scoring").overhead - memory.CONTEXT_BYTES
    )
    if inputs.parallel.world_size > 1:
        fragmentation -= memory.COMMUNICATION_BYTES
    return fragmentation


def test_fragmentation_of_scoring_equals_the_attention_blocks() -> None:
    # 3 bf16 copies of queries with 4,096 channels, 2 copies of keys and values with 512 channels.
    blocks = 2 * 16_384 * (3 * 4096 + 2 * 2 * 512)
    assert scoring_fragmentation({}) == pytest.approx(blocks)
    assert scoring_fragmentation({"adapter": None}) == pytest.approx(memory.FRAGMENTATION_BYTES)


def test_fragmentation_of_scoring_grows_with_larger_layers() -> None:
    """Compare with random numbers of rows per layer.

    After the first layer, about 1 of 4 layers and almost 3 of 24 find no block that is large
    enough.
    """
    generator = np.random.default_rng(0)

    def compute_fragmentation(layers: int) -> float:
        model = GptOssModelConfig(num_layers=layers, num_experts=32)
        layout = ParallelConfig(world_size=4, expert=4)
        return scoring_fragmentation({"model": model, "parallel": layout})

    def larger_layers(layers: int) -> float:
        rows = generator.random((20_000, layers))
        fullest = np.maximum.accumulate(rows, axis=1)
        return float((fullest[:, 1:] > fullest[:, :-1]).sum(axis=1).mean())

    assert compute_fragmentation(1) == pytest.approx(0, abs=1)
    assert compute_fragmentation(24) / compute_fragmentation(4) == pytest.approx(
        larger_layers(24) / larger_layers(4), rel=0.03
    )
