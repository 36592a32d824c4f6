"""What goes to Weights & Biases; its library is stood in for, since it reports to a server."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_loop.config.load import dump_config, load_config
from rl_loop.config.run import RlConfig
from rl_loop.tracking.metric_sinks import wandb_listener

CONFIG = Path(__file__).parents[3] / "configs/rl/tiny_retool.yaml"


def test_the_configuration_arrives_as_a_tree_and_curves_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: dict[str, Any] = {}
    logged: list[tuple[int, dict[str, float]]] = []
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)))
    library = SimpleNamespace(init=lambda **options: begun.update(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", library)

    config = load_config(CONFIG, RlConfig)
    listen = wandb_listener("tiny", dump_config(config))
    listen(3, {"reward": 0.5})

    assert begun["config"]["optimizer"]["lr"] == config.optimizer.lr
    assert begun["config"]["rollout"]["samples_per_task"] == config.rollout.samples_per_task
    assert (begun["id"], begun["resume"]) == ("tiny", "allow")
    assert logged == [(3, {"reward": 0.5})]
