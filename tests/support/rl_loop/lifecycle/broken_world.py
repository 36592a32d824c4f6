"""ReTool with an environment that is unreachable from the third step on, until it is repaired."""

from __future__ import annotations

import os
from pathlib import Path

from rl_loop.environments.retool import ReToolEnvironment
from rl_loop.infrastructure import InfrastructureError

METRICS = "BROKEN_WORLD_METRICS"
"""Environment variable with the path of the run's metrics. Unset: the environment is repaired."""


class BrokenWorld(ReToolEnvironment):
    async def open(self) -> None:
        metrics = Path(os.environ.get(METRICS, "/nowhere"))
        if metrics.exists() and metrics.read_text().count("\n") >= 3:
            raise InfrastructureError("environment", "the world is away")
        await super().open()
