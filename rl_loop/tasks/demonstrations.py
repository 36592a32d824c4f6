"""Demonstrations for supervised fine-tuning: scripted episodes as a policy would sample them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import ParsedMessage
from rl_loop.chat.tools import BuiltinTool, PythonTool, Tool
from rl_loop.config.training import DemonstrationConfig
from rl_loop.environments import ScriptedPolicy, StepResult, Task, make_offline_environment
from rl_loop.environments.base import Environment


@dataclass
class Demonstration:
    """Tokens of an episode, or of a turn with its history."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    """1 for tokens that a policy would have sampled, else 0. As long as ``token_ids``."""
    result: StepResult | None = None
    """Result of the last turn."""

    def add(self, ids: list[int], mask: int) -> None:
        """Append tokens that all have the same mask."""
        self.token_ids += ids
        self.loss_mask += [mask] * len(ids)


@dataclass(frozen=True)
class PlayedTurn:
    """One turn of a scripted policy, with its result."""

    messages: list[ParsedMessage]
    result: StepResult


@dataclass(frozen=True)
class PlayedEpisode:
    """Scripted episode before tokenization."""

    prompt: list[dict[str, Any]]
    tools: Sequence[Tool]
    builtin_tools: Sequence[BuiltinTool | PythonTool]
    turns: list[PlayedTurn]


# ---- creating demonstrations


def demonstrate(
    task: Task, codec: ChatCodec, mixture: DemonstrationConfig, seed: str
) -> Demonstration:
    """Return one episode on ``task`` as in a rollout. Equal arguments give equal episodes."""
    # No code runs, because environments simulate the Python calls of their scripts.
    return render_as_sampled(_play_script(task, mixture, seed), codec)


def build_demonstrations(
    task: Task, codec: ChatCodec, mixture: DemonstrationConfig, seed: str
) -> list[Demonstration]:
    """Return the samples of one episode on ``task``, rendered according to ``mixture.history``."""
    episode = _play_script(task, mixture, seed)
    if mixture.history == "harmony":
        return render_by_user_turn(episode, codec)
    return [render_as_sampled(episode, codec)]


def _play_script(task: Task, mixture: DemonstrationConfig, seed: str) -> PlayedEpisode:
    """Run an expert's or a faulty script on a task, chosen according to the mixture."""
    rng = Random(seed)
    environment = make_offline_environment(task)
    script = environment.solve(task, rng, inject_errors=rng.random() >= mixture.correct_fraction)
    return asyncio.run(play(environment, script))


async def play(environment: Environment, script: ScriptedPolicy) -> PlayedEpisode:
    """Run the episode of a scripted policy.

    Raises:
        ValueError: if the script ends before the episode.
        InfrastructureError: if the environment or one of its tools fails.
    """
    # As the agent loop does, because a prompt may need an open environment.
    await environment.open()
    try:
        return await _play_in_environment(environment, script)
    finally:
        await environment.close()


async def _play_in_environment(environment: Environment, script: ScriptedPolicy) -> PlayedEpisode:
    episode = PlayedEpisode(
        prompt=list(environment.prompt()),
        tools=environment.tools(),
        builtin_tools=environment.builtin_tools(),
        turns=[],
    )
    try:
        # The first turn has no earlier turn. Each later one is sent the result of the turn before.
        messages = next(script)
        while True:
            result = await environment.step(messages)
            episode.turns.append(PlayedTurn(messages, result))
            if result.done:
                return episode
            messages = script.send(result)
    except StopIteration:
        task_id = environment.task.task_id
        raise ValueError(
            f"task {task_id}: {type(environment).__name__}.solve ended before step() returned done=True. "
            "Yield messages until the episode is done"
        ) from None


# ---- episodes in tokens


def render_as_sampled(episode: PlayedEpisode, codec: ChatCodec) -> Demonstration:
    """Render the exact tokens of a rollout in which a policy samples the episode."""
    shown = Demonstration(result=episode.turns[-1].result)
    shown.add(codec.render_prompt(episode.prompt, episode.tools, episode.builtin_tools), mask=0)

    # No turn follows the last result, so a rollout would not contain it either.
    last = len(episode.turns) - 1
    for i, turn in enumerate(episode.turns):
        shown.add(codec.render_assistant(turn.messages), mask=1)
        if i < last:
            shown.add(codec.render_observation(turn.result.tool_outputs, turn.result.user), mask=0)

    return shown


def render_by_user_turn(episode: PlayedEpisode, codec: ChatCodec) -> list[Demonstration]:
    """Render a demonstration for each turn of the user, with the history of the format."""
    demonstrations: list[Demonstration] = []
    prompt = list(episode.prompt)
    current: list[PlayedTurn] = []

    for turn in episode.turns:
        current.append(turn)
        # A new message of the user makes Harmony drop earlier reasoning, which changes the
        # tokens.
        if turn.result.done or turn.result.user is not None:
            demonstrations.append(
                render_as_sampled(replace(episode, prompt=prompt, turns=current), codec)
            )
            history = [message for earlier in current for message in _as_conversation(earlier)]
            # In history, the format renders turns shorter than they were sampled.
            prompt = prompt + history
            current = []

    return demonstrations


def _as_conversation(turn: PlayedTurn) -> list[dict[str, Any]]:
    """Return a turn and its result as messages for ``Harmony.render_prompt``."""
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
