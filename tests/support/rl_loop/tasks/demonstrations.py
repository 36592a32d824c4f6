"""Episodes by the scripts of environments."""

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
    Episode,
    play,
)


def task_of(environment: str, index: int, **options: object) -> Task:
    kind = environment_class(environment)
    return kind.generate("train", 0, index, kind.Options.model_validate(options))


CHECKERS = ["punctuation:no_comma", "startend:quotation", "keywords:existence"]


def scripted_episode(task: Task, seed: int) -> Episode:
    """What the environment's own script writes, right on even seeds and faulty on odd ones."""
    environment = make_environment(task, arithmetic.interpret, RewardConfig())
    script = environment_class(task.environment).solve(task, Random(seed), faulty=bool(seed % 2))
    return asyncio.run(play(environment, script))
