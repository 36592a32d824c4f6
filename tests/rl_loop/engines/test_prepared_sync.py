"""Embedded engines get weights gathered right after the update, and never older ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.engines.embedded.backend import EmbeddedBackend
from rl_loop.run_parts import backend_context
from rl_loop.weight_sync.source import LoadedWeights

TINY = Path(__file__).parents[3] / "configs/rl/tiny_retool.yaml"


class Source:
    """Policy that counts how often its weights are gathered."""

    def __init__(self) -> None:
        self.version = 0
        self.gathered = 0

    def weights(self) -> dict[str, torch.Tensor]:
        self.gathered += 1
        return {"version": torch.tensor(self.version)}


class Workers:
    """Workers that record the loaded weights and their versions."""

    def __init__(self) -> None:
        self.loaded: list[tuple[int, int]] = []

    def load_weights(self, weights: Any, version: int) -> None:
        self.loaded.append((int(weights["version"]), version))


def test_prepared_sync_gathers_the_newest_weights_once() -> None:
    config = load_config(TINY, RlConfig)
    backend = EmbeddedBackend(config.rollout.engine, backend_context(config))  # type: ignore[arg-type]
    workers: Any = Workers()
    source: Any = Source()
    backend.start(workers)

    backend.sync_weights(source, 0)
    for source.version in (1, 2):
        backend.prepare_sync(source)
        assert source.gathered == source.version + 1
        backend.sync_weights(source, source.version)
    assert source.gathered == 3

    # A sync without preparation, like after a resume, and a sync from another source.
    source.version = 3
    backend.sync_weights(source, 3)
    source.version = 4
    backend.prepare_sync(source)
    backend.sync_weights(LoadedWeights({"version": torch.tensor(7)}), 7)
    source.version = 5
    backend.sync_weights(source, 5)
    assert workers.loaded == [(0, 0), (1, 1), (2, 2), (3, 3), (7, 7), (5, 5)]
