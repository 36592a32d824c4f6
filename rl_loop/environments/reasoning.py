"""Environment for all generators of reasoning-gym, and a template for short environments."""

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
    ScriptedPolicy,
    Split,
    StepResult,
    Task,
)
from rl_loop.environments.scripted_messages import final
from rl_loop.extras import MissingExtraError
from rl_loop.infrastructure import describe
from rl_loop.rewards import CheckerError
from rl_loop.rewards.checker_pool import CheckerPool
from rl_loop.rewards.math_answer import last_boxed, normalize_answer

DATASET_SIZE = 10_000
"""Items per data set of a generator. Some generators create a list of this length."""
SECONDS = 20.0
"""Limit of processor time for scoring one answer, which usually takes milliseconds.

A slower answer is wrong, unless the correct answer is as slow.
"""
MEMORY_BYTES = 4 << 30
"""Limit of the scoring process's address space. Generators import numerical libraries."""


class ReasoningGymOptions(EnvironmentOptions):
    generator: str = "chain_sum"
    """Name in ``reasoning_gym.factory.DATASETS``, such as "gsm_symbolic"."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the generator's configuration class, such as {max_terms: 3}."""


class ReasoningGymEnvironment(Environment):
    """Question of a generator, scored by the generator.

    ``task.metadata["place"]`` holds generator, seed and settings of a data set, and the index of the
    item.
    """

    Options = ReasoningGymOptions

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        # A data set is finite, but the index has no limit. Each block has a separate data set.
        block, number = divmod(index, DATASET_SIZE)
        # The seed depends on the split, so that the splits have different items.
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
    def solve(cls, task: Task, rng: random.Random, inject_errors: bool) -> ScriptedPolicy:
        answer = "unknown" if inject_errors else task.ground_truth
        yield [final(rf"\boxed{{{answer}}}")]

    async def answer(self, text: str) -> StepResult:
        # Only text in the box is an answer.
        boxed = last_boxed(text)
        if boxed is None:
            return self.end_with_score(0.0)

        place = self.task.metadata["place"]
        # The control also creates the data set, so that its time does not count for the answer.
        score = await _processes.judge_async(
            (place, boxed), too_expensive=0.0, control=(place, None)
        )
        return self.end_with_score(score, normalize_answer(boxed))

    def reference_answer(self) -> str:
        return rf"\boxed{{{self.task.ground_truth}}}"


@lru_cache(maxsize=16)
def _dataset(generator: str, seed: int, settings: str) -> Any:
    """Return a data set of a generator. ``settings`` is JSON text."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingExtraError("environment reasoning", "environments", error) from None

    # Settings are JSON text, because lru_cache needs hashable arguments.
    return reasoning_gym.create_dataset(
        generator, seed=seed, size=DATASET_SIZE, **json.loads(settings)
    )


def prepare(_: None) -> None:
    """Import reasoning-gym in the process that forks the workers."""
    # If the package is missing, each question reports it.
    with suppress(ImportError):
        importlib.import_module("reasoning_gym")


def score(question: tuple[list[Any], str | None]) -> float:
    """Return the score of an answer, between 0 and 1. Runs in a worker.

    Many scorers raise an exception on malformed answers, which then score 0. A scorer that also raises
    on the correct answer is broken and says nothing about the policy.

    Args:
        question: place of the task, and the answer; None stands for the correct answer.

    Raises:
        CheckerError: if the generator's scorer is broken.
    """
    [*dataset, number], answer = question
    items = _dataset(*dataset)
    item = items[number]
    if answer is None:
        answer = item["answer"]
    try:
        return _check_score(items.score_answer(answer, item))
    except Exception as error:
        # The correct answer tells a malformed answer from a broken scorer.
        try:
            _check_score(items.score_answer(item["answer"], item))
        except Exception:
            raise CheckerError(f"the scorer of {dataset[0]} fails: {describe(error)}") from error
        return 0.0


_processes = CheckerPool(
    "the process that scores answers of reasoning-gym",
    f"{__name__}:score",
    prepare=f"{__name__}:prepare",
    seconds=SECONDS,
    memory_bytes=MEMORY_BYTES,
    # Each question brings its own control.
    control=None,
)
atexit.register(_processes.close)


def _check_score(score: Any) -> float:
    """Return a scorer's result. Raises ValueError if it is not a finite number."""
    if not math.isfinite(score):
        raise ValueError(f"the score is {score!r}, not a finite number")
    return float(score)
