"""Allowed difference between engine and trainer after a weight sync."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from megatron_gptoss.samples import TrainingSamples
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.engines.embedded.backend import build_engine
from rl_loop.engines.embedded.engine import TransformersEngine
from rl_loop.run_parts import build_tasks
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.local_rank import LocalRank
from rl_loop.weight_sync.canary import TOLERANCES, CanaryError, CanaryTolerance, check_canary

TINY = Path(__file__).parents[3] / "configs/rl/tiny_retool.yaml"
FP32 = CanaryTolerance.of(None, "fp32")


class Trainer:
    def score(self, samples: TrainingSamples, temperature: float) -> np.ndarray:
        return np.array([0.0, -1.0, -2.0], np.float32)


class Engines:
    """Engines of which the second differs by ``gap`` and has a rounding error ``rounding``."""

    def __init__(self, gap: float, rounding: float | None = None) -> None:
        self.gap = gap
        self.rounding = rounding

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        return [[-1.0, -2.0], [-1.0 - self.gap, -2.0 + self.gap]]

    def rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        return [] if self.rounding is None else [0.0, self.rounding]

    def compare_weights(self) -> None: ...


def check(overrides: list[str], engines: Any) -> float:
    config = load_config(TINY, RlConfig, overrides)
    tolerance = CanaryTolerance.of(config.canary_tolerance, config.dtype)
    trainer: Any = Trainer()
    return check_canary(trainer, engines, [5, 6, 7], tolerance=tolerance, version=3)


@pytest.mark.parametrize(
    ("overrides", "gap", "rounding", "agrees"),
    [
        (["dtype=fp32"], 0.0005, None, True),
        (["dtype=fp32"], 0.01, None, False),
        (["dtype=fp32"], 0.01, 0.0, False),
        (["dtype=bf16"], 0.01, None, True),
        (["dtype=bf16"], 0.1, None, False),
        (["dtype=bf16"], 0.1, 0.05, True),
        (["dtype=bf16"], 0.1, 0.01, False),
        (["dtype=bf16"], 0.015, 0.001, True),
        (["dtype=bf16", "canary_tolerance=0.2"], 0.1, None, True),
        (["dtype=bf16", "canary_tolerance=0.05"], 0.1, 0.05, False),
        (["dtype=bf16"], math.nan, 0.05, False),
    ],
)
def test_canary_tolerance_fits_dtype_and_rounding_unless_given(
    overrides: list[str], gap: float, rounding: float | None, agrees: bool
) -> None:
    if agrees:
        assert check(overrides, Engines(gap, rounding)) == pytest.approx(gap)
    else:
        with pytest.raises(
            CanaryError, match="syncing weights 3, rollout worker 1 and the trainer differ"
        ):
            check(overrides, Engines(gap, rounding))


@pytest.mark.parametrize(
    ("dtype", "rounding", "says"),
    [
        ("fp32", None, "2.00e-01.* They do not compute the same model. The run has not trained"),
        ("bf16", None, "They do not compute the same model, or the cause is rounding to bf16"),
        (
            "bf16",
            0.01,
            r"\(tolerance 3.00e-02\). Rounding to bf16 .* only 1.00e-02, so they",
        ),
    ],
)
def test_canary_message_names_only_possible_causes(
    dtype: str, rounding: float | None, says: str
) -> None:
    with pytest.raises(CanaryError, match=f"^canary_tolerance: .*{says}"):
        check([f"dtype={dtype}"], Engines(0.2, rounding))


class EmbeddedEngines:
    """One embedded engine with the interface of a ``RolloutPool``."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    def sync(self, weights: Mapping[str, torch.Tensor]) -> None:
        asyncio.run(self.engine.sync_weights(weights.items(), 0))

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        return [asyncio.run(self.engine.score(token_ids, temperature))]

    def rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        return [asyncio.run(self.engine.rounding_error(token_ids))]

    def compare_weights(self) -> None: ...


def test_canary_passes_a_bf16_model_and_rejects_wrong_weights(tmp_path: Path) -> None:
    """Rounding changes the log-probs of this model by more than the default tolerance."""
    overrides = [
        "dtype=bf16",
        "initial_weights=null",
        "model.initializer_std=0.15",
        f"output_dir={tmp_path}",
        "tasks.held_out_tasks=8",
    ]
    config = load_config(TINY, RlConfig, overrides)
    settings = config
    rank = LocalRank(settings)
    built: Any = build_engine(config.model, config.dtype, max_batch_size=4)
    engines = EmbeddedEngines(built)
    try:
        trainer = TrainerGroup(settings, rank)
        trainer.ready()
        weights = {name: tensor.clone() for name, tensor in trainer.weights().items()}
        text = build_tasks(config).canary()
        tolerance = CanaryTolerance.of(config.canary_tolerance, config.dtype)
        engines.sync(weights)
        gap = check_canary(trainer, engines, text, tolerance=tolerance, version=1)
        assert TOLERANCES["bf16"] < gap

        name = "model.layers.1.input_layernorm.weight"
        engines.sync(weights | {name: torch.zeros_like(weights[name])})
        with pytest.raises(CanaryError, match="so they do not compute the same model"):
            check_canary(trainer, engines, text, tolerance=tolerance, version=2)
    finally:
        asyncio.run(built.close())
        rank.close()


def test_rounding_error_is_the_distance_to_an_fp32_engine() -> None:
    config = load_config(TINY, RlConfig, ["initial_weights=null"])
    rounded: Any = build_engine(config.model, "bf16", max_batch_size=4)
    exact: Any = build_engine(config.model, "fp32", max_batch_size=4)
    text = list(range(3, 60))
    weights = {name: p.data.clone() for name, p in rounded._model.named_parameters()}

    async def compare() -> None:
        for engine in (rounded, exact):
            await engine.sync_weights(weights.items(), 0)
        before = await rounded.score(text)
        expected = np.abs(np.subtract(before, await exact.score(text))).mean()
        assert await rounded.rounding_error(text) == pytest.approx(expected, rel=1e-4)
        assert expected > 1e-4 and await exact.rounding_error(text) == 0
        assert await rounded.score(text) == before, "weights are as they were"
        await rounded.close()
        await exact.close()

    asyncio.run(compare())
    assert all(p.dtype == torch.bfloat16 for p in rounded._model.parameters())


def test_canary_scores_engines_and_trainer_concurrently() -> None:
    """Neither sampling nor training runs during the check."""
    both = Barrier(2, timeout=20)

    class MeetingTrainer(Trainer):
        def score(self, samples: TrainingSamples, temperature: float) -> np.ndarray:
            both.wait()
            return super().score(samples, temperature)

    class MeetingEngines(Engines):
        def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
            both.wait()
            return super().score(token_ids, temperature)

    trainer: Any = MeetingTrainer()
    engines: Any = MeetingEngines(0.0)
    assert check_canary(trainer, engines, [5, 6, 7], tolerance=FP32, version=1) == 0


def test_canary_raises_the_error_of_an_engine() -> None:
    class DeadEngines(Engines):
        def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
            raise ConnectionError("no server listens at 127.0.0.1:30000")

    trainer: Any = Trainer()
    engines: Any = DeadEngines(0.0)
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:30000"):
        check_canary(trainer, engines, [5, 6, 7], tolerance=FP32, version=1)
