"""Any generator of reasoning-gym by name: the template that shows how short an environment is."""

import atexit
import importlib
import json
import math
import random
from contextlib import suppress
from functools import lru_cache
from typing import Any

from pydantic import Field

from rl_loop.environments.base import (
    Environment,
    EnvironmentOptions,
    Script,
    Split,
    StepResult,
    Task,
    final,
)
from rl_loop.extras import ExtraMissing
from rl_loop.infrastructure import describe
from rl_loop.rewards import CheckerFailure
from rl_loop.rewards.checker_pool import CheckerPool
from rl_loop.rewards.math_answer import last_boxed, normalised

DATASET_SIZE = 10_000
"""Items of one data set of a generator; some generators make a list of this length."""
SECONDS = 20.0
"""Processor time for one answer, which usually takes milliseconds. An answer that takes more is wrong,
unless the right answer takes as long."""
MEMORY_BYTES = 4 << 30
"""Address space of a process that scores: generators import numerical libraries."""


class ReasoningGymOptions(EnvironmentOptions):
    generator: str = "chain_sum"
    """A name of ``reasoning_gym.factory.DATASETS``, such as "gsm_symbolic"."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Of the generator, such as {max_terms: 3}; see its configuration class."""


class ReasoningGymEnvironment(Environment):
    """A question of a generator, scored by that generator.

    ``task.metadata["place"]``: generator, seed and settings of a data set, and a number in it."""

    Options = ReasoningGymOptions

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        block, number = divmod(index, DATASET_SIZE)
        # The split is part of the seed, so that the items of the two splits differ.
        block_seed = random.Random(f"{split}/{seed}/{block}").randrange(1 << 30)
        dataset = (options.generator, block_seed, json.dumps(options.settings))

        item = _dataset(*dataset)[number]
        return Task(
            task_id=f"{split}-{index}",
            messages=[{"role": "user", "content": item["question"] + r" Answer in \boxed{}."}],
            ground_truth=str(item["answer"]),
            environment="reasoning_gym",
            metadata={"place": [*dataset, number], "category": options.generator},
        )

    @classmethod
    def solve(cls, task: Task, rng: random.Random, faulty: bool) -> Script:
        answer = "unknown" if faulty else task.ground_truth
        yield [final(rf"\boxed{{{answer}}}")]

    async def answer(self, text: str) -> StepResult:
        boxed = last_boxed(text)
        if boxed is None:
            return self.finished(0.0)

        place = self.task.metadata["place"]
        # The control makes the data set too, whose time is not the answer's.
        score = await _processes.judged((place, boxed), too_expensive=0.0, control=(place, None))
        return self.finished(score, normalised(boxed))

    def reference_answer(self) -> str:
        return rf"\boxed{{{self.task.ground_truth}}}"


@lru_cache(maxsize=16)
def _dataset(generator: str, seed: int, settings: str) -> Any:
    """Make a data set of a generator; ``settings`` is JSON."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ExtraMissing("environment reasoning", "environments", error) from None

    return reasoning_gym.create_dataset(
        generator, seed=seed, size=DATASET_SIZE, **json.loads(settings)
    )


def prepare(_: None) -> None:
    """Import reasoning-gym, from which workers are forked that have it."""
    # Each question says what is missing.
    with suppress(ImportError):
        importlib.import_module("reasoning_gym")


def score(question: tuple[list[Any], str | None]) -> float:
    """Score an answer between 0 and 1. Runs in a worker.

    Many scorers raise on garbage, which the policy can write: the score is 0. A scorer that raises on
    the right answer too is broken, and says nothing about the policy.

    Args:
        question: place of the task, and the answer; None for the right answer.

    Raises:
        CheckerFailure: the generator's scorer does not work.
    """
    [*dataset, number], answer = question
    items = _dataset(*dataset)
    item = items[number]
    if answer is None:
        answer = item["answer"]
    try:
        return _checked(items.score_answer(answer, item))
    except Exception as error:
        # Is it the answer, or the scorer?
        try:
            _checked(items.score_answer(item["answer"], item))
        except Exception:
            raise CheckerFailure(f"the scorer of {dataset[0]} fails: {describe(error)}") from error
        return 0.0


_processes = CheckerPool(
    "the process that scores answers of reasoning-gym",
    f"{__name__}:score",
    prepare=f"{__name__}:prepare",
    seconds=SECONDS,
    memory_bytes=MEMORY_BYTES,
    control=None,
)
atexit.register(_processes.close)


def _checked(score: Any) -> float:
    """Return a scorer's result. Raises ValueError if it is no finite number."""
    if not math.isfinite(score):
        raise ValueError(f"a score of {score!r}")
    return float(score)
