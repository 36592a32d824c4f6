"""Demonstrations for supervised fine-tuning: episodes of scripts, in the tokens that a policy
would sample."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

from rl_loop.config.tasks import SourceConfig, TaskConfig
from rl_loop.config.training import DemonstrationConfig
from rl_loop.conversations.config import DataConfig
from rl_loop.conversations.corpus import conversation_texts
from rl_loop.environments import (
    ENVIRONMENTS,
    Script,
    StepResult,
    Task,
    environment_class,
    make_offline_environment,
)
from rl_loop.environments.base import Environment
from rl_loop.harmony.codec import (
    BuiltinTool,
    Harmony,
    ParsedMessage,
    PromptConfig,
    PythonTool,
    Tool,
)
from rl_loop.harmony.vocabulary import GptOssVocabulary, make_vocabulary

CORPUS_TASKS = 100
"""Demonstrations of a source that a tiny vocabulary is made for."""


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
    data: DataConfig | None = None
    """Conversations that it is made for instead, where those are learned."""


@dataclass
class Demonstration:
    """The tokens of an episode, or of a turn and what precedes it."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    """1 on what a policy would have sampled, 0 elsewhere; as long as ``token_ids``."""
    result: StepResult | None = None
    """What the last turn led to."""

    def add(self, ids: list[int], mask: int) -> None:
        """Append tokens that all have the same mask."""
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


# ---- making demonstrations


def demonstrate(
    task: Task, harmony: Harmony, mixture: DemonstrationConfig, seed: str
) -> Demonstration:
    """Make one episode on ``task`` as a rollout would have it, a function of the arguments.

    No code runs: environments simulate the Python that their scripts call."""
    return render_as_sampled(_play_script(task, mixture, seed), harmony)


def demonstrations_of(
    task: Task, harmony: Harmony, mixture: DemonstrationConfig, seed: str
) -> list[Demonstration]:
    """Make the samples of one episode on ``task``, rendered as ``mixture.history`` says."""
    episode = _play_script(task, mixture, seed)
    if mixture.history == "harmony":
        return render_by_user_turn(episode, harmony)
    return [render_as_sampled(episode, harmony)]


def _play_script(task: Task, mixture: DemonstrationConfig, seed: str) -> Episode:
    """Play an expert's or a faulty script on a task, as the mixture has it."""
    rng = Random(seed)
    environment = make_offline_environment(task)
    script = environment.solve(task, rng, faulty=rng.random() >= mixture.expert)
    return asyncio.run(play(environment, script))


async def play(environment: Environment, script: Script) -> Episode:
    """Play the episode of a scripted policy.

    Raises ValueError if the script ends before the episode does, and InfrastructureFailure if the
    environment cannot be opened, or a tool of it fails."""
    await environment.open()
    try:
        return await _play_opened(environment, script)
    finally:
        await environment.close()


async def _play_opened(environment: Environment, script: Script) -> Episode:
    episode = Episode(
        prompt=list(environment.prompt()),
        tools=environment.tools(),
        builtin_tools=environment.builtin_tools(),
        turns=[],
    )
    try:
        messages = next(script)
        while True:
            result = await environment.step(messages)
            episode.turns.append(Turn(messages, result))
            if result.done:
                return episode
            messages = script.send(result)
    except StopIteration:
        task_id = environment.task.task_id
        raise ValueError(f"the script of task {task_id} ends before the episode does") from None


# ---- episodes in tokens


def render_as_sampled(episode: Episode, harmony: Harmony) -> Demonstration:
    """Render the exact tokens of a rollout in which a policy samples the episode."""
    shown = Demonstration(result=episode.turns[-1].result)
    shown.add(harmony.render_prompt(episode.prompt, episode.tools, episode.builtin_tools), mask=0)

    last = len(episode.turns) - 1
    for i, turn in enumerate(episode.turns):
        calls_tool = turn.messages[-1].recipient is not None
        end: Literal["<|call|>", "<|return|>"] = "<|call|>" if calls_tool else "<|return|>"
        shown.add(harmony.render_assistant(turn.messages, end), mask=1)
        if i < last:
            shown.add(
                harmony.render_observation(turn.result.tool_outputs, turn.result.user), mask=0
            )

    return shown


def render_by_user_turn(episode: Episode, harmony: Harmony) -> list[Demonstration]:
    """Render a demonstration for each turn of the user, behind the history as the format has
    it."""
    demonstrations: list[Demonstration] = []
    prompt = list(episode.prompt)
    current: list[Turn] = []

    for turn in episode.turns:
        current.append(turn)
        if turn.result.done or turn.result.user is not None:
            demonstrations.append(
                render_as_sampled(replace(episode, prompt=prompt, turns=current), harmony)
            )
            history = [message for earlier in current for message in _as_conversation(earlier)]
            # What was said becomes history, which the format renders shorter than it was sampled.
            prompt = prompt + history
            current = []

    return demonstrations


def _as_conversation(turn: Turn) -> list[dict[str, Any]]:
    """Return a turn and what it led to as messages that ``Harmony.render_prompt`` takes."""
    messages: list[dict[str, Any]] = []
    for message in turn.messages:
        messages.append(
            {
                "role": "assistant",
                "channel": message.channel,
                "recipient": message.recipient,
                "content_type": message.content_type,
                "content": message.text,
            }
        )

    for output in turn.result.tool_outputs:
        messages.append(
            {"role": "tool", "name": output.tool, "channel": output.channel, "content": output.text}
        )
    if turn.result.user is not None:
        messages.append({"role": "user", "content": turn.result.user})
    return messages


# ---- the vocabulary that they are written in


def harmony_of(settings: HarmonySettings) -> Harmony:
    """Build the codec of a run. A tiny vocabulary is made for demonstrations of its generated
    tasks."""

    def corpus() -> str:
        # Episodes need an event loop of their own, and the caller may be running one.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(vocabulary_corpus, settings).result()

    vocabulary = make_vocabulary(settings.vocabulary, settings.vocabulary_size, corpus)
    return Harmony(vocabulary, settings.prompt, settings.tool_timeout_seconds)


def vocabulary_corpus(settings: HarmonySettings) -> str:
    """Return the text that a run's tiny vocabulary is made for.

    The texts of registered environments are in it whichever the run uses: words that every
    conversation has, such as "assistant", are then tokens of every tiny vocabulary."""
    harmony = Harmony(GptOssVocabulary(), settings.prompt, settings.tool_timeout_seconds)
    if settings.data is not None:
        return "\n".join(conversation_texts(settings.data, harmony))

    texts = [ENVIRONMENTS.resolve(name).vocabulary_text() for name in ENVIRONMENTS]
    lines = [text for text in texts if text]
    for source in settings.tasks.sources.values():
        text = environment_class(source.environment).vocabulary_text()
        if text and text not in lines:
            lines.append(text)
        if not text and source.held_out_path is None:
            lines += _demonstrated_texts(source, harmony)
    return "\n".join(lines)


def _demonstrated_texts(source: SourceConfig, harmony: Harmony) -> list[str]:
    """Return episodes on generated tasks of a source as text."""
    environment = environment_class(source.environment)
    options = environment.Options.model_validate(source.options)

    texts = []
    for i in range(CORPUS_TASKS):
        task = replace(environment.generate("train", 0, i, options), environment=source.environment)
        demonstration = demonstrate(task, harmony, DemonstrationConfig(), seed=str(i))
        texts.append(harmony.decode(demonstration.token_ids))
    return texts
