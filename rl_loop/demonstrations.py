"""Demonstrations for supervised fine-tuning: whole episodes of a scripted policy in the exact tokens of a rollout."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from rl_loop import arithmetic
from rl_loop.environments import RewardConfig, Script, StepResult, Task, environment_class, make_environment
from rl_loop.environments.base import Environment
from rl_loop.harmony import Harmony
from rl_loop.vocabulary import GptOssVocabulary, make_vocabulary

if TYPE_CHECKING:
    from rl_loop.config import RunConfig

CORPUS_TASKS = 100  # demonstrations that a tiny vocabulary is made for


class DemonstrationConfig(BaseModel):
    """The mixture of demonstrations."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    careful: float = Field(0.5, ge=0, le=1)
    """Share that solves its task; the others are careless and mostly fail, which leaves RL something to do."""


@dataclass
class Demonstration:
    """Token ids of an episode; the mask is 1 on what a policy would have sampled. Both of one length."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    result: StepResult | None = None

    def add(self, ids: list[int], mask: int) -> None:
        self.token_ids += ids
        self.loss_mask += [mask] * len(ids)


async def play(environment: Environment, script: Script, harmony: Harmony) -> Demonstration:
    """The episode of a scripted policy. Raises ValueError if the script ends before the episode does."""
    episode = Demonstration()
    episode.add(harmony.render_prompt(environment.prompt(), environment.tools()), 0)
    try:
        messages = next(script)
        while True:
            calls = messages[-1].recipient is not None
            episode.add(harmony.render_assistant(messages, "<|call|>" if calls else "<|return|>"), 1)
            episode.result = await environment.step(messages)
            if episode.result.done:
                return episode
            episode.add(harmony.render_observation(episode.result.tool_outputs, episode.result.user), 0)
            messages = script.send(episode.result)
    except StopIteration:
        raise ValueError(f"the script of task {environment.task.task_id} ends before the episode does") from None


def demonstrate(task: Task, harmony: Harmony, mixture: DemonstrationConfig, seed: str) -> Demonstration:
    """One demonstration of ``task``, a function of the arguments. No code runs: scripts call Python for sums."""
    rng = Random(seed)
    environment = make_environment(task, arithmetic.interpret, RewardConfig())
    script = environment_class(task.environment).solve(task, rng, careless=rng.random() >= mixture.careful)
    return asyncio.run(play(environment, script, harmony))


def harmony_of(config: "RunConfig") -> Harmony:
    """Rendering and parsing as a run does them. A tiny vocabulary is made for demonstrations of its generated tasks."""

    def corpus() -> str:
        with ThreadPoolExecutor(1) as thread:  # episodes need an event loop, and the caller may be running one
            return thread.submit(_corpus, config).result()

    return Harmony(make_vocabulary(config.vocabulary, config.model.vocab_size, corpus), config.prompt)


def _corpus(config: "RunConfig") -> str:
    harmony = Harmony(GptOssVocabulary(), config.prompt)
    lines = [arithmetic.vocabulary_text()]
    for source in config.tasks.sources.values():
        environment = environment_class(source.environment)
        options = environment.Options.model_validate(source.options)
        if source.held_out_path is None and source.environment != "retool":
            for i in range(CORPUS_TASKS):
                task = replace(environment.generate("train", 0, i, options), environment=source.environment)
                lines.append(harmony.decode(demonstrate(task, harmony, DemonstrationConfig(), str(i)).token_ids))
    return "\n".join(lines)
