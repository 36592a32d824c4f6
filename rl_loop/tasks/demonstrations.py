"""Demonstrations for supervised fine-tuning: episodes of a scripted policy in the tokens that a policy would sample."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

from rl_loop.config.tasks import TaskConfig
from rl_loop.config.training import DemonstrationConfig
from rl_loop.environments import RewardConfig, Script, StepResult, Task, arithmetic, environment_class, make_environment
from rl_loop.environments.base import Environment
from rl_loop.harmony.codec import BuiltinTool, Harmony, ParsedMessage, PromptConfig, PythonTool, Tool
from rl_loop.harmony.vocabulary import GptOssVocabulary, make_vocabulary

CORPUS_TASKS = 100  # demonstrations that a tiny vocabulary is made for


@dataclass(frozen=True)
class HarmonySettings:
    """The settings that decide how a run renders and parses episodes."""

    vocabulary: Literal["gptoss", "tiny"]
    """Token ids of the released models, or the few that generated tasks need."""
    vocabulary_size: int
    """Rows of the model's embedding, which a tiny vocabulary must fit."""
    prompt: PromptConfig
    """The system message."""
    tool_timeout_seconds: float
    """What the description of the Python tool says of its time limit."""
    tasks: TaskConfig
    """What a tiny vocabulary is made for."""


@dataclass
class Demonstration:
    """Token ids of an episode, or of a turn and what precedes it; the mask is 1 on what a policy would have sampled.
    Both of one length."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    result: StepResult | None = None  # what the last turn led to

    def add(self, ids: list[int], mask: int) -> None:
        self.token_ids += ids
        self.loss_mask += [mask] * len(ids)


@dataclass(frozen=True)
class Turn:
    """What a scripted policy wrote in one turn, and what it led to."""

    messages: list[ParsedMessage]
    result: StepResult


@dataclass(frozen=True)
class Episode:
    """A scripted episode, not yet in tokens."""

    prompt: list[dict[str, Any]]
    tools: Sequence[Tool]
    builtin_tools: Sequence[BuiltinTool | PythonTool]
    turns: list[Turn]


async def play(environment: Environment, script: Script) -> Episode:
    """The episode of a scripted policy. Raises ValueError if the script ends before the episode does."""
    turns: list[Turn] = []
    episode = Episode(list(environment.prompt()), environment.tools(), environment.builtin_tools(), turns)
    try:
        messages = next(script)
        while True:
            result = await environment.step(messages)
            turns.append(Turn(messages, result))
            if result.done:
                return episode
            messages = script.send(result)
    except StopIteration:
        raise ValueError(f"the script of task {environment.task.task_id} ends before the episode does") from None


def render_as_sampled(episode: Episode, harmony: Harmony) -> Demonstration:
    """The exact tokens of a rollout in which a policy samples the episode: appended one turn after the other."""
    shown = Demonstration(result=episode.turns[-1].result)
    shown.add(harmony.render_prompt(episode.prompt, episode.tools, episode.builtin_tools), 0)

    for i, turn in enumerate(episode.turns):
        calls = turn.messages[-1].recipient is not None
        shown.add(harmony.render_assistant(turn.messages, "<|call|>" if calls else "<|return|>"), 1)
        if i < len(episode.turns) - 1:
            shown.add(harmony.render_observation(turn.result.tool_outputs, turn.result.user), 0)

    return shown


def render_by_user_turn(episode: Episode, harmony: Harmony) -> list[Demonstration]:
    """One demonstration for each turn of the user, with the history before it as the format renders it."""
    demonstrations: list[Demonstration] = []
    prompt = list(episode.prompt)
    current: list[Turn] = []

    for turn in episode.turns:
        current.append(turn)
        if turn.result.done or turn.result.user is not None:
            demonstrations.append(render_as_sampled(replace(episode, prompt=prompt, turns=current), harmony))
            prompt = prompt + [message for done in current for message in _as_conversation(done)]
            current = []

    return demonstrations


def demonstrate(task: Task, harmony: Harmony, mixture: DemonstrationConfig, seed: str) -> Demonstration:
    """One episode on ``task`` as a rollout has it, a function of the arguments. No code runs: scripts call Python for
    sums."""
    return render_as_sampled(_play_script(task, mixture, seed), harmony)


def demonstrations_of(task: Task, harmony: Harmony, mixture: DemonstrationConfig, seed: str) -> list[Demonstration]:
    """The samples that one episode on ``task`` gives to fine-tuning, rendered as ``mixture.history`` says."""
    episode = _play_script(task, mixture, seed)
    if mixture.history == "harmony":
        return render_by_user_turn(episode, harmony)
    return [render_as_sampled(episode, harmony)]


def _play_script(task: Task, mixture: DemonstrationConfig, seed: str) -> Episode:
    rng = Random(seed)
    environment = make_environment(task, arithmetic.interpret, RewardConfig())
    script = environment_class(task.environment).solve(task, rng, careless=rng.random() >= mixture.careful)
    return asyncio.run(play(environment, script))


def _as_conversation(turn: Turn) -> list[dict[str, Any]]:
    """A turn and what it led to as messages that ``Harmony.render_prompt`` takes."""
    messages: list[dict[str, Any]] = [
        {
            "role": "assistant",
            "channel": message.channel,
            "recipient": message.recipient,
            "content_type": message.content_type,
            "content": message.text,
        }
        for message in turn.messages
    ]
    for output in turn.result.tool_outputs:
        messages.append({"role": "tool", "name": output.tool, "channel": output.channel, "content": output.text})
    if turn.result.user is not None:
        messages.append({"role": "user", "content": turn.result.user})
    return messages


def harmony_of(settings: HarmonySettings) -> Harmony:
    """Build the codec of a run. A tiny vocabulary is made for demonstrations of its generated tasks."""

    def corpus() -> str:
        with ThreadPoolExecutor(1) as thread:  # episodes need an event loop, and the caller may be running one
            return thread.submit(_corpus, settings).result()

    vocabulary = make_vocabulary(settings.vocabulary, settings.vocabulary_size, corpus)
    return Harmony(vocabulary, settings.prompt, settings.tool_timeout_seconds)


def _corpus(settings: HarmonySettings) -> str:
    harmony = Harmony(GptOssVocabulary(), settings.prompt, settings.tool_timeout_seconds)
    lines = [arithmetic.vocabulary_text()]
    for source in settings.tasks.sources.values():
        environment = environment_class(source.environment)
        options = environment.Options.model_validate(source.options)
        if source.held_out_path is None and source.environment != "retool":
            for i in range(CORPUS_TASKS):
                task = replace(environment.generate("train", 0, i, options), environment=source.environment)
                lines.append(harmony.decode(demonstrate(task, harmony, DemonstrationConfig(), str(i)).token_ids))
    return "\n".join(lines)
