"""An environment in which a run waits after two steps."""

from __future__ import annotations

import asyncio

from rl_loop.environments.retool import ReToolEnvironment

TASKS = 2
"""Number of training tasks that are run."""


class WaitingEnvironment(ReToolEnvironment):
    """ReTool in which every training task after the first TASKS waits until the run is killed."""

    async def open(self) -> None:
        name, _, index = self.task.task_id.rpartition("-")
        if "train" in name and int(index) >= TASKS:
            await asyncio.Event().wait()
