"""The memory of trainer ranks in the metrics of a step, over counters that a test moves by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.in_process import LocalRank
from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.gpu_memory import PhaseMemory, PhasePeak
from megatron_gptoss.planning import memory
from megatron_gptoss.planning.memory import account
from megatron_gptoss.planning.memory_inputs import EngineMemory
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.session import trainer_settings
from rl_loop.tracking.metrics import StepMetrics
from rl_loop.tracking.step_metrics import add_optimizer_metrics
from rl_loop.trainer import worker as worker_module
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.memory_metrics import memory_metrics
from rl_loop.trainer.settings import TrainerSettings
from tests.megatron_gptoss.reference import documents
from tests.megatron_gptoss.test_gpu_memory import ScriptedGpu

CONFIGS = Path(__file__).parents[3] / "configs"
ENGINE = EngineMemory(awake_fraction=0.4, asleep_bytes=700, sync_bytes=300)


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    """Of a tiny trainer whose engines would share its GPU."""
    overrides = [f"output_dir={tmp_path}", "initial_weights=null", "rollout.max_tokens=100"]
    config = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, overrides)
    built = trainer_settings(config)
    return replace(built, memory_inputs=replace(built.memory_inputs, engine=ENGINE))


@pytest.fixture
def rank(settings: TrainerSettings) -> Iterator[LocalRank]:
    rank = LocalRank(settings)
    yield rank
    rank.close()


class Sender:
    """Takes all weights; what it allocates meanwhile is freed when it is done."""

    ranks = (0,)
    transposed = False
    packed = False

    def __init__(self, gpu: ScriptedGpu, fails: bool = False) -> None:
        self.gpu = gpu
        self.fails = fails

    def send(self, named: Iterable[tuple[str, torch.Tensor]], rank: int) -> None:
        self.gpu.allocate(2000)
        self.gpu.others = 3000  # servers wake up
        for _ in named:
            if self.fails:
                self.gpu.allocate(-2000)
                raise ConnectionError("a server is gone")
        self.gpu.allocate(-2000)

    def send_from_driver(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise NotImplementedError


def test_figures_are_in_gb_and_predicted_where_the_account_has_the_phase(
    settings: TrainerSettings,
) -> None:
    predicted = account(settings.memory_inputs, 100.0)
    peak = PhasePeak(allocated=2_000_000_000, reserved=2_500_000_000, gpu=9_000_000_000)
    values = memory_metrics({"update": peak, "resting": peak}, predicted)
    update = predicted.phase("update")
    assert values == {
        "update/allocated_gb": 2.0,
        "update/reserved_gb": 2.5,
        "update/gpu_gb": 9.0,
        "update/predicted_allocated_gb": update.trainer / 1e9,
        "update/predicted_gpu_gb": update.total / 1e9,
        "resting/allocated_gb": 2.0,
        "resting/reserved_gb": 2.5,
        "resting/gpu_gb": 9.0,
    }


def test_a_step_says_what_every_phase_since_the_last_one_held(
    rank: LocalRank, settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = ScriptedGpu()
    given_back: list[str] = []

    def give_back_cache() -> None:
        given_back.append("cache")
        gpu.give_back_cache()

    monkeypatch.setattr(worker_module, "give_back_cache", give_back_cache)
    worker = rank._worker
    worker.memory = worker.trainer.memory = PhaseMemory(gpu)
    gpu.allocate(1000)
    trainer = TrainerGroup(settings, rank)
    trainer.ready()
    samples = documents([30, 20], vocab_size=500)

    # Two phases of the loop that the trainer is told of, and those that it knows by itself.
    trainer.send_weights(Sender(gpu))
    assert given_back == ["cache"] and gpu.reserved == 1000
    gpu.others = 4500
    trainer.score(samples)  # the canary sees servers that are awake
    gpu.others = 800
    trainer.enter_phase("scoring")
    gpu.allocate(400)
    gpu.allocate(-400)
    metrics = StepMetrics(0)
    add_optimizer_metrics(metrics, trainer.sft_step(samples, 0))

    values = metrics.values()
    figures = {name: values[f"memory/{name}"] * 1e9 for name in (
        "sync/gpu_gb", "sync/allocated_gb", "rollout/gpu_gb", "scoring/reserved_gb", "update/gpu_gb",
    )}  # fmt: skip
    assert figures == pytest.approx(
        {
            "sync/gpu_gb": 3000 + 3000,
            "sync/allocated_gb": 3000,
            "rollout/gpu_gb": 4500 + 1000,
            "scoring/reserved_gb": 1400,
            "update/gpu_gb": 800 + 1400,
        }
    )
    expected = account(settings.memory_inputs, 10_000 / 1e9).phase("optimizer").total
    assert values["memory/optimizer/predicted_gpu_gb"] * 1e9 == pytest.approx(expected)

    # What was told is not told again.
    again = trainer.sft_step(samples, 1).memory
    assert not any(name.startswith(("sync", "rollout", "scoring")) for name in again)


def test_a_sync_that_fails_leaves_no_cache_behind(
    rank: LocalRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = ScriptedGpu()
    monkeypatch.setattr(worker_module, "give_back_cache", gpu.give_back_cache)
    rank._worker.memory = PhaseMemory(gpu)
    with pytest.raises(ConnectionError, match="a server is gone"):
        rank._worker.send_weights(Sender(gpu, fails=True))
    assert gpu.peak_reserved == gpu.reserved == 0


def test_servers_take_what_an_update_has_given_back_and_it_is_counted_once(
    rank: LocalRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = ScriptedGpu()
    monkeypatch.setattr(worker_module, "give_back_cache", gpu.give_back_cache)
    worker = rank._worker
    worker.memory = PhaseMemory(gpu)
    worker.memory.enter("resting")
    gpu.allocate(6000)
    gpu.allocate(-5000)
    worker._make_room_for_engines()
    gpu.others = 5500
    measured = worker.memory.take()
    assert measured is not None and measured.peaks["resting"].gpu == 6500


def test_a_cpu_has_no_such_metrics(rank: LocalRank, settings: TrainerSettings) -> None:
    trainer = TrainerGroup(settings, rank)
    trainer.ready()
    trainer.enter_phase("scoring")
    assert trainer.sft_step(documents([30, 20], vocab_size=500), 0).memory == {}


@pytest.mark.parametrize(
    ("name", "gigabytes", "overrides", "measured"),
    [
        ("gpt-oss-20b_1x2", 150.1, [], {"start": 47.0, "sync": 127.1}),
        (
            "gpt-oss-20b-adapter_1x1",
            150.1,
            ["rollout.engine.memory_fraction=0.5"],
            {"sync": 88.0, "rollout": 92.1, "scoring": 24.1, "update": 64.4, "optimizer": 65.3},
        ),
        (
            "gpt-oss-20b-adapter_1x1_80gb",
            84.9,
            [],
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
)
def test_the_account_of_whole_loops_is_what_was_measured(
    name: str, gigabytes: float, overrides: list[str], measured: dict[str, float]
) -> None:
    """Whole GPU, the fullest of a run's steps, GB: docs/performance/loop.md. What the first had
    after its first update is left out: a fault kept memory then."""
    path = CONFIGS / f"rl/{name}.yaml"
    config = load_config(path, RlConfig, ["rollout.engine.bucket_bytes=536870912", *overrides])
    predicted = account(config.memory_inputs, gigabytes)
    for phase, used in measured.items():
        assert predicted.phase(phase).total / 1e9 == pytest.approx(used, rel=0.05), phase


@pytest.mark.parametrize(
    ("name", "measured"),
    [("gpt-oss-20b-adapter_1x1", 18.8), ("gpt-oss-20b-adapter_1x1_80gb", 18.6)],
)
def test_tensors_of_scoring_with_adapters_are_what_was_measured(name: str, measured: float) -> None:
    """In the first step, the only one of these runs that scored: no optimizer has state by then."""
    config = load_config(CONFIGS / f"rl/{name}.yaml", RlConfig)
    predicted = account(config.memory_inputs, 150.1)
    tensors = predicted.phase("scoring").trainer - predicted.memory.optimizer
    assert tensors / 1e9 == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("change", "has_whole_allowance"),
    [
        ({}, False),
        ({"adapter": None}, True),
        ({"parallel": ParallelConfig(world_size=4, expert=4, base="mxfp4")}, True),
    ],
    ids=["one GPU", "all parameters", "experts over ranks"],
)
def test_gaps_of_scoring_are_attentions_blocks_where_all_layers_have_equal_tensors(
    change: dict[str, Any], has_whole_allowance: bool
) -> None:
    config = load_config(CONFIGS / "rl/gpt-oss-20b-adapter_1x1.yaml", RlConfig)
    inputs = replace(config.memory_inputs, **change)
    around = account(inputs, 150.1).phase("scoring").around

    gaps = around - memory.CONTEXT_BYTES
    if inputs.parallel.world_size > 1:
        gaps -= memory.COMMUNICATION_BYTES
    # Queries of 4,096 channels three times, keys and values of 512 twice; bf16.
    blocks = 2 * inputs.tokens * (3 * 4096 + 2 * 2 * 512)
    assert gaps == pytest.approx(memory.GAP_BYTES if has_whole_allowance else blocks)
