"""How far engine and trainer may be apart after a weight sync."""

from __future__ import annotations

import math
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from megatron_gptoss.samples import TrainingSamples
from rl_loop.canary import CanaryError, check_canary
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.session import loop_settings

TINY = Path(__file__).parents[2] / "configs/rl/tiny_retool.yaml"


class Trainer:
    def score(self, samples: TrainingSamples, temperature: float) -> np.ndarray:
        return np.array([0.0, -1.0, -2.0], np.float32)


class Engines:
    def __init__(self, gap: float) -> None:
        self.gap = gap

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        return [[-1.0, -2.0], [-1.0 - self.gap, -2.0 + self.gap]]

    def compare_weights(self) -> None: ...


@pytest.mark.parametrize(
    ("overrides", "gap", "agrees"),
    [
        (["dtype=float32"], 0.0005, True),
        (["dtype=float32"], 0.01, False),
        (["dtype=bfloat16"], 0.01, True),
        (["dtype=bfloat16"], 0.1, False),
        (["dtype=bfloat16", "canary_tolerance=0.2"], 0.1, True),
        (["dtype=bfloat16"], math.nan, False),
    ],
)
def test_the_tolerance_is_that_of_the_precision_unless_it_is_given(
    overrides: list[str], gap: float, agrees: bool
) -> None:
    tolerance = loop_settings(load_config(TINY, RlConfig, overrides)).canary_tolerance
    trainer: Any = Trainer()
    engines: Any = Engines(gap)
    if agrees:
        assert check_canary(
            trainer, engines, [5, 6, 7], tolerance=tolerance, version=3
        ) == pytest.approx(gap)
    else:
        with pytest.raises(
            CanaryError, match="syncing weights 3, rollout worker 1 and the trainer differ"
        ):
            check_canary(trainer, engines, [5, 6, 7], tolerance=tolerance, version=3)


def test_engines_and_trainer_score_at_the_same_time() -> None:
    """Nobody samples and nobody learns meanwhile."""
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
    assert check_canary(trainer, engines, [5, 6, 7], tolerance=1e-3, version=1) == 0


def test_what_went_wrong_in_an_engine_is_raised() -> None:
    class DeadEngines(Engines):
        def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
            raise ConnectionError("no server listens at 127.0.0.1:30000")

    trainer: Any = Trainer()
    engines: Any = DeadEngines(0.0)
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:30000"):
        check_canary(trainer, engines, [5, 6, 7], tolerance=1e-3, version=1)
