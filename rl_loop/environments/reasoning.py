"""Any generator of reasoning-gym by name: the template that shows how short an environment is."""

import json
import random
from contextlib import suppress
from functools import lru_cache
from typing import Any

from pydantic import Field

from rl_loop.environments.base import Environment, EnvironmentOptions, Script, Split, StepResult, Task, final
from rl_loop.rewards.math_answer import last_boxed, normalised


class ReasoningGymOptions(EnvironmentOptions):
    generator: str = "chain_sum"
    """A name of ``reasoning_gym.factory.DATASETS``, such as "gsm_symbolic"."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Of the generator, such as {max_terms: 3}; see its configuration class."""


# items of one data set of the generator; some make a list of this length
SIZE = 10_000


@lru_cache(maxsize=16)
def _items(generator: str, seed: int, settings: str) -> Any:
    import reasoning_gym  # an extra: pip install 'megatron-gptoss[environments]'

    return reasoning_gym.create_dataset(generator, seed=seed, size=SIZE, **json.loads(settings))


class ReasoningGymEnvironment(Environment):
    Options = ReasoningGymOptions

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        part, index = divmod(index, SIZE)
        own_seed = random.Random(f"{split}/{seed}/{part}").randrange(1 << 30)
        place = (options.generator, own_seed, json.dumps(options.settings))
        item = _items(*place)[index]
        messages = [{"role": "user", "content": item["question"] + r" Answer in \boxed{}."}]
        metadata = {"place": [*place, index], "category": options.generator}
        return Task(f"{split}-{part * SIZE + index}", messages, str(item["answer"]), "reasoning_gym", metadata)

    @classmethod
    def solve(cls, task: Task, rng: random.Random, careless: bool) -> Script:
        yield [final(rf"\boxed{{{'unknown' if careless else task.ground_truth}}}")]

    async def answer(self, text: str) -> StepResult:
        *place, index = self.task.metadata["place"]
        items, given, score = _items(*place), last_boxed(text), 0.0
        with suppress(Exception):  # some generators raise on garbage
            score = float(items.score_answer(given, items[index]))
        return self.finished(score if given is not None else 0.0, normalised(given))
