"""Episodes by the environments' scripted policies."""

from __future__ import annotations

import asyncio
from random import Random

from rl_loop.environments import (
    RewardConfig,
    Task,
    arithmetic,
    environment_class,
    make_environment,
)
from rl_loop.tasks.demonstrations import (
    PlayedEpisode,
    play,
)


def generate_task(environment: str, index: int, **options: object) -> Task:
    kind = environment_class(environment)
    return kind.generate("train", 0, index, kind.Options.model_validate(options))


CHECKERS = ["punctuation:no_comma", "startend:quotation", "keywords:existence"]


def scripted_episode(task: Task, seed: int) -> PlayedEpisode:
    """Return an episode of the environment's script: correct for even seeds, else faulty."""
    environment = make_environment(task, arithmetic.interpret, RewardConfig())
    script = environment_class(task.environment).solve(
        task, Random(seed), inject_errors=bool(seed % 2)
    )
    return asyncio.run(play(environment, script))
